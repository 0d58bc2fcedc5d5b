"""Ranges of numeric settings, checked alike on the command line and in the offline API."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

SMALLEST = 1e-9  # of a real number that is not 0: smaller ones are mistakes, and overflow where they divide
LARGEST = 1 << 31
DAY = 86_400.0  # seconds
SLOTS = 1 << 16
TOKENS = 1 << 24  # of a sequence or a step
BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float
    is_whole: bool = True
    may_be_infinite: bool = False

    def objection(self, value: object) -> str:
        """What is wrong with `value`; "" if nothing is."""
        kind: type = Integral if self.is_whole else Real
        if isinstance(value, bool) or not isinstance(value, kind) or not self._holds(value):
            return f"must be {self}, not {value!r:.40}"
        return ""

    def _holds(self, value: float) -> bool:
        if self.may_be_infinite and value == math.inf:
            return True
        return self.least <= value <= self.most and (value == 0 or abs(value) >= SMALLEST)

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        return f"{kind} from {_written(self.least)} to {_written(self.most)}" + (" or inf" * self.may_be_infinite)


def _written(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.15g}"


def whole(least: int, most: int = LARGEST) -> Range:
    return Range(least, most)


def real(least: float, most: float) -> Range:
    return Range(least, most, is_whole=False)


ENGINE = {  # the numbers of `EngineConfig`
    "max_model_len": whole(1, TOKENS),
    "max_num_seqs": whole(1, SLOTS),
    "max_num_batched_tokens": whole(1, TOKENS),
    "batch_size": whole(1, SLOTS),
    "max_wait_ms": real(0, 3_600_000),
    "long_prefill_token_threshold": whole(0, TOKENS),
    "ageing": real(0.001, DAY),
    "preemption_gap": whole(1, 10_000),
    "length_quantile": real(0, 1),
    "default_ttft_ms": real(0.001, 1000 * DAY - 1),
    "max_step_ms": real(0.001, 3_600_000),
    "max_stall_ms": real(0, 3_600_000),
    "max_step_context": whole(0),
    "block_size": whole(1, 1 << 16),
    "kv_cache_memory": whole(1, BYTES),
    "gpu_memory_utilization": real(0.001, 1),
    "kv_offloading_size": real(0, (1 << 20) - 1),  # GiB
    "seed": whole(-(2**63), 2**63 - 1),
    "overlap": whole(0, 1),
}
