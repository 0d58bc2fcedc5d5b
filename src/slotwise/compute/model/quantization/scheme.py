"""What a quantized format tells a loader: which modules it quantized, and how a layer's tensors become a matrix.

    config.json ─► Quantization ─► Scheme of a module ─► parts in the file ─► QuantizedMatrix
                                   its `Format`          names, shapes, types

A `Quantization` reads and checks every field of `quantization_config` once.  A `Scheme` is what it says about one
module: the tensors that its weight consists of, and how they are put together.  Neither opens a file.

Also here: what several formats share, integers packed into 32-bit words (all hosts are little-endian), and codes with a
scale, and perhaps a zero point, for each group (`Affine`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slotwise.compute.kernels.matrix import Factors, Format, QuantizedMatrix, Rows
from slotwise.compute.model.fields import Fields
from slotwise.errors import CheckpointError


def nibbles(stored: Tensor) -> Tensor:
    """The 4-bit numbers in `stored [..., n]` uint8, the low half of each byte first: `[..., 2 * n]` uint8."""
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of `bits` (4 or 8) bits in each row of `words [rows, n]` int32, lowest bits first.

    Returns `[rows, count]` uint8.
    """
    stored = words.contiguous().view(torch.uint8)
    return (nibbles(stored) if bits == 4 else stored)[:, :count]


def words_of(count: int, bits: int) -> int:
    """The 32-bit words that hold `count` numbers of `bits` bits."""
    return -(-count * bits // 32)


Shape = tuple[int, ...]

FLOATS = ("F16", "BF16", "F32")  # of scales, by their names in safetensors files
NUMBER: tuple[Shape, ...] = ((), (1,), (1, 1))  # shapes of one number
GROUPS = (16, 32, 64, 128)  # supported sizes, in addition to whole rows
EXACT = 1 << 24  # whole numbers below it are float32


class StoredPart(NamedTuple):
    """A tensor that belongs to a layer's quantized weight."""

    kinds: tuple[str, ...]  # of its numbers, by their names in the file
    shapes: tuple[Shape, ...] = ()  # one of which it must have; none: any
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The parts of one quantized weight `[outputs, depth]`, as the file stores them."""

    name: str  # of the module
    where: str  # the checkpoint, for messages
    outputs: int
    depth: int
    parts: Mapping[str, Tensor]  # by what follows the module's name and a dot

    def has(self, part: str) -> bool:
        return part in self.parts

    def tensor(self, part: str) -> Tensor:
        return self.parts[part]

    def numbers(self, part: str) -> Tensor:
        """The part, of floats.  Raises CheckpointError where one of them is not finite."""
        numbers = self.parts[part]
        if not numbers.isfinite().all():
            raise self.error(part, "holds NaN or infinite numbers: download the checkpoint again")
        return numbers

    def error(self, part: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.name}.{part} {problem}")


class Scheme(Protocol):
    """How one module's weight is stored."""

    def format(self, depth: int) -> Format:
        """How the numbers of a weight with `depth` inputs are encoded; scales may be stored in another float type."""
        ...

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        """The tensors of a weight `[outputs, depth]`, by what follows the module's name and a dot."""
        ...

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        """The weight, of parts as `parts` says.

        Raises CheckpointError, or its `read` does, for parts that contradict the config or each other.
        """
        ...


class Quantization(Protocol):
    """A checkpoint's quantization_config."""

    description: str  # for people: the format, and the bits of a weight

    def scheme(self, module: str) -> Scheme | None:
        """How the weight of `module` is stored; None: as a plain tensor."""
        ...


def refuse_unknown(fields: Fields, method: str, known: Collection[str]) -> None:
    """Raises CheckpointError for a field that is set and is not `known`: it may change what the numbers mean."""
    for name, value in fields.values.items():
        if name not in known and value is not None and value not in (False, "", [], {}):
            raise fields.error(f"{name:.60}", f"is not supported with {method}")


def choice(fields: Fields, name: str, default: str | None, *supported: str) -> str:
    """A string in lower case that is one of `supported`.  Raises CheckpointError for any other."""
    value = fields.text(name, default=default).lower()
    if value not in supported:
        raise fields.error(name, f"must be {' or '.join(supported)}, not {value!r:.40}")
    return value


def read_group(fields: Fields, name: str, default: int | None = None) -> int:
    """The inputs that share a scale; 0: all of a row.  Raises CheckpointError for a size that is not supported."""
    size = fields.integer(name, default=default, minimum=-1)
    if size not in GROUPS and size != -1:
        raise fields.error(name, f"must be -1, {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]}, not {size}")
    return max(size, 0)


def groups_of(depth: int, group: int) -> int:
    """The groups of a row of `depth` inputs; `group` 0: one."""
    return -(-depth // group) if group else 1


def check_range(layer: StoredLayer, part: str, scales: Tensor, largest: float) -> None:
    """Raises CheckpointError where the largest number of a weight, `scales` times `largest`, exceeds float32."""
    if float(scales.abs().amax()) * largest > torch.finfo(torch.float32).max:
        raise layer.error(part, "gives weights that exceed float32: download the checkpoint again")


def read_order(layer: StoredLayer, part: str, group: int) -> Tensor | None:
    """Where each input stands once inputs are sorted by their group, which `part` names; None: where it is.

    Raises CheckpointError where a group has not `group` inputs (0: all of them).
    """
    group_of, size = layer.tensor(part).long(), group or layer.depth
    in_place = torch.arange(layer.depth) // size
    if torch.equal(group_of, in_place):
        return None
    order = group_of.argsort(stable=True).argsort()
    if not torch.equal(order // size, group_of):
        raise layer.error(part, f"must give each group {size} inputs")
    return order


@dataclass(frozen=True, slots=True)
class Affine:
    """Unsigned codes of `bits` bits: `scale * (code - zero)`."""

    bits: int
    group: int  # inputs that share a scale; 0: all of a row
    has_zeros: bool  # one of each group; else the middle of the codes is zero

    def format(self, depth: int) -> Format:
        if self.has_zeros:  # as minimums, exact in float32
            return Format(self.bits, self.group, torch.float32, has_minimums=True)
        return Format(self.bits, self.group, torch.float16, zero=1 << self.bits - 1)

    def matrix(
        self, layer: StoredLayer, codes: Callable[[int, int], Tensor], part: str, scales: Tensor, zeros: Tensor | None,
        order: Tensor | None = None,
    ) -> QuantizedMatrix:
        """The weight with `codes(first, end) [end - first, depth]` uint8 and `scales [outputs, groups]`.

        `part` names the scales in messages; `zeros` are of their shape.
        """
        check_range(layer, part, scales, 1 << self.bits)
        minimums = None
        if self.has_zeros:
            assert zeros is not None
            scales = scales.float()
            minimums = scales * zeros.float()

        def read(first: int, end: int) -> Rows:
            return Rows(codes(first, end), Factors(scales[first:end]),
                        None if minimums is None else Factors(minimums[first:end]))

        kind = replace(self.format(layer.depth), scale=scales.dtype)
        return QuantizedMatrix(kind, layer.outputs, layer.depth, read, order)
