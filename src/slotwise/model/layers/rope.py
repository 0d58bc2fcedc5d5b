"""Rotary position embeddings (Su et al., "RoFormer", 2021) and their scaling to longer contexts.

Each pair of a head's dimensions is rotated by an angle proportional to the token's position; pair i by
`theta ** (-2i / head_dim)` radians per token.  A scaled variant slows some of the pairs down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slotwise.model.fields import Fields

CHUNK = 8192  # positions computed at a time: a few milliseconds


@dataclass(frozen=True)
class Rope:
    """The embedding as published."""

    theta: float  # the base

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Radians per token for each pair of dimensions, `[head_dim / 2]` float32."""
        return 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)

    @property
    def magnitude(self) -> float:
        """The factor of sines and cosines."""
        return 1.0

    def is_finite(self, head_dim: int, max_positions: int) -> bool:
        """Whether every angle up to `max_positions`, and the magnitude, is finite in float32."""
        try:
            greatest = self.inverse_frequencies(head_dim).amax() * max_positions * torch.tensor(self.magnitude)
        except (ArithmeticError, ValueError, RuntimeError):  # in computing them
            return False
        return bool(greatest.isfinite())


@dataclass(frozen=True)
class LinearRope(Rope):
    """Position interpolation (Chen et al., 2023): every pair turns `factor` times slower."""

    factor: float

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        return Rope.inverse_frequencies(self, head_dim) / self.factor


@dataclass(frozen=True)
class DividedRope(Rope):
    """Every pair with a divisor of its own, as GGUF files write the scaling of Llama 3.1."""

    divisors: tuple[float, ...]  # [head_dim / 2]

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        return Rope.inverse_frequencies(self, head_dim) / torch.tensor(self.divisors)


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: slow pairs are interpolated, fast ones unchanged, those between blended.

    A pair is slow when it turns fewer than `low_freq_factor` times over the original context, and fast when it turns
    more than `high_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        plain = Rope.inverse_frequencies(self, head_dim)
        turns = self.original_max_positions * plain / (2 * math.pi)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - keep) * plain / self.factor + keep * plain


@dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN (Peng et al., 2023): interpolation blended by the number of turns, and attention made sharper."""

    factor: float
    original_max_positions: int
    beta_fast: float  # pairs that turn more often than this over the original context are unchanged
    beta_slow: float  # pairs that turn less often are interpolated
    attention_factor: float
    truncate: bool  # round the bounds of the blend to whole pairs

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        plain = Rope.inverse_frequencies(self, head_dim)
        first, last = self._pair(self.beta_fast, head_dim), self._pair(self.beta_slow, head_dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        span = last - first or 0.001
        stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / span).clamp(0, 1)
        return stretch * plain / self.factor + (1 - stretch) * plain

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def _pair(self, turns: float, head_dim: int) -> float:
        """The (fractional) pair that turns `turns` times over the original context."""
        length = self.original_max_positions / (2 * math.pi * turns)
        return head_dim * math.log(length) / (2 * math.log(self.theta))


def rotary_table(rope: Rope, head_dim: int, start: int, end: int) -> Tensor:
    """Cosines, then sines, of the positions from `start` until `end`: `[end - start, head_dim]` float32."""
    angles = torch.outer(torch.arange(start, end, dtype=torch.float32), rope.inverse_frequencies(head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.magnitude)


class RotaryTable:
    """The rotary table of a model, computed for the longest context so far.

    Its address is fixed, because captured steps use it; on a CPU, rows that were never written take no memory.
    """

    def __init__(self, rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> None:
        """Raises MemoryError where so many positions cannot even be reserved."""
        self._rope = rope
        self._known = 0  # positions
        try:
            self._table = torch.empty(max_positions, head_dim, dtype=torch.float32, device=device)
        except RuntimeError as error:
            raise MemoryError(f"no room for {max_positions} positions: lower max_model_len") from error

    def until(self, end: int) -> Tensor:
        """The table, `[max_positions, head_dim]`, whose rows before `end` are those of `rotary_table`."""
        while self._known < min(end, len(self._table)):
            upto = min(self._known + CHUNK, len(self._table))
            self._table[self._known : upto] = rotary_table(self._rope, self._table.shape[1], self._known, upto)
            self._known = upto
        return self._table


def read_rope(fields: Fields) -> Rope:
    """The embedding of a config.json, in either of the two formats in use.

    Since transformers 5 one object, `rope_parameters`, holds everything; before, `rope_theta` was a separate field
    and `rope_scaling` held the rest.  Raises CheckpointError for variants that are not implemented.
    """
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    scaling = fields.section(name)
    theta = scaling.number("rope_theta", default=fields.number("rope_theta", default=10_000.0))
    for source in (fields, scaling):
        if source.number("partial_rotary_factor", default=1.0) != 1.0:
            raise source.error("partial_rotary_factor", "must be 1: rotating part of a head is not supported")
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise fields.error(name, "differs by layer type, which is not supported")
    kind = scaling.text("rope_type", default=scaling.text("type", default="default"))
    if kind not in _READERS:
        raise fields.error(name, f"type {kind!r:.40} is not supported; these are: {', '.join(_READERS)}")
    longest = fields.integer("max_position_embeddings")
    before = scaling.integer("original_max_position_embeddings", default=longest)
    return _READERS[kind](scaling, theta, fields.integer("original_max_position_embeddings", default=before))


def _read_plain(scaling: Fields, theta: float, original: int) -> Rope:
    return Rope(theta)


def _read_linear(scaling: Fields, theta: float, original: int) -> Rope:
    return LinearRope(theta, scaling.number("factor"))


def _read_llama3(scaling: Fields, theta: float, original: int) -> Rope:
    low = scaling.number("low_freq_factor")
    return Llama3Rope(theta, scaling.number("factor"), low, scaling.number("high_freq_factor", minimum=low), original)


def _read_yarn(scaling: Fields, theta: float, original: int) -> Rope:
    scaling.refuse(("mscale", "mscale_all_dim"), "is not supported")
    factor = scaling.number("factor")
    if theta <= 1:
        raise scaling.error("rope_theta", f"must be above 1 with yarn, not {theta!r:.40}")
    return YarnRope(
        theta, factor, original,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        attention_factor=scaling.number("attention_factor", default=0.1 * math.log(max(factor, 1.0)) + 1.0),
        truncate=scaling.flag("truncate", default=True),
    )


_READERS = {"default": _read_plain, "linear": _read_linear, "llama3": _read_llama3, "yarn": _read_yarn}
