"""Products with weights in 8-bit floats (E4M3): a panel is widened to bfloat16 in a thread's memory, and multiplied.

Memory is read at one byte a weight; widened numbers stay in the second-level cache, for all rows of a block.  A number
times its scale is rounded to bfloat16 once: results are those of `linear_bf16.py` for the dequantized weight, bit for
bit, by the same instructions.

    a panel   units of 128 inputs x [ 64 pairs of inputs x 32 outputs x E4M3[2] | 32 scales float32 ]

E4M3 moved up by seven bits is float16 divided by 2**8, by which scales are multiplied: processors widen that exactly,
subnormal numbers too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from llvmlite import ir
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import INT, intrinsic, kernel
from slotwise.compute.kernels.cpu.jit.llvm import (
    BRAIN,
    BYTE,
    SHORT,
    SINGLE,
    Loop,
    all_of,
    behind,
    call,
    number,
    read,
    write,
)
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.products.gemm import GATED, PLAIN
from slotwise.compute.kernels.cpu.products.gemm_bf16 import LINE_BYTES, PANEL, STRIP, STRIP_ROW_BYTES
from slotwise.compute.kernels.cpu.products.linear import (
    BLOCK,
    DEPTH,
    Method,
    PanelProduct,
    Tile,
    in_panels,
    panel_product,
)
from slotwise.compute.kernels.cpu.products.linear_bf16 import around, gemm_by, layout_of, pack_block
from slotwise.compute.kernels.cpu.simd import BFLOAT16, INT64, ZERO, fill, load
from slotwise.compute.kernels.interface import Linear
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix

# Inputs that share a scale, in the blocks of DeepSeek and Qwen3.
UNIT = 128
PAIRS = UNIT // 2
STRIPS = UNIT // STRIP
# Bytes of a unit of a panel: of its codes and scales, and in bfloat16.
CODE_BYTES, SCALE_BYTES = PAIRS * 2 * PANEL, 4 * PANEL
UNIT_BYTES = CODE_BYTES + SCALE_BYTES
WIDENED = PAIRS * LINE_BYTES
# What a scale is multiplied by.
LIFTED = 256.0
# Weights widened at once: pairs of eight outputs.
VECTOR = 16
# The paths of `linear_bf16.py` that multiply the widened numbers.
PATHS = ("bf16", "amx")

_BYTES, _SHORTS, _FLOATS, _BRAINS = (ir.VectorType(kind, VECTOR) for kind in (BYTE, SHORT, SINGLE, BRAIN))
_HALVES = ir.VectorType(ir.HalfType(), VECTOR)


def _widen_unit(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
    scales = []
    for vector in range(4):
        place = behind(builder, source, CODE_BYTES + vector * SCALE_BYTES // 4)
        own = read(builder, place, ir.VectorType(SINGLE, VECTOR // 2))
        twice = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [lane // 2 for lane in range(VECTOR)])
        scales.append(builder.shuffle_vector(own, own, twice))
    pairs = Loop(builder, number(PAIRS), 1, [source, target])
    place, to = pairs.values
    for vector, scale in enumerate(scales):
        codes = builder.zext(read(builder, behind(builder, place, vector * VECTOR), _BYTES, 1), _SHORTS)
        size = builder.and_(builder.shl(codes, all_of(_SHORTS, 7)), all_of(_SHORTS, 0x3F80))
        sign = builder.and_(builder.shl(codes, all_of(_SHORTS, 8)), all_of(_SHORTS, 0x8000))
        floats = builder.fpext(builder.bitcast(builder.or_(size, sign), _HALVES), _FLOATS)
        rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _BRAINS, builder.fmul(floats, scale))
        write(builder, rounded, behind(builder, to, vector * 2 * VECTOR))
    pairs.close([behind(builder, place, 2 * PANEL), behind(builder, to, LINE_BYTES)])


widen_unit: Callable[[int, int], None] = intrinsic(_widen_unit, INT, INT)
"""`widen_unit(source, target)`: a unit of a panel as lines of bfloat16."""


@kernel
def _units(words: int) -> int:
    return (load(words, DEPTH, INT64) + UNIT - 1) // UNIT


@kernel
def _pack_block(words: int, first: int, rows: int, padded: int, target: int) -> None:
    """Pack rows of x as strips of `padded` rows, with strips of zeros up to a whole unit."""
    pack_block(words, first, rows, padded, target)
    filled = (load(words, DEPTH, INT64) + STRIP - 1) // STRIP
    strip_bytes = padded * STRIP_ROW_BYTES
    fill(target + filled * strip_bytes, (_units(words) * STRIPS - filled) * strip_bytes // 4, ZERO)


def _product(path: str) -> PanelProduct:
    gemm = gemm_by(path)

    @kernel
    def multiply(words: int, tile: Tile) -> None:
        units = _units(words)
        panel = tile.x + (load(words, BLOCK, INT64) | 1) * units * STRIPS * STRIP_ROW_BYTES
        if tile.first == 0:
            for unit in range(units):
                widen_unit(tile.weights + unit * UNIT_BYTES, panel + unit * WIDENED)
        gemm(tile.rows, panel, tile.x + tile.first * STRIP_ROW_BYTES, tile.block_rows * STRIP_ROW_BYTES,
             units * STRIPS, tile.target, tile.stride, tile.bias, tile.form, tile.asked, tile.step, tile.memory)

    layout = layout_of(path)
    return panel_product(
        f"fp8_by_{path}", Method(_pack_block, multiply, *around(path)),
        layout._replace(unit=UNIT, steps=PAIRS, line=UNIT_BYTES // PAIRS, row=STRIPS * STRIP_ROW_BYTES,
                        block=layout.block // 2, widened=WIDENED), BFLOAT16)


PRODUCT = {path: _product(path) for path in PATHS}


def refusal(format: Format) -> str:
    """Why products with a format of 8-bit floats are not supported, in one sentence; "" where they are."""
    return "" if format.group in (0, UNIT) else f"groups of {format.group} 8-bit floats are not supported on device cpu"


def pack(matrix: QuantizedMatrix, *, is_gated: bool = False) -> Tensor:
    """`[panels, units, bytes]`, with zeros after the depth and the outputs."""
    rows = matrix.read(0, matrix.outputs)
    units = -(-matrix.depth // UNIT)
    codes = in_panels(F.pad(rows.codes, (0, units * UNIT - matrix.depth)), PANEL, is_gated=is_gated)
    lines = codes.view(-1, PANEL, units, PAIRS, 2).permute(0, 2, 3, 1, 4).flatten(2)
    scales = in_panels(rows.scales.floats().expand(-1, units) * LIFTED, PANEL, is_gated=is_gated)
    in_units = scales.view(-1, PANEL, units).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat((lines, in_units), dim=2)


def packed_bytes(outputs: int, depth: int) -> int:
    """Bytes of a packed weight."""
    return -(-outputs // PANEL) * -(-depth // UNIT) * UNIT_BYTES


def fp8_linear(
    matrix: QuantizedMatrix, bias: Tensor | None, launcher: KernelLauncher, form: int = PLAIN, *, path: str,
) -> Linear:
    """A matrix of 8-bit floats, packed for many products of bfloat16 by a `path` of `PRODUCT`.

    Args:
        form: of results, as in `gemm.py`; GATED: its outputs are gates, then the up projection.

    Raises:
        ValueError: products with its format are not supported.
    """
    if why := refusal(matrix.format):
        raise ValueError(why)
    panels = pack(matrix, is_gated=form == GATED)
    added = torch.zeros(matrix.outputs) if bias is None else bias.float()
    return PRODUCT[path].linear(
        panels, in_panels(added, PANEL, is_gated=form == GATED), (matrix.outputs, matrix.depth), launcher, form)
