"""Products of few tokens, split along their depth: each program adds a part, and the parts are added in order.

A product of one token with 4,096 outputs has 128 tiles of outputs, fewer programs than a large GPU runs at once; a
quarter of the depth for each makes it four times as many (split-K; NVIDIA's CUTLASS, 2017).  The sums of parts are
float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.kernels.cuda.configs import FEW
from slotwise.kernels.cuda.jit import jit, jit_varying

ENOUGH_PROGRAMS = 512  # of a product: some for each multiprocessor of the largest device
MOST_PARTS = 8
LEAST_STEPS = 4  # of a part, by which its loads and products overlap
COLUMNS = 512  # outputs that a program adds up


class Parts(NamedTuple):
    """The sums of a product, before its parts are added."""

    sums: Tensor  # [parts, tokens, outputs] float32, or the product's own memory where there is one part
    number: int
    depth: int  # of a part

    @classmethod
    def of(cls, out: Tensor, grid: tuple[int, int], depth: int, step: int) -> Parts:
        """For `out [tokens, outputs]` by a grid of tiles, each of which goes along `depth` by `step`.

        More tokens than the smallest tile holds have a tile whose registers are few enough for one part only.
        """
        steps = -(-depth // step)
        number = num_parts(grid[0] * grid[1], steps) if len(out) <= FEW else 1
        if number == 1:
            return cls(out, 1, depth)
        of_one = -(-steps // number)
        number = -(-steps // of_one)
        return cls(out.new_empty(number, *out.shape, dtype=torch.float32), number, of_one * step)

    def added(self, out: Tensor, bias: Tensor | None) -> Tensor:
        """`out`, with the sum of all parts and the bias; where there is one part, its product has added that."""
        if self.number > 1:
            add_parts(out, self.sums, bias)
        return out


def num_parts(programs: int, steps: int) -> int:
    """Into how many parts the depth of a product is split.

    Args:
        programs: tiles of the product.
        steps: along its depth.
    """
    return max(1, min(MOST_PARTS, ENOUGH_PROGRAMS // programs, steps // LEAST_STEPS))


def add_parts(out: Tensor, parts: Tensor, bias: Tensor | None) -> None:
    """`out [tokens, outputs]` becomes the sum of `parts [parts, tokens, outputs]` and `bias`."""
    number, tokens, outputs = parts.shape
    _add_parts[tokens, triton.cdiv(outputs, COLUMNS)](
        out, parts, parts if bias is None else bias, tokens, PARTS=number, OUTPUTS=outputs, BIAS=bias is not None,
        BLOCK=COLUMNS, num_warps=4)


@jit
def part_of(DEPTH: tl.constexpr, PART: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Begin and end of what the program adds up."""
    begin = tl.program_id(2) * PART if PART < DEPTH else 0
    return begin, tl.minimum(begin + PART, DEPTH) if PART < DEPTH else DEPTH


@jit_varying("tokens")
def _add_parts(
    out: tl.tensor, parts: tl.tensor, bias: tl.tensor, tokens: tl.tensor, PARTS: tl.constexpr, OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """BLOCK outputs of one token."""
    token, output = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = output < OUTPUTS
    total = tl.load(bias + output, there, 0.0).to(tl.float32) if BIAS else tl.full([BLOCK], 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * tokens + token) * OUTPUTS + output, there, 0.0)
    tl.store(out + token * OUTPUTS + output, total.to(out.dtype.element_ty), there)
