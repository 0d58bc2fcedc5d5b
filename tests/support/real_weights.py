"""The real model of the tests: SmolLM2-135M-Instruct, and a checkpoint of it built by code of its own.

The file is the one that `slotwise pull smollm2` downloads: `make test` does so first.  The `gguf` package reads and
dequantizes it here; transformers and the product load the same float32 checkpoint.  What transformers computes from it
stands in tests/real_weights/reference.json, which `support.real_reference` writes.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.real_texts import documents, windows

from slotwise.compute.model.published_models import PUBLISHED, present

REFERENCE = Path(__file__).parents[1] / "real_weights" / "reference.json"
OUTPUT = 24  # tokens of a continuation, at most
SYSTEM = "You are a careful assistant. Answer in one short sentence."
FUNCTION = '''def total_price(items, tax):
    total = 0
    for item in items:
        total = total + item.price * item.count
    return total + total * tax
'''
CHATS: dict[str, list[dict[str, str]]] = {
    "capital": [{"role": "user", "content": "What is the capital of France?"}],
    "sky": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Why is the sky blue?"}],
    "water": [{"role": "user", "content": "What is the chemical formula of water?"}],
    "sum": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is 7 plus 5?"}],
    "haiku": [{"role": "user", "content": "Write a haiku about the sea.\nUse plain words."}],
    "list": [{"role": "user", "content": "List three fruits, one on a line:\n1."}],
    "translate": [{"role": "user", "content": "Translate to French: \"Good morning, my friend.\""}],
    "turns": [
        {"role": "user", "content": "My name is Ada, and I like trains."},
        {"role": "assistant", "content": "Nice to meet you, Ada! Do you like steam trains?"},
        {"role": "user", "content": "Yes. What is my name?"}],
    "function": [{"role": "user", "content": f"What does this function compute?\n\n```python\n{FUNCTION}```"}],
    "edit": [{"role": "user", "content": f"Repeat this code exactly:\n\n```python\n{FUNCTION}```"}],
    "unicode": [{"role": "user", "content": "Was heißt „Straße“ auf Englisch? 日本語もお願いします 🙂"}],
}
SLICES: tuple[tuple[str, int, int], ...] = (  # a document, the first token or a little before it, how many
    ("documentation", 2000, 1), ("code", 1500, 2), ("license", 40, 3), ("code", 3000, 7), ("documentation", 5000, 15),
    ("license", 300, 16), ("code", 600, 17), ("documentation", 700, 31), ("license", 700, 32), ("code", 2000, 33),
    ("documentation", 1200, 63), ("code", 5100, 64), ("license", 1000, 65), ("documentation", 6100, 100),
    ("documentation", 8200, 129), ("documentation", 2500, 1100))
SCORED: tuple[tuple[str, int, int], ...] = (
    ("license", 1100, 40), ("documentation", 4030, 40), ("code", 2600, 40))  # log-probabilities of these


def find() -> Path:
    """The file; without it the test is skipped or, where `SLOTWISE_REAL_WEIGHTS` is `required`, as in CI, it fails."""
    if (path := present(PUBLISHED["smollm2"])) is not None:
        return path
    missing = "the weights of smollm2 are not in the cache folder: run `slotwise pull smollm2`"
    if os.environ.get("SLOTWISE_REAL_WEIGHTS") == "required":
        pytest.fail(missing)
    pytest.skip(missing)


def slice_of(one: tuple[str, int, int]) -> list[int]:
    """Token ids of a part of a document."""
    name, first, number = one
    ids = documents()[name][first : first + number]
    assert len(ids) == number, one
    return ids


def read_texts() -> list[list[int]]:
    """The texts whose perplexity is measured: the beginnings of four windows, of all documents."""
    return windows(160)[1::5]


@cache
def reference() -> dict[str, Any]:
    """What transformers computed in float32, as `support.real_reference` has written it."""
    found: dict[str, Any] = json.loads(REFERENCE.read_text())
    return found


# -- the checkpoint ----------------------------------------------------------------------------------------------------

_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def checkpoint(file: Path, folder: Path) -> Path:
    """Writes the model of a GGUF file as a checkpoint: dequantized float32, a config and a tokenizer."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = (fields[f"llama.attention.{name}"] for name in ("head_count", "head_count_kv"))
    tensors = {}
    for tensor in reader.tensors:
        tensors[name_of(tensor.name)] = torch.from_numpy(_numbers(tensor, heads, kv_heads))
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bos, eos, pad = (fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding"))
    ends = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    (folder / "config.json").write_text(json.dumps(ends | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "hidden_size": fields["llama.embedding_length"], "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": fields["llama.vocab_size"], "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"], "hidden_act": "silu",
        "rope_theta": fields["llama.rope.freq_base"], "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False}))
    (folder / "generation_config.json").write_text(json.dumps(ends))
    _write_tokenizer(fields, folder)
    return folder


def name_of(tensor: str) -> str:
    """The name in a checkpoint of a tensor in a GGUF file."""
    if tensor in _WHOLE:
        return _WHOLE[tensor]
    _, layer, kind, _ = tensor.split(".")
    return f"model.layers.{layer}.{_NAMES[kind]}.weight"


def _numbers(tensor: Any, heads: int, kv_heads: int) -> np.ndarray:
    """A tensor's numbers in the order of a checkpoint: llama.cpp puts halves of a head's rows side by side."""
    from gguf.quants import dequantize

    numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    numbers = numbers.reshape([int(size) for size in reversed(tensor.shape)])
    for kind, number in (("attn_q", heads), ("attn_k", kv_heads)):
        if f".{kind}." in tensor.name:
            numbers = numbers.reshape(number, -1, 2, numbers.shape[1]).swapaxes(1, 2).reshape(numbers.shape)
    return np.ascontiguousarray(numbers)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """SmolLM2's tokenizer: each digit is a word, other words are GPT-2's, their bytes are merged."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    control = 3
    special = [{"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True}
               for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == control]
    octets = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, octets]},
        "post_processor": None, "decoder": octets,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: number for number, token in enumerate(tokens)},
                  "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]}}))
    begin, end = (tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end, "pad_token": end,
        "chat_template": fields["tokenizer.chat_template"], "clean_up_tokenization_spaces": False}))
