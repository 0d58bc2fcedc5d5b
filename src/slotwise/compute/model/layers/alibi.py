"""ALiBi (Press et al., "Train Short, Test Long", 2022): scores have a bias for the distance of query and key.

The bias of a head is a slope times the position of the key, which softmax cannot tell from slope times distance.  Each
family has slopes, and a rounding, of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def slopes(num_heads: int) -> Tensor:
    """BLOOM's and Falcon's, `[heads]` float32: powers of 2, and between them where heads are not a power of 2."""
    whole = 1 << (num_heads.bit_length() - 1)
    found = _powers(whole, torch.arange(1, whole + 1))
    more = _powers(2 * whole, 1 + 2 * torch.arange(min(whole, num_heads - whole)))
    return torch.cat((found, more))


def _powers(num_heads: int, exponents: Tensor) -> Tensor:
    base = torch.full((), 2 ** -(2 ** -(math.log2(num_heads) - 3)), dtype=torch.float32)
    return torch.pow(base, exponents.int())


def mpt_slopes(num_heads: int) -> Tensor:
    """MPT's, `[heads]` float32: those of the next power of 2, every second one first."""
    whole = 1 << (num_heads - 1).bit_length()
    found = 1.0 / torch.pow(2, torch.arange(1, whole + 1).float() * (8 / whole))
    return found if whole == num_heads else torch.cat((found[1::2], found[::2]))[:num_heads]


def biases(of_heads: Tensor, num_positions: int) -> Tensor:
    """Of these slopes, `[heads, positions]` float32."""
    return of_heads[:, None] * torch.arange(num_positions)


def rounded_biases(of_heads: Tensor, num_positions: int, scale: float) -> Tensor:
    """Falcon's: rounded to bfloat16, then scaled as scores are."""
    return (of_heads[:, None].bfloat16() * torch.arange(num_positions)).float() * scale
