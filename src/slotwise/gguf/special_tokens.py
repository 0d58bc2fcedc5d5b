"""Special tokens in the metadata of a GGUF file: their ids, and which of them end a text.

Files of chat models often name one end token, and hold others.  As in llama.cpp, those of known texts end a text, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.gguf.metadata import Metadata

TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
NAMED = {  # fields of a tokenizer_config.json, by their keys
    "tokenizer.ggml.bos_token_id": "bos_token", "tokenizer.ggml.eos_token_id": "eos_token",
    "tokenizer.ggml.unknown_token_id": "unk_token", "tokenizer.ggml.padding_token_id": "pad_token",
    "tokenizer.ggml.seperator_token_id": "sep_token", "tokenizer.ggml.mask_token_id": "mask_token",
}  # fmt: skip
ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
END_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
    "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
})  # fmt: skip
CONTROL = 3  # a token's type: special


def end_token_ids(metadata: Metadata) -> list[int]:
    """The ids of the tokens that end a text; none outside the vocabulary.

    Raises CheckpointError when an id is malformed.
    """
    tokens, types = metadata.texts(TOKENS), metadata.numbers(TOKEN_TYPES)
    named = [metadata.integer(key) for key in ENDS if metadata.has(key)]
    by_text = [number for number, token in enumerate(tokens)
               if token in END_TEXTS and number < len(types) and types[number] == CONTROL]
    return [number for number in dict.fromkeys(named + by_text) if number < len(tokens)]


def named_tokens(metadata: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    """The texts of named special tokens, as fields of a tokenizer_config.json.

    Raises CheckpointError when an id is malformed or outside the vocabulary.
    """
    named = {}
    for key, name in NAMED.items():
        if metadata.has(key):
            number = metadata.integer(key)
            if number < len(tokens):
                named[name] = tokens[number]
            elif name in ("bos_token", "eos_token"):
                raise metadata.error(key, f"is {number}, but the vocabulary has {len(tokens)} tokens")
    return named
