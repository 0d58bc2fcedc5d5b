"""A checkpoint that says what a test wants: real weights, whose most probable token is the next one of a script.

Each token of a script is a token of its own: the last token alone decides which one follows.  So the scripts are cut
into pieces of which no two are equal, and a prompt that ends with a script's key is answered with the script.

    key ─► piece ─► piece ─► ... ─► end token

A row of the embedding is a random direction; the row of the output matrix for its follower points the same way.
Attention and MLP write nothing.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

HIDDEN = 256
TEMPLATE = ('{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{"name", "arguments"}</tool_call>{% endif %}'
            "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
            "{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}")
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PERSON = '{"name": "Ada", "age": 36}'
SCRIPTS = {
    "#weather": "I look it up.\n" + WEATHER,
    "#rome": WEATHER.replace("Paris", "Rome"),
    "#reason": "<think>\nWhere is Paris?\n</think>\n\nIn France.",
    "#sunny": "It is sunny.",
    "#person": f'<tool_call>\n{{"name": "Person", "arguments": {PERSON}}}\n</tool_call>',
    "#json": PERSON,
    "#path": "a/b and more",
    "#wrong": '<tool_call>\n{"name": "weather", "arguments": {"town": 5, "x": []}}\n</tool_call>',
    "#considered": "<think>\nShe was thirty-six, and that is all.\n</think>\n\n" + PERSON.replace(" ", ""),
}


def write(folder: Path, scripts: Mapping[str, str] = SCRIPTS, template: str = TEMPLATE,
          special: Sequence[str] = ()) -> Path:
    """Writes the checkpoint, in float32, and returns its folder.

    Args:
        scripts: what follows a prompt that ends with a key.
        special: further special tokens; each may stand in one script, once.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *special])
    chains, used = [], set[str]()
    for key, text in scripts.items():
        pieces = []
        for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]:
            pieces += [part] if part in special else _pieces(part, used)
            used.update(pieces)
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (key, *pieces) if piece not in special])
        chains.append([key, *pieces, "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "chat_template": template}))
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("</s>")
    config = LlamaConfig(
        vocab_size=size, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=4096, eos_token_id=end, bos_token_id=end - 1,
        tie_word_embeddings=False)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        directions = torch.nn.functional.normalize(torch.randn(size, HIDDEN))
        model.model.embed_tokens.weight.copy_(directions)
        model.lm_head.weight.zero_()
        for chain in chains:
            ids = [tokenizer.token_to_id(token) for token in chain]
            for token, follower in itertools.pairwise(ids):
                model.lm_head.weight[follower] += 4 * directions[token]
        for name, tensor in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
    model.save_pretrained(folder)
    return folder


def _pieces(text: str, used: set[str]) -> list[str]:
    """A text cut into short pieces of two characters or more, none of which is used or stands twice."""
    draw = random.Random(text)
    for _ in range(1000):
        pieces, at = list[str](), 0
        while at < len(text):
            lengths = [length for length in range(2, 9) if at + length in (*range(len(text) - 1), len(text))
                       and text[at : at + length] not in {*used, *pieces}]
            if not lengths:
                break
            pieces.append(text[at : at + draw.choice(lengths[:2])])
            at += len(pieces[-1])
        if at == len(text):
            return pieces
    raise ValueError(f"{text!r} has too few different pieces")
