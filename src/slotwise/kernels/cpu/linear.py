"""Products with weights that are packed once: what all of them share, and those in float32.

Outputs are packed into *panels*, groups of outputs that are computed together; a product is items of a block of rows
times a panel, which threads take.  `linear_panels.py` has those of other panels.  All blocks are multiplied with the
same weights, or each with those that a table names: the experts of a mixture, in one launch.

    BLOCKS = 0     rows 0 ... BLOCK, BLOCK ... 2 BLOCK, and so on, with the words WEIGHT, BIAS and ORDER
    a table        int64: the number of blocks, then of each a `RowBlock`
    SOURCES = 0    row i of the result is that of row i of x
    a table        int32: of each row of the result the row of x

Here bfloat16 is widened to float32 on its way into registers, by `gemm.py`, for processors that multiply nothing
smaller (`paths.py`).  float32 products take the same path, which makes a token's result independent of its batch-mates,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.kernels.cpu.cache import stored_order
from slotwise.kernels.cpu.gemm import MULTIPLY, STRIP, STRIP_ROW_BYTES, call_multiply
from slotwise.kernels.cpu.jit.compiler import Compiled, kernel, specialised
from slotwise.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.kernels.cpu.processor import PAIR
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    ZERO,
    Real,
    bytes_of,
    fetch_add,
    fill,
    load,
    prefetch_all,
    store,
)
from slotwise.kernels.cpu.work_queue import NOTHING
from slotwise.kernels.interface import Linear

PANEL = 32  # outputs computed together: the weights of each PAIR of them lie together
TILE = 12  # rows multiplied at once
AHEAD = 4096  # bytes of weights between what is read and what is prefetched
BLOCK_FLOATS = 1 << 16  # of rows widened at once: a quarter of a typical second-level cache

# Arguments of every product, in words after the header; MULTIPLY_ADDRESS of those in float32 only.
(X, WEIGHT, BIAS, ORDER, OUT, TOKENS, DEPTH, OUTPUTS, STORED, BLOCK, SCRATCH, SCRATCH_BYTES, THREADS, BLOCKS,
 SOURCES, MULTIPLY_ADDRESS) = range(HEADER, HEADER + 16)
OF_WEIGHTS = slice(WEIGHT - X, OUT - X)  # those that a table names for each block


class RowBlock(NamedTuple):
    """Rows that are multiplied together, and addresses of what they are multiplied with."""

    first: int
    rows: int  # at most BLOCK
    weights: int
    bias: int
    order: int  # of the inputs, where weights have another one (`linear_blocks.py`)


BLOCK_WORDS = len(RowBlock._fields)  # of a block in a table


class Tables(NamedTuple):
    """Addresses of tables of the rows of a product, or 0."""

    blocks: int = 0
    sources: int = 0


NO_TABLES = Tables()


@kernel
def num_blocks(words: int) -> int:
    """The number of blocks of rows of a product."""
    table, block = load(words, BLOCKS, INT64), load(words, BLOCK, INT64)
    return load(table, 0, INT64) if table != 0 else (load(words, TOKENS, INT64) + block - 1) // block


@kernel
def block_at(words: int, number: int) -> RowBlock:
    """A block of rows of a product."""
    table, block = load(words, BLOCKS, INT64), load(words, BLOCK, INT64)
    if table == 0:
        first = number * block
        return RowBlock(first, min(block, load(words, TOKENS, INT64) - first), load(words, WEIGHT, INT64),
                        load(words, BIAS, INT64), load(words, ORDER, INT64))
    at = 1 + number * BLOCK_WORDS
    return RowBlock(load(table, at, INT64), load(table, at + 1, INT64), load(table, at + 2, INT64),
                    load(table, at + 3, INT64), load(table, at + 4, INT64))


@kernel
def x_at(words: int, row: int, kind: Real) -> int:
    """The address of the row of x whose product is a row of the result."""
    sources = load(words, SOURCES, INT64)
    source = load(sources, row, INT32) if sources != 0 else row
    return load(words, X, INT64) + source * load(words, DEPTH, INT64) * bytes_of(kind)


@kernel
def panel_after(words: int, item: int, after: int, panels: int, panel_bytes: int, ahead: int) -> int:
    """The address of the panel of the item `after`, or of the one of `item` where no other is known.

    The first `ahead` bytes of a panel with other rows are prefetched: it need not lie behind that of `item`.
    """
    known = item if after == NOTHING else after
    place = block_at(words, known // panels).weights + known % panels * panel_bytes
    if known // panels != item // panels:
        prefetch_all(place, ahead)
    return place


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights in panels, and how their kernel runs."""

    code: Compiled
    panels: Tensor
    bias: Tensor | None
    depth: int
    outputs: int
    stored: int  # numbers per token in the result: half of the outputs where these are gates and what they gate
    block_rows: Callable[[int], int]  # rows prepared at once, for a number of tokens
    floats: int  # of scratch memory per thread
    multiply: Compiled | None = None  # called by the code

    def product(self, launcher: KernelLauncher) -> Linear:
        """The product with these weights."""
        return Product(self, launcher)

    def kernel(self, kind: torch.dtype) -> Compiled:
        """The kernel; weights are packed for one type of activations."""
        return self.code

    def arguments(
        self, launcher: KernelLauncher, x: int, out: int, tokens: int, stride: int = 0, tables: Tables = NO_TABLES,
    ) -> tuple[int, ...]:
        """The arguments of the product of `tokens` rows at `x` to `out`; valid until the launcher's next kernel.

        Args:
            stride: numbers of a row of the result: these kernels know those of their own only.
            tables: of the rows; with blocks `tokens` is 1.
        """
        bias, multiply = self.bias, self.multiply
        return (
            x, self.panels.data_ptr(), 0 if bias is None else bias.data_ptr(), 0, out, tokens, self.depth,
            self.outputs, self.stored, self.block_rows(tokens), launcher.scratch(launcher.threads * self.floats),
            self.floats * 4, launcher.threads, *tables, 0 if multiply is None else multiply.address)


class PackedPart(Protocol):
    """Packed weights of some outputs of a product: `Packed`, or the panels of `linear_blocks.py`."""

    @property
    def depth(self) -> int: ...

    @property
    def stored(self) -> int:
        """Numbers per token in the result."""
        ...

    @property
    def floats(self) -> int:
        """Of scratch memory per thread."""
        ...

    @property
    def block_rows(self) -> Callable[[int], int]:
        """Rows prepared at once, for a number of tokens."""
        ...

    def kernel(self, kind: torch.dtype) -> Compiled:
        """The kernel for activations of `kind`."""
        ...

    def arguments(
        self, launcher: KernelLauncher, x: int, out: int, tokens: int, stride: int = 0, tables: Tables = NO_TABLES,
    ) -> tuple[int, ...]:
        """The kernel's arguments, in the order of the words above."""
        ...


@dataclass(frozen=True, slots=True)
class Product:
    """The product with packed weights, a function of `x [..., depth]`."""

    packed: Packed
    launcher: KernelLauncher

    def __call__(self, x: Tensor) -> Tensor:
        packed, launcher, x = self.packed, self.launcher, x.contiguous()
        out = launcher.empty((*x.shape[:-1], packed.stored), x.dtype)
        launcher.give(*packed.arguments(launcher, x.data_ptr(), out.data_ptr(), x.numel() // packed.depth))
        launcher.together(packed.code)
        return out


def in_panels(outputs: Tensor, size: int, *, is_gated: bool = False) -> Tensor:
    """`outputs [out, ...]`, padded with zeros to whole panels of `size`.

    Args:
        is_gated: they are gates, then as many of what they gate: a panel becomes half of either.
    """
    if is_gated:
        halves = [in_panels(half, size // 2).unflatten(0, (-1, size // 2)) for half in outputs.chunk(2)]
        return torch.cat(halves, dim=1).flatten(0, 1)
    return F.pad(outputs, (0, 0) * (outputs.dim() - 1) + (0, -len(outputs) % size))


@kernel
def _widen_block(words: int, first: int, rows: int, target: int, kind: Real) -> None:
    """Rows `first ... first + rows` of x, as strips of float32."""
    depth = load(words, DEPTH, INT64)
    for row in range(rows):
        x = x_at(words, first + row, kind)
        for start in range(0, depth, STRIP):
            strip = target + (start * rows + row * STRIP) * 4
            for i in range(min(STRIP, depth - start)):
                store(strip, i, load(x, start + i, kind), FLOAT32)


@kernel
def _store_tile(words: int, sums: int, first: int, rows: int, panel: int, bias: int, kind: Real) -> None:
    """Store a tile's sums plus bias to the output."""
    outputs, column = load(words, OUTPUTS, INT64), panel * PANEL
    columns = min(PANEL, outputs - column)
    for row in range(rows):
        source = sums + row * PANEL * 4
        if bias != 0:
            for i in range(columns):
                store(source, i, load(source, i, FLOAT32) + load(bias, column + i, kind), FLOAT32)
        target = load(words, OUT, INT64) + ((first + row) * outputs + column) * bytes_of(kind)
        for i in range(columns):
            store(target, i, load(source, i, FLOAT32), kind)


@kernel
def _product(words: int, kind: Real) -> None:
    depth, panels = load(words, DEPTH, INT64), (load(words, OUTPUTS, INT64) + PANEL - 1) // PANEL
    items, panel_bytes = num_blocks(words) * panels, depth * PANEL * bytes_of(kind)
    sums = load(words, SCRATCH, INT64) + fetch_add(words + THREAD_COUNTER, 1) * load(words, SCRATCH_BYTES, INT64)
    strips = sums + TILE * PANEL * 4
    held = -1
    item = fetch_add(words, 1)
    while item < items:
        number, panel = item // panels, item % panels
        first, rows, weight, bias, _ = block_at(words, number)
        if number != held:
            _widen_block(words, first, rows, strips, kind)
            held = number
        weight += panel * panel_bytes
        for row in range(0, rows, TILE):
            count = min(TILE, rows - row)
            fill(sums, TILE * PANEL, ZERO)
            call_multiply(load(words, MULTIPLY_ADDRESS, INT64), count, PANEL, strips + row * STRIP_ROW_BYTES,
                          rows * STRIP_ROW_BYTES, weight, PAIR * bytes_of(kind), depth * PAIR * bytes_of(kind), depth,
                          sums, PANEL * 4, AHEAD)
            _store_tile(words, sums, first + row, count, panel, bias, kind)
        item = fetch_add(words, 1)


PRODUCT = {torch.bfloat16: specialised(_product, BFLOAT16), torch.float32: specialised(_product, FLOAT32)}


def pack_panels(weight: Tensor) -> Tensor:
    """`weight [out, in]` as `[out / PAIR, in, PAIR]`, zeros up to whole panels, columns in the order they are read."""
    filled = in_panels(weight, PANEL).view(-1, PAIR, weight.shape[1])
    return filled[:, stored_order(PAIR, weight.dtype)].transpose(1, 2).contiguous()


def tiled_linear(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher) -> Linear:
    """`weight [out, in]` through `gemm.py`."""
    outputs, depth = weight.shape
    block = max(TILE, BLOCK_FLOATS // depth // TILE * TILE)
    packed = Packed(
        PRODUCT[weight.dtype], pack_panels(weight), bias, depth, outputs, outputs, lambda tokens: block,
        TILE * PANEL + block * -(-depth // STRIP) * STRIP, MULTIPLY[weight.dtype])
    return packed.product(launcher)
