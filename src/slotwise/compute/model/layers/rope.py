"""Rotary position embeddings (Su et al., "RoFormer", 2021) and their scaling to longer contexts.

Each pair of a head's dimensions is rotated by an angle proportional to the token's position; pair i by
`theta ** (-2i / head_dim)` radians per token.  A scaled variant slows some of the pairs down.

Kernels pair dimension i of a head's first half with dimension i of its second half, and rotate all of them.  Where a
model rotates only the first dimensions of a head, or pairs neighbors, the outputs of its query and key products are
put in that order when weights are packed (`order`), and pairs that do not turn have frequency 0.  Scores are sums over
a head's dimensions, so they do not change.

    rotated 4 of 8    [ a0 a1 b0 b1 | c0 c1 c2 c3 ]  ─►  [ a0 a1 c0 c1 | b0 b1 c2 c3 ]
    neighbors        [ a0 b0 a1 b1 a2 b2 a3 b3 ]    ─►  [ a0 a1 a2 a3 | b0 b1 b2 b3 ]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

CHUNK = 8192  # positions computed at a time: a few milliseconds


@dataclass(frozen=True)
class Rope:
    """The embedding as published."""

    theta: float  # the base
    share: float = field(default=1.0, kw_only=True)  # of a head's dimensions, its first ones: the others do not turn
    has_neighbors: bool = field(default=False, kw_only=True)  # pairs are dimensions 2i and 2i + 1
    head_dim: int = field(default=0, kw_only=True)  # of its layers, where layers differ; 0: the model's

    def rotated(self, head_dim: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_dim * self.share)

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per token for each pair of a head's dimensions in the order of `order`, `[head_dim / 2]` float32."""
        turning = self.inverse_frequencies(self.rotated(head_dim))
        return torch.nn.functional.pad(turning, (0, head_dim // 2 - len(turning)))

    def inverse_frequencies(self, rotated: int) -> Tensor:
        """Radians per token for each pair of the dimensions that turn, `[rotated / 2]` float32."""
        return 1.0 / self.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)

    def order(self, head_dim: int) -> Tensor | None:
        """The checkpoint's dimension of a head at each of the kernels' dimensions; None: the same."""
        rotated = self.rotated(head_dim)
        if rotated == head_dim and not self.has_neighbors:
            return None
        turning, others = torch.arange(rotated), torch.arange(rotated, head_dim).view(2, -1)
        first, second = turning.view(-1, 2).T if self.has_neighbors else turning.view(2, -1)
        return torch.cat((first, others[0], second, others[1]))

    @property
    def magnitude(self) -> float:
        """The factor of sines and cosines."""
        return 1.0

    def reaching(self, max_positions: int) -> Self:
        """The embedding of a model that serves `max_positions` positions; most do not depend on it."""
        return self

    def is_finite(self, head_dim: int, max_positions: int) -> bool:
        """Whether every angle up to `max_positions`, and the magnitude, is finite in float32."""
        try:
            greatest = self.frequencies(head_dim).amax() * max_positions * torch.tensor(self.magnitude)
        except (ArithmeticError, ValueError, RuntimeError):  # in computing them
            return False
        return bool(greatest.isfinite())


@dataclass(frozen=True)
class NoRope(Rope):
    """No positions in this layer (Kazemnejad et al., 2023): nothing turns."""

    theta: float = 1.0

    def inverse_frequencies(self, rotated: int) -> Tensor:
        return torch.zeros(rotated // 2)


@dataclass(frozen=True)
class LinearRope(Rope):
    """Position interpolation (Chen et al., 2023): every pair turns `factor` times slower."""

    factor: float

    def inverse_frequencies(self, rotated: int) -> Tensor:
        return Rope.inverse_frequencies(self, rotated) / self.factor


@dataclass(frozen=True)
class BackwardRope(Rope):
    """Another embedding whose pairs turn the other way (NanoChat)."""

    forward: Rope

    def inverse_frequencies(self, rotated: int) -> Tensor:
        return -self.forward.inverse_frequencies(rotated)

    @property
    def magnitude(self) -> float:
        return self.forward.magnitude

    def reaching(self, max_positions: int) -> Self:
        return replace(self, forward=self.forward.reaching(max_positions))


@dataclass(frozen=True)
class ProportionalRope(Rope):
    """A part of the pairs turns, as fast as if all did (Gemma 4); the others do not."""

    proportion: float
    factor: float = 1.0  # by which they are slowed down

    def inverse_frequencies(self, rotated: int) -> Tensor:
        plain, turning = Rope.inverse_frequencies(self, rotated), int(self.proportion * rotated // 2)
        return torch.cat((plain[:turning], torch.zeros(len(plain) - turning))) / self.factor


@dataclass(frozen=True)
class DividedRope(Rope):
    """Every pair with a divisor of its own, as GGUF files write the scaling of Llama 3.1."""

    divisors: tuple[float, ...]  # [head_dim / 2]

    def inverse_frequencies(self, rotated: int) -> Tensor:
        return Rope.inverse_frequencies(self, rotated) / torch.tensor(self.divisors)


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: slow pairs are interpolated, fast ones unchanged, the rest blended.

    A pair is slow when it turns fewer than `low_freq_factor` times over the original context, and fast when it turns
    more than `high_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def inverse_frequencies(self, rotated: int) -> Tensor:
        plain = Rope.inverse_frequencies(self, rotated)
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

    def inverse_frequencies(self, rotated: int) -> Tensor:
        plain = Rope.inverse_frequencies(self, rotated)
        first, last = self._pair(self.beta_fast, rotated), self._pair(self.beta_slow, rotated)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotated - 1)
        span = last - first or 0.001
        stretch = ((torch.arange(rotated // 2, dtype=torch.float32) - first) / span).clamp(0, 1)
        return stretch * plain / self.factor + (1 - stretch) * plain

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def _pair(self, turns: float, rotated: int) -> float:
        """The (fractional) pair that turns `turns` times over the original context."""
        length = self.original_max_positions / (2 * math.pi * turns)
        return rotated * math.log(length) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class LongRope(Rope):
    """LongRoPE (Ding et al., 2024): each pair is slowed by a factor of its own, of two sets.

    `transformers` takes the long set for a sequence longer than the original context, and computes its cache again
    where it grows beyond.  Here, as in vLLM, the longest sequence that a server accepts decides for all of them.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int
    attention_factor: float
    is_long: bool = False

    def inverse_frequencies(self, rotated: int) -> Tensor:
        factors = torch.tensor(self.long if self.is_long else self.short, dtype=torch.float32)
        return 1.0 / (factors * self.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def reaching(self, max_positions: int) -> Self:
        return replace(self, is_long=max_positions > self.original_max_positions)


def rotated(table: Tensor, x: Tensor, positions: Tensor) -> Tensor:
    """Heads `x [tokens, heads, head_dim]` in the order of `order`, rotated by the rows of `table` at `positions`."""
    cosine, sine = table[positions].unsqueeze(1).chunk(2, dim=-1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).to(x.dtype)


def rotary_table(rope: Rope, head_dim: int, start: int, end: int) -> Tensor:
    """Cosines, then sines, of the positions from `start` until `end`: `[end - start, head_dim]` float32."""
    angles = torch.outer(torch.arange(start, end, dtype=torch.float32), rope.frequencies(head_dim))
    magnitudes = torch.ones(head_dim // 2)
    magnitudes[: rope.rotated(head_dim) // 2] = rope.magnitude  # pairs that do not turn stay what they are
    return torch.cat((angles.cos() * magnitudes, angles.sin() * magnitudes), dim=-1)


class RotaryTable:
    """The rotary table of a model, computed for the longest context so far.

    Its address is fixed, because captured steps use it; on a CPU, rows that were never written take no memory.
    """

    def __init__(self, rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> None:
        """Raises MemoryError where so many positions cannot even be reserved."""
        self._rope = rope.reaching(max_positions)
        self._known = 0  # positions
        try:
            self._table = torch.empty(max_positions, head_dim, dtype=torch.float32, device=device)
        except RuntimeError as error:
            raise MemoryError(f"no room for {max_positions} positions: lower max_model_len") from error

    def until(self, end: int) -> Tensor:
        """The table, `[max_positions, head_dim]`, with valid rows before `end` (see `rotary_table`)."""
        while self._known < end and self._known < len(self._table):
            upto = min(self._known + CHUNK, len(self._table))
            self._table[self._known : upto] = rotary_table(self._rope, self._table.shape[1], self._known, upto)
            self._known = upto
        return self._table
