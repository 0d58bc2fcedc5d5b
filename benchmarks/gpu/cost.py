"""The roofline of a step: bytes of weights and cache it reads, and its operations (Williams et al., 2009)."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from slotwise.engine.messages import StepRecord
from slotwise.model.family_table import tensor_shapes
from slotwise.model.model_config import ModelConfig


class Machine(NamedTuple):
    """The measured rates of the device."""

    bytes_per_second: float  # of a copy, those read and those written
    operations_per_second: float  # of a large product


class Bounds:
    """Lower bounds of steps, for a model whose head is not its embedding table, of which a step reads few rows."""

    def __init__(self, config: ModelConfig) -> None:
        self._weights = config.dtype.itemsize * sum(
            prod(shape) for name, shape in tensor_shapes(config).items() if name != "model.embed_tokens.weight")
        self._cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.dtype.itemsize
        self._inner, self._head = config.layer_weights, config.hidden_size * config.vocab_size
        self._pair = 4 * config.num_layers * config.num_heads * config.head_dim

    def bytes(self, record: StepRecord) -> int:
        """Returns the bytes of all weights, and of the keys and values of every row's context."""
        return self._weights + self._cached * sum(record.starts + record.counts)

    def operations(self, record: StepRecord) -> int:
        """Returns the operations: two per weight and token, the head's for rows that sample; four per pair of a query
        and a key, head and dimension."""
        ends = [start + count for start, count in zip(record.starts, record.counts, strict=True)]
        pairs = sum(count * (2 * end - count + 1) // 2 for count, end in zip(record.counts, ends, strict=True))
        sampled = sum(1 for tokens in record.token_ids if tokens)
        return 2 * (sum(record.counts) * self._inner + sampled * self._head) + pairs * self._pair
