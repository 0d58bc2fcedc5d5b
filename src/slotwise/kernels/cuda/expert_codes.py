"""Products of tokens with the packed weights of the experts that they chose, all experts in one launch.

The matrices of a layer's experts lie one behind the other along their outputs, as one packed matrix; codes become
numbers in registers, as in `codes.py`.  The codes of experts that no token chose are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from slotwise.kernels.cuda.codes import add_products, constants, factors
from slotwise.kernels.cuda.configs import expert_codes_tile
from slotwise.kernels.cuda.expert_tiles import Arranged, rows_of_tile
from slotwise.kernels.cuda.jit import jit_varying
from slotwise.kernels.cuda.packed import PackedMatrix
from slotwise.kernels.cuda.prefill import num_tiles
from slotwise.kernels.cuda.tile import OPERANDS
from slotwise.kernels.matrix import Factors


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCodes:
    """A matrix of each expert, in one format."""

    together: PackedMatrix
    experts: int
    inputs: Tensor | None  # [experts, depth] int64, the input at each place, where a file orders them

    @property
    def outputs(self) -> int:
        """Of each."""
        return self.together.outputs // self.experts


def tensors_of(matrix: PackedMatrix) -> list[Tensor | None]:
    """All that differs between experts; `together` takes them stacked."""
    minimums: tuple[Tensor | None, ...] = (None, None) if matrix.minimums is None else matrix.minimums
    return [matrix.codes, *matrix.scales, *minimums, matrix.inputs]


def together(of_one: PackedMatrix, stacked: Sequence[Tensor | None]) -> ExpertCodes:
    """Matrices like `of_one`, from their tensors `[experts, ...]`."""
    codes, scales, scale_units, minimums, minimum_units = (
        None if each is None else each.flatten(0, 1) for each in stacked[:-1])
    assert codes is not None and scales is not None
    experts = len(codes) // of_one.outputs
    whole = replace(
        of_one, outputs=len(codes), codes=codes, scales=Factors(scales, scale_units),
        minimums=None if minimums is None else Factors(minimums, minimum_units), order=None, inputs=None)
    return ExpertCodes(whole, experts, stacked[-1])


def multiply(
    out: Tensor, x: Tensor, weight: ExpertCodes, bias: Tensor | None, arranged: Arranged, top_k: int, *,
    is_first: bool,
) -> None:
    """To `out [pairs, outputs]`, as `experts.multiply` does; `bias [experts, outputs]`."""
    pairs, matrix = len(arranged.pairs), weight.together
    tile = expert_codes_tile(pairs, weight.experts, x.dtype)
    grid = (num_tiles(pairs, weight.experts, 1, tile.block_m), triton.cdiv(weight.outputs, tile.block_n))
    _multiply_expert_codes[grid](
        out, x, matrix.codes, *factors(matrix), matrix.codes if weight.inputs is None else weight.inputs,
        x if bias is None else bias, arranged.pairs, arranged.starts, weight.experts,
        **(constants(matrix) | {"OUTPUTS": weight.outputs}), ORDERED=weight.inputs is not None, TOP_K=top_k,
        FIRST=is_first, BIAS=bias is not None, OPERAND=OPERANDS[x.dtype], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages)


@jit_varying("num_experts")
def _multiply_expert_codes(
    out: tl.tensor, x: tl.tensor, codes: tl.tensor, scales: tl.tensor, scale_units: tl.tensor, minimums: tl.tensor,
    minimum_units: tl.tensor, levels: tl.tensor, inputs: tl.tensor, bias: tl.tensor, pairs: tl.tensor,
    starts: tl.tensor, num_experts: tl.tensor, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PER_UNIT: tl.constexpr, ZERO: tl.constexpr, NIBBLES: tl.constexpr,
    MINIMUMS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, ORDERED: tl.constexpr, TOP_K: tl.constexpr,
    FIRST: tl.constexpr, BIAS: tl.constexpr, OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """A tile of one expert's pairs and outputs."""
    expert, is_empty, present, row, to = rows_of_tile(pairs, starts, num_experts, TOP_K, FIRST, BLOCK_M)
    if is_empty:
        return
    output = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    there, matrix = output < OUTPUTS, expert * OUTPUTS
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    total = add_products(
        total, x, row, present, codes, scales, scale_units, minimums, minimum_units, levels, matrix + output, there,
        inputs + expert * DEPTH, 0, ROW_BYTES, DEPTH, ROW_BYTES, GROUPS, GROUP, PER_UNIT, ZERO, NIBBLES, MINIMUMS,
        LEVELS, OPERAND, CHUNK, ORDERED)
    if BIAS:
        total += tl.load(bias + matrix + output, there, 0.0).to(tl.float32)[None, :]
    tl.store(out + to[:, None] * OUTPUTS + output[None, :], total.to(out.dtype.element_ty),
             present[:, None] & there[None, :])
