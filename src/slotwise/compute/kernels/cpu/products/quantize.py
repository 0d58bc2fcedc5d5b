"""Numbers as small integers with scales: tensors when `--quantization` packs them, activations at run time.

`--quantization` makes a tensor a matrix in one of `FORMATS`, with a scale for each 32 inputs of an output; from there
on it is a quantized matrix like those of checkpoints (`compute/kernels/matrix.py`), and `linear_blocks.py` multiplies
it.

    int8    code - 128, times a scale of float16: 8.5 bits a weight, as in GGUF's Q8_0
    int4    code times a scale, minus a minimum, both float16: 5 bits a weight, as in GGUF's Q4_1

Of int4, a group gets the one of a few ranges that leaves the least squared error, and then the scale and the minimum
that fit its codes best: clipping the largest weights a little pays where there are 16 levels, as in Banner et al.,
"Post training 4-bit quantization", 2019.

Where the inputs of a product are known (`compute/model/calibration.py`), the error of a weight counts as much as its
input is large, and weights of later inputs compensate for it, as far as those inputs are correlated with its own: GPTQ
(Frantar et al., 2023), here within runs of `MOMENTS` inputs, so that a product of 8,192 inputs needs 8 MB of moments
and not 256.  The format does not change, and neither do the kernels.

    H = x.T @ x + damping          of a run of inputs, over the tokens of the calibration
    U = cholesky(inverse(H))       upper triangle
    for each input i of the run:   error = (w[:, i] - rounded(w[:, i])) / U[i, i];  w[:, i+1:] -= error * U[i, i+1:]

Each token's activations are quantized by themselves, in units of 16, 32 or 64 numbers ("group-wise", as in ZeroQuant,
Yao et al., 2022), so an outlier affects only its unit, and a token's result does not depend on its batch-mates, bit for
bit.  Some inputs are large for every token, and on one side of zero: what is quantized is the distance from the
*center*, an input's mean over some tokens of the model, and the product with the centers is a part of the bias (Wei et
al., "Outlier Suppression+", 2023).

    units x rows of int8[unit], units x rows of facts: the scale float32, then -zero * sum(q) int32, or for formats with
    minimums -scale * sum(q) float32
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import FLOAT, INT, KIND, ElementType, intrinsic, kernel
from slotwise.compute.kernels.cpu.jit.llvm import (
    BYTE,
    SHORT,
    SINGLE,
    WORD,
    all_of,
    behind,
    call,
    fast,
    read,
    spread,
    widened,
    write,
)
from slotwise.compute.kernels.cpu.products.block_layout import BlockLayout
from slotwise.compute.kernels.cpu.products.linear import DEPTH, SOURCES, RowBlock, x_at
from slotwise.compute.kernels.cpu.simd import (
    FLOAT32,
    INT32,
    INT64,
    ZERO,
    Real,
    bytes_of,
    fill,
    float_of,
    load,
    store,
)
from slotwise.compute.kernels.interface import Linear
from slotwise.compute.kernels.matrix import Factors, Format, QuantizedMatrix, Rows

FORMATS = {
    "int8": Format(8, 32, torch.float16, zero=128), "int4": Format(4, 32, torch.float16, has_minimums=True)}
"""The formats of weights by the names of options; `engine/config.py` lists the same names."""
HEAD = FORMATS["int8"]
"""The format of a head: each of its errors is a token's."""

# The shares of a group's range that are tried for int4.
RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)
MOMENTS = 256
"""The inputs of a run: only they compensate for each other."""
# What is added to the diagonal of the moments, as a share of its mean.
DAMPING = 0.05
# The smallest and the largest float16: a smaller scale would be 0, and a larger one infinite.
LEAST_SCALE, MOST_SCALE = 2.0**-24, 65504.0

# Bits of a float32.
INFINITE, NAN = 0x7F800000, 0x7FC00000
# So large that a float32 of this size has no fraction bits left: adding it rounds to integers.
WITHOUT_FRACTION = 1.5 * 2**23

# Of a unit of activations: bytes of its two facts, and the largest quantized number.
FACTS = 8
UNIT_LIMIT = 127.0
# Their arguments follow those of every product.
STRIDE, TABLE, ZERO_AND_FACTOR, CENTER = range(SOURCES + 1, SOURCES + 5)


class Compensation(NamedTuple):
    """What GPTQ needs of the second moments of a product's inputs, in runs of `MOMENTS`."""

    factors: Tensor  # [runs, MOMENTS, MOMENTS] float32: U
    importances: Tensor  # [runs, MOMENTS, 1] float32: the diagonal of H, relative to its mean

    @classmethod
    def of(cls, moments: Tensor) -> Compensation:
        """`moments [runs, MOMENTS, MOMENTS]`: `x.T @ x`; runs of inputs that were always 0, or not finite, have none.
        """
        exact = moments.double().nan_to_num(0.0, 0.0, 0.0)
        means = exact.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        exact = exact / means.clamp_min(1e-30) + DAMPING * torch.eye(MOMENTS, dtype=torch.double)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(exact))
        factors = torch.linalg.cholesky(inverse, upper=True)
        return cls(factors.float(), exact.diagonal(dim1=1, dim2=2)[:, :, None].float())


class InputMoments:
    """Sums up the second moments of products' inputs, in the order in which the products are packed."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def watched(self, product: Linear, depth: int) -> Linear:
        """`product`, which adds the moments of its inputs `[tokens, depth]` to a new entry of `found`."""
        runs = -(-depth // MOMENTS)
        sums = torch.zeros(runs, MOMENTS, MOMENTS)
        self.found.append(sums)

        def watching(x: Tensor) -> Tensor:
            padded: Tensor = F.pad(x.reshape(-1, depth).float(), (0, runs * MOMENTS - depth))
            of_runs = padded.unflatten(1, (runs, MOMENTS)).transpose(0, 1)
            sums.baddbmm_(of_runs.transpose(1, 2), of_runs)
            return product(x)

        return watching


def quantized(weight: Tensor, format: Format, moments: Tensor | None = None) -> QuantizedMatrix:
    """`weight [out, in]` in one of `FORMATS`; its numbers are read, and rounded, when it is packed.

    Args:
        moments: of its inputs, as `InputMoments` has them, for formats with minimums; None: unknown.
    """
    outputs, depth = weight.shape
    if not format.has_minimums:
        return QuantizedMatrix(format, outputs, depth, lambda first, end: _codes(weight[first:end], format))
    if moments is None:
        return QuantizedMatrix(format, outputs, depth, lambda first, end: _nearest(weight[first:end], format))
    compensation = Compensation.of(moments)
    return QuantizedMatrix(
        format, outputs, depth, lambda first, end: _compensated(weight[first:end], format, compensation))


def _codes(weight: Tensor, format: Format) -> Rows:
    groups = _groups(weight, format)
    scales = _half(groups.abs().amax(dim=2, keepdim=True) / (format.zero - 1))
    steps = (groups / scales).round_().clamp_(1 - format.zero, format.zero - 1).add_(format.zero)
    return Rows(_joined(steps, weight), Factors(scales.squeeze(2).half()))


class _Range(NamedTuple):
    """The scales and minimums of groups, `[groups, 1, out]` float32, as a float16 stores them."""

    scale: Tensor
    minimum: Tensor

    def codes(self, weights: Tensor, most: int) -> Tensor:
        """The nearest code of each weight."""
        return ((weights + self.minimum) / self.scale).round_().clamp_(0, most)

    def values(self, codes: Tensor) -> Tensor:
        return codes * self.scale - self.minimum


def _nearest(weight: Tensor, format: Format) -> Rows:
    groups = _groups(weight, format).permute(1, 2, 0).contiguous()
    most = (1 << format.bits) - 1
    chosen = _range_of(groups, torch.ones(()), most)
    return _rows(chosen.codes(groups, most), chosen, weight)


def _compensated(weight: Tensor, format: Format, compensation: Compensation) -> Rows:
    """The codes of GPTQ: a group's range is chosen once the groups before it are rounded."""
    factors, importances = compensation
    outputs, depth = weight.shape
    most, group, runs = (1 << format.bits) - 1, format.group, len(factors)
    padded: Tensor = F.pad(weight.float().t(), (0, 0, 0, runs * MOMENTS - depth))
    left = padded.unflatten(0, (runs, MOMENTS)).contiguous()  # [runs, MOMENTS, out]
    codes, ranges = torch.empty_like(left), []
    for at in range(0, MOMENTS, group):
        own = left[:, at : at + group]
        chosen = _range_of(own, importances[:, at : at + group], most)
        ranges.append(chosen)
        errors = torch.empty_like(own)
        for i in range(group):
            of_input, code = own[:, i : i + 1], codes[:, at + i : at + i + 1]
            code.copy_(chosen.codes(of_input, most))
            row = factors[:, at + i]
            error = torch.div(of_input - chosen.values(code), row[:, at + i, None, None], out=errors[:, i : i + 1])
            own[:, i + 1 :].addcmul_(row[:, at + i + 1 : at + group, None], error, value=-1)
        left[:, at + group :].baddbmm_(
            factors[:, at : at + group, at + group :].transpose(1, 2), errors, alpha=-1)
    joined = _Range(*[torch.stack([getattr(one, name) for one in ranges], dim=1).flatten(0, 1)
                      for name in _Range._fields])
    return _rows(codes.view(-1, group, outputs), joined, weight)


def _rows(codes: Tensor, chosen: _Range, weight: Tensor) -> Rows:
    """Codes `[groups, numbers, out]` of at least as many groups as there are."""
    groups = -(-weight.shape[1] // codes.shape[1])
    flat = codes.to(torch.uint8).flatten(0, 1)[: weight.shape[1]]
    scales, minimums = (one[:groups, 0].t().half().contiguous() for one in chosen)
    return Rows(flat.t().contiguous(), Factors(scales), Factors(minimums))


def _range_of(groups: Tensor, importances: Tensor, most: int) -> _Range:
    """The range of each group with the least squared error.

    Args:
        groups: `[groups, numbers, out]`.
        importances: of the numbers' errors, `[groups, numbers, 1]` or a single one.
    """
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    weighted = importances / importances.mean(dim=1, keepdim=True) if importances.dim() else importances
    mean = _mean(weighted * groups)
    best: tuple[Tensor, ...] = ()
    for share in RANGES:
        scale, minimum = 2 * share * half / most, share * half - middle
        for attempt in range(2):
            tried = _Range(_half(scale), minimum.clamp(-MOST_SCALE, MOST_SCALE).half().float())
            codes = tried.codes(groups, most)
            error = _mean((tried.values(codes) - groups).square_().mul_(weighted))
            found = (error, *tried)
            best = tuple(torch.where(error < best[0], new, old) for new, old in zip(found, best, strict=True)
                         ) if best else found
            if attempt:
                break
            # The scale and the minimum that fit the codes best, by least squares.
            of_codes = weighted * codes
            center = _mean(of_codes)
            spread_of_codes = _mean(of_codes * codes) - center.square()
            scale = (_mean(of_codes * groups) - center * mean) / spread_of_codes.clamp_min(1e-9)
            minimum = scale * center - mean
    return _Range(*best[1:])


def _mean(groups: Tensor) -> Tensor:
    """The mean of each group, `[groups, 1, out]`, by halves, so that it does not depend on how many outputs there are.

    Args:
        groups: `[groups, numbers, out]`; the number of numbers is a power of two.
    """
    count = groups.shape[1]
    while groups.shape[1] > 1:
        groups = torch.add(*groups.chunk(2, dim=1))
    return groups / count


def _groups(weight: Tensor, format: Format) -> Tensor:
    """`[out, groups, numbers]` float32; the last group is filled up with zeros."""
    padded: Tensor = F.pad(weight, (0, -weight.shape[1] % format.group))
    groups: Tensor = padded.float().unflatten(1, (-1, format.group))
    return groups


def _half(scales: Tensor) -> Tensor:
    """Scales as a float16 stores them."""
    return scales.clamp(LEAST_SCALE, MOST_SCALE).half().float()


def _joined(codes: Tensor, weight: Tensor) -> Tensor:
    """The codes of the inputs that there are, `[out, in]` uint8."""
    flat: Tensor = codes.to(torch.uint8).flatten(1)
    return flat[:, : weight.shape[1]]


def _largest(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """The largest magnitude, a float32; NaN where there is one.  Without signs, bits order by magnitude."""
    wholes = ir.VectorType(WORD, values.type.count)
    sizes = builder.and_(builder.bitcast(values, wholes), all_of(wholes, 0x7FFFFFFF))
    largest = call(builder, f"llvm.vector.reduce.umax.v{wholes.count}i32", WORD, sizes)
    return builder.bitcast(largest, SINGLE)


def _quantize_unit(
    builder: ir.IRBuilder, x: ir.Value, target: ir.Value, facts: ir.Value, center: ir.Value, zero: ir.Value,
    factor: ir.Value, layout: ElementType, kind: ElementType,
) -> None:
    shape: BlockLayout = layout.instance_class.NUMBERS
    wholes, floats = (ir.VectorType(each, shape.unit) for each in (WORD, SINGLE))
    given = read(builder, x, ir.VectorType(SHORT, shape.unit) if kind == types.uint16 else floats, align=2)
    values = builder.fsub(widened(builder, given) if kind == types.uint16 else given, read(builder, center, floats))
    largest = _largest(builder, values)
    tiny, limit = ir.Constant(SINGLE, 1e-30), ir.Constant(SINGLE, UNIT_LIMIT)
    by = builder.fdiv(limit, builder.select(builder.fcmp_ordered(">", largest, tiny), largest, tiny))
    rounded = fast(builder, f"llvm.fma.v{shape.unit}f32", floats, values, spread(builder, by, floats),
                   all_of(floats, WITHOUT_FRACTION))
    steps = builder.trunc(builder.bitcast(rounded, wholes), ir.VectorType(BYTE, shape.unit))
    total = call(builder, f"llvm.vector.reduce.add.v{shape.unit}i32", WORD, builder.sext(steps, wholes))
    # Kernels are compiled as if floats never were NaN, so a NaN is detected, and stored, by its bits.
    is_nan = builder.icmp_unsigned(">", builder.bitcast(largest, WORD), ir.Constant(WORD, INFINITE))
    own = builder.fdiv(largest, limit)
    scale = builder.bitcast(builder.fmul(own, factor), WORD)
    write(builder, steps, target)
    write(builder, builder.select(is_nan, ir.Constant(WORD, NAN), scale), facts)
    if shape.has_minimums:
        second = builder.fneg(builder.fmul(own, builder.sitofp(total, SINGLE)))
    else:
        second = builder.mul(total, builder.neg(builder.trunc(zero, WORD)))
    write(builder, second, behind(builder, facts, 4))


quantize_unit: Callable[[int, int, int, int, int, float, BlockLayout, Real], None] = intrinsic(
    _quantize_unit, INT, INT, INT, INT, INT, FLOAT, KIND, KIND)
"""`quantize_unit(x, target, facts, center, zero, factor, layout, kind)`: quantize a unit at `x`, minus the float32 at
`center`, to bytes at `target`.

Stores its scale times `factor`, then its second fact, at `facts`.  A unit with a NaN has the scale NaN, one with an
infinity an infinite scale.
"""


@kernel
def quantize_rows(words: int, block: RowBlock, target: int, room: int, layout: BlockLayout, kind: Real) -> None:
    """The rows of a block of a product's x as units of bytes, then as facts.

    An unfinished unit, or inputs in another order, pass through the scratch `room`, padded with zeros.
    """
    depth, (first, rows, _, _, order) = load(words, DEPTH, INT64), block
    zero, centers = load(words, ZERO_AND_FACTOR, INT64) >> 32, load(words, CENTER, INT64)
    factor = float_of(load(words, ZERO_AND_FACTOR, INT64))
    unit = layout.unit
    units = (depth + layout.record - 1) // layout.record * (layout.record // unit)
    facts = target + units * rows * unit
    for row in range(rows):
        x = x_at(words, first + row, kind)
        for index in range(units):
            begin, place = index * unit, index * rows + row
            own, bytes_at, center = facts + place * FACTS, target + place * unit, centers + begin * 4
            if order == 0 and begin + unit <= depth:
                quantize_unit(x + begin * bytes_of(kind), bytes_at, own, center, zero, factor, layout, kind)
            else:
                count = min(max(depth - begin, 0), unit)
                for i in range(count):
                    source = begin + i if order == 0 else load(order, begin + i, INT32)
                    store(room, i, load(x, source, kind), FLOAT32)
                fill(room + count * 4, unit - count, ZERO)
                quantize_unit(room, bytes_at, own, center, zero, factor, layout, FLOAT32)
