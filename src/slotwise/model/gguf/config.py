"""The config of a GGUF file: its metadata under the names of a config.json, each value checked under its own.

    llama.block_count   num_hidden_layers        shapes and names of tensors   vocab_size, tied head, biases, dtype
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from slotwise.gguf.metadata import Metadata
from slotwise.gguf.model import GGUFModel, open_model
from slotwise.gguf.special_tokens import end_token_ids
from slotwise.model.config import MAX_LAYERS, ModelConfig
from slotwise.model.errors import CheckpointError
from slotwise.model.families import FAMILIES, configure
from slotwise.model.fields import Fields
from slotwise.model.gguf.architectures import ARCHITECTURES, ROPE_FACTORS, Architecture
from slotwise.model.layers.rope import DividedRope

ARCHITECTURE = "general.architecture"
MAX_WIDTH = 1 << 24
MAX_THETA = 1e12
MAX_FACTOR = 1e6  # of a rope's scaling
MIN_EPS = 1e-12
_DTYPES = {"F32": "float32", "F16": "float16"}  # of most weights; bfloat16 computes with all others


def read_gguf_config(path: Path) -> ModelConfig:
    """The decoder that a GGUF file describes.

    Raises CheckpointError when a value is absent, malformed or contradicts another or the tensors, and for
    architectures that are not supported; the message names file and key.
    """
    model = open_model(path)
    architecture = architecture_of(model.metadata)
    fields = Fields(_Keys(model, architecture).fields(), str(path))
    config = configure(fields)
    factors = _rope_factors(model, config.head_dim // 2)
    return replace(config, rope=DividedRope(config.rope.theta, factors)) if factors else config


def architecture_of(metadata: Metadata) -> Architecture:
    """Raises CheckpointError for one that is not supported."""
    name = metadata.text(ARCHITECTURE)
    found = ARCHITECTURES.get(name)
    if found is None or found.served_as not in FAMILIES:
        served = [name for name, one in ARCHITECTURES.items() if one.served_as in FAMILIES]
        raise metadata.error(ARCHITECTURE, f"{name!r:.40} is not supported; these are: {', '.join(served)}")
    return found


class _Keys:
    """The metadata of one file, with the architecture's name before each key."""

    def __init__(self, model: GGUFModel, architecture: Architecture) -> None:
        self._metadata, self._tensors = model.metadata, model.tensors
        self._architecture = architecture
        self._prefix = model.metadata.text(ARCHITECTURE)

    def fields(self) -> dict[str, Any]:
        """Fields of a config.json."""
        layers = self._integer("block_count", maximum=MAX_LAYERS)
        hidden = self._integer("embedding_length")
        heads = self._alike("attention.head_count", layers)
        kv_heads = self._alike("attention.head_count_kv", layers, default=heads)
        if heads % kv_heads:
            raise self._error("attention.head_count", f"({heads}) must be a multiple of head_count_kv ({kv_heads})")
        head_dim = self._head_dim(hidden, heads)
        if self._integer("expert_count", default=0, minimum=0):
            raise self._error("expert_count", "is set: mixtures of experts are not supported in this architecture")
        context = self._integer("context_length")
        return {
            "architectures": [self._architecture.served_as], "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "intermediate_size": self._alike("feed_forward_length", layers), "max_position_embeddings": context,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", minimum=MIN_EPS, maximum=1.0),
            "vocab_size": self._vocab_size(hidden), "tie_word_embeddings": "output.weight" not in self._tensors,
            "eos_token_id": end_token_ids(self._metadata), "dtype": self._dtype(),
            "attention_bias": "blk.0.attn_q.bias" in self._tensors and "blk.0.attn_output.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors, "rope_parameters": self._rope(context),
        } | (_OTHERS[self._prefix](self) if self._prefix in _OTHERS else {})  # fmt: skip

    def _head_dim(self, hidden: int, heads: int) -> int:
        if not self._has("attention.key_length") and hidden % heads:
            raise self._error("embedding_length", f"({hidden}) must be a multiple of attention.head_count ({heads})")
        head_dim = self._integer("attention.key_length", default=hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, default=head_dim) != head_dim:
                raise self._error(key, f"({self._integer(key)}) must be the size of a head ({head_dim})")
        if head_dim % 2:
            raise self._error("attention.key_length", f"({head_dim}) must be even for rotary embeddings")
        return head_dim

    def _vocab_size(self, hidden: int) -> int:
        """The rows of the table: more than tokens, in some files."""
        if "token_embd.weight" not in self._tensors:
            raise CheckpointError(f"{self._metadata.where}: tensor token_embd.weight is missing")
        shape = self._tensors["token_embd.weight"][1].shape
        if len(shape) != 2 or shape[1] != hidden:
            raise self._error("embedding_length", f"is {hidden}, but token_embd.weight has shape {list(shape)}")
        if self._has("vocab_size") and self._integer("vocab_size") != shape[0]:
            raise self._error("vocab_size", f"is {self._integer('vocab_size')}, but token_embd.weight has {shape[0]} "
                              "rows")
        return shape[0]

    def _dtype(self) -> str:
        """What most weights of products are stored as; bfloat16 computes with what is neither it nor float32."""
        sizes: Counter[str] = Counter()
        for _, tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                sizes[tensor.type.name] += prod(tensor.shape)
        return _DTYPES.get(sizes.most_common(1)[0][0], "bfloat16")

    def _rope(self, context: int) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_type": "default", "rope_theta": self._number("rope.freq_base", 10_000.0, minimum=1.0,
                                                               maximum=MAX_THETA)}
        kind = self._text("rope.scaling.type", "linear" if self._has("rope.scale_linear") else "none")
        if kind == "none":
            return rope
        older = self._number("rope.scale_linear", 1.0, minimum=0.01, maximum=MAX_FACTOR)
        factor = self._number("rope.scaling.factor", older, minimum=0.01, maximum=MAX_FACTOR)
        if kind == "linear":
            return rope | {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise self._error("rope.scaling.type", f"{kind!r:.40} is not supported; these are: none, linear, yarn")
        sharper = self._number("rope.scaling.attn_factor", 1.0, maximum=MAX_FACTOR)
        return rope | {
            "rope_type": "yarn", "factor": factor,
            "attention_factor": sharper * (0.1 * math.log(max(factor, 1.0)) + 1.0),
            "beta_fast": self._number("rope.scaling.yarn_beta_fast", 32.0, maximum=MAX_FACTOR),
            "beta_slow": self._number("rope.scaling.yarn_beta_slow", 1.0, maximum=MAX_FACTOR),
            "original_max_position_embeddings": self._integer("rope.scaling.original_context_length",
                                                              default=context)}

    def gemma2(self) -> dict[str, Any]:
        """Its soft caps and window; the scale of scores is the head's size but in the largest, which has 46 layers."""
        heads, hidden = self._integer("attention.head_count"), self._integer("embedding_length")
        layers = self._integer("block_count", maximum=MAX_LAYERS)
        largest = layers == GEMMA2_27B_LAYERS
        return {
            "query_pre_attn_scalar": hidden / heads if largest else self._head_dim(hidden, heads),
            "attn_logit_softcapping": self._number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self._number("final_logit_softcapping", 30.0),
            "sliding_window": self._integer("attention.sliding_window", default=4096)}

    def _alike(self, key: str, layers: int, default: int | None = None) -> int:
        """A number that a file may give for each layer, and that must be the same in all."""
        name = f"{self._prefix}.{key}"
        numbers = self._metadata.numbers(name)
        if not numbers and default is None:
            raise self._metadata.error(name, "is missing")
        values = set(numbers) if default is None or numbers else {default}
        if len(values) > 1 or len(numbers) not in (0, 1, layers):
            raise self._metadata.error(name, f"gives {len(numbers)} layers {len(values)} sizes: all must be alike")
        value = values.pop()
        if not isinstance(value, int) or not 1 <= value <= MAX_WIDTH:
            raise self._metadata.error(name, f"must be a whole number from 1 to {MAX_WIDTH}, not {value!r:.40}")
        return value

    def _has(self, key: str) -> bool:
        return self._metadata.has(f"{self._prefix}.{key}")

    def _integer(self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = MAX_WIDTH) -> int:
        return self._metadata.integer(f"{self._prefix}.{key}", default, minimum=minimum, maximum=maximum)

    def _number(self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float = 1e30) -> float:
        return self._metadata.number(f"{self._prefix}.{key}", default, minimum=minimum, maximum=maximum)

    def _text(self, key: str, default: str) -> str:
        return self._metadata.text(f"{self._prefix}.{key}", default)

    def _error(self, key: str, problem: str) -> CheckpointError:
        return self._metadata.error(f"{self._prefix}.{key}", problem)


GEMMA2_27B_LAYERS = 46
_OTHERS: Mapping[str, Callable[[_Keys], dict[str, Any]]] = {"gemma2": _Keys.gemma2}  # by architecture


def _rope_factors(model: GGUFModel, pairs: int) -> tuple[float, ...]:
    """What the frequencies of each pair of a head's dimensions are divided by; none where a file has no such tensor."""
    if ROPE_FACTORS not in model.tensors:
        return ()
    path, tensor = model.tensors[ROPE_FACTORS]
    where = f"{path}: tensor {ROPE_FACTORS}"
    if tensor.type.name != "F32" or prod(tensor.shape) != pairs:
        raise CheckpointError(f"{where} must be {pairs} numbers of F32, half the size of a head, not "
                              f"{list(tensor.shape)} of {tensor.type.name}")
    with path.open("rb") as file:
        file.seek(tensor.start)
        data = file.read(tensor.end - tensor.start)
    factors = torch.frombuffer(bytearray(data), dtype=torch.float32)
    if not (factors.isfinite().all() and (factors >= 0.01).all() and (factors <= MAX_FACTOR).all()):
        raise CheckpointError(f"{where} must hold numbers from 0.01 to {MAX_FACTOR:g}")
    return tuple(factors.tolist())
