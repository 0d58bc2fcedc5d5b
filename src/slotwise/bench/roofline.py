"""What a run must cost on a machine, and what it did cost.

The roofline (Williams, Waterman and Patterson, 2009): a step cannot be faster than its bytes at the machine's
bandwidth, nor than its operations at the machine's rate.  Both are taken from the step's own plan, so the bound knows
of every row, chunk and context; bandwidth and rate are measured in the same sitting.

    a step    bytes       all weights once, and the keys and values of every row's context
              operations  two for each weight and token, the head's only for rows that sample; four for each pair of a
                          query and a key, head and dimension
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from slotwise.engine.messages import StepRecord
from slotwise.model.config import ModelConfig

NANO = 1e-9
DECODE, MIXED, PREFILL = "decode", "mixed", "prefill"
KINDS = (DECODE, MIXED, PREFILL)


class Machine(NamedTuple):
    """What was measured."""

    bytes_per_second: float  # of memory reads
    operations_per_second: float  # of float32 products


class Cost(NamedTuple):
    """What a step must do at least."""

    bytes: int
    operations: int


class Tally:
    """The steps of one kind."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self.bytes_seconds = 0.0  # at the machine's bandwidth
        self.operations_seconds = 0.0  # at its rate
        self.bound_seconds = 0.0  # the larger of both, step by step

    @property
    def achieved(self) -> float:
        """Share of the time that the bound explains."""
        return self.bound_seconds / self.seconds if self.seconds else 0.0


def measure_machine(repeats: int = 8) -> Machine:
    """Reads of 256 MiB and products of 2048 x 2048, the best of `repeats`; takes about two seconds."""
    data, square = torch.ones(1 << 26), torch.randn(2048, 2048)
    return Machine(data.numel() * 4 / _best(data.sum, repeats), 2 * 2048**3 / _best(lambda: square @ square, repeats))


def _best(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


class Roofline:
    """Folds step records into what they had to cost.

    Args:
        weight_bytes: of all weights that a step reads, quantised or not.
    """

    def __init__(self, config: ModelConfig, machine: Machine, weight_bytes: int) -> None:
        self._inner, self._head = config.layer_weights, config.hidden_size * config.vocab_size
        self._weights = weight_bytes
        self._cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.dtype.itemsize
        self._pair = 4 * config.num_layers * config.num_heads * config.head_dim
        self.machine = machine
        self.kinds = {kind: Tally() for kind in KINDS}

    def step(self, record: StepRecord) -> None:
        """Count one step; a record without rows is none."""
        if not record.counts:
            return
        cost = self.cost(record)
        by_bytes = cost.bytes / self.machine.bytes_per_second
        by_operations = cost.operations / self.machine.operations_per_second
        tally = self.kinds[kind_of(record)]
        tally.steps += 1
        tally.tokens += sum(record.counts)
        tally.seconds += (record.ended_ns - record.started_ns) * NANO
        tally.bytes_seconds += by_bytes
        tally.operations_seconds += by_operations
        tally.bound_seconds += max(by_bytes, by_operations)

    def cost(self, record: StepRecord) -> Cost:
        """Padding counts for nothing: it need not have been computed."""
        contexts = [start + count for start, count in zip(record.starts, record.counts, strict=True)]
        pairs = sum(count * (2 * end - count + 1) // 2 for count, end in zip(record.counts, contexts, strict=True))
        sampled = sum(1 for tokens in record.token_ids if tokens)
        return Cost(
            self._weights + sum(contexts) * self._cached,
            2 * (sum(record.counts) * self._inner + sampled * self._head) + pairs * self._pair)


def kind_of(record: StepRecord) -> str:
    """Decode: a token a row; prefill: nothing but pieces of prompts; mixed: both."""
    pieces = sum(count > 1 for count in record.counts)
    if not pieces:
        return DECODE
    return PREFILL if pieces == len(record.counts) else MIXED
