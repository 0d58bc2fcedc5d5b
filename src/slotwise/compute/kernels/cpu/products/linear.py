"""Products with weights that are packed once: what all products share, and those in float32.

Outputs are packed into *panels*, groups of outputs that are computed together; a product is items of a block of rows
times a panel, which threads take (`threads.py`).  A thread prepares a block's rows (packs or quantizes them) once for
all panels that it multiplies with them, and multiplies a panel by tiles of rows.  All blocks are multiplied with the
same weights, or each with the weights that a table names: the experts of a mixture, in one launch.

    BLOCKS = 0     rows 0 ... BLOCK, BLOCK ... 2 BLOCK, and so on, with the words WEIGHT, BIAS and ORDER
    a table        int64: the number of blocks, then a `RowBlock` for each
    SOURCES = 0    row i of the result is that of row i of x
    a table        int32: for each row of the result its row of x

While a thread multiplies a panel, its next panel is prefetched, a share of it with each tile:

    one tile                       its own panel, a little ahead of what is read
    the first tile of a panel      the same, if the panel was not prefetched: the thread's first panel, a stolen one, or
                                   one after a panel of one tile
    any other tile                 its share of the next panel

Results beyond the last output are computed and dropped.

Here bfloat16 is widened to float32 on its way into registers, by `gemm.py`, for processors that multiply nothing
smaller (`paths.py`) and have no kernel of their own (`linear_widened.py`).  float32 products take the same path, which
makes a token's result independent of its batch-mates, bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.compute.kernels.cpu.cache import stored_order
from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel, kernel
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.pointwise import NO_ACTIVATION, activate_columns
from slotwise.compute.kernels.cpu.processor import PAIR
from slotwise.compute.kernels.cpu.products.gemm import (
    GATED,
    MULTIPLY,
    PLAIN,
    STRIP,
    STRIP_ROW_BYTES,
    WIDE,
    call_multiply,
)
from slotwise.compute.kernels.cpu.simd import (
    FLOAT32,
    INT32,
    INT64,
    ZERO,
    Real,
    bytes_of,
    fetch_add,
    fill,
    for_floats,
    load,
    prefetch_all,
    store,
)
from slotwise.compute.kernels.cpu.threads import NOTHING, pop, rows_of_a_block, upcoming
from slotwise.compute.kernels.interface import Linear

# Outputs computed together: the weights of each PAIR of them lie together.
PANEL = 32
# Rows multiplied at once.
TILE = 12
# Bytes of weights between what is read and what is prefetched.
AHEAD = 4096
# Of rows widened at once: a quarter of a typical second-level cache.
BLOCK_FLOATS = 1 << 16

# Arguments of every product, in words after the header; of those behind SOURCES a kernel reads its own.
(X, WEIGHT, BIAS, ORDER, OUT, TOKENS, DEPTH, OUTPUTS, STORED, FORM, BLOCK, SCRATCH, SCRATCH_BYTES, THREADS, BLOCKS,
 SOURCES, MULTIPLY_ADDRESS, ACTIVATION) = range(HEADER, HEADER + 18)
# The arguments that a table names for each block.
OF_WEIGHTS = slice(WEIGHT - X, OUT - X)


class RowBlock(NamedTuple):
    """At most BLOCK rows that are multiplied together, and addresses of what they are multiplied with.

    `order` is the order of the inputs, where the weights have another one (`linear_blocks.py`).
    """

    first: int
    rows: int
    weights: int
    bias: int
    order: int


# Words of a block in a table.
BLOCK_WORDS = len(RowBlock._fields)


class Tables(NamedTuple):
    """Addresses of the tables of a product's rows, or 0."""

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
    """The address of the panel of the item `after`, or of `item` where no next item is known.

    The first `ahead` bytes of a panel with other rows are prefetched: it need not lie after the panel of `item`.
    """
    known = item if after == NOTHING else after
    place = block_at(words, known // panels).weights + known % panels * panel_bytes
    if known // panels != item // panels:
        prefetch_all(place, ahead)
    return place


@kernel
def result_bytes(form: int, kind: Real) -> int:
    """Bytes of a result of products whose activations are of `kind`."""
    return 4 if form == WIDE else bytes_of(kind)


@kernel
def copy_results(source: int, target: int, count: int, form: int, kind: Real) -> None:
    """Copy `count` results of products whose activations are of `kind`."""
    if form == WIDE:
        for i in range(count):
            store(target, i, load(source, i, FLOAT32), FLOAT32)
    else:
        for i in range(count):
            store(target, i, load(source, i, kind), kind)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights in panels, and how their kernel runs.

    Args:
        stored: numbers per token in the result: half of the outputs where these are gates and up projection.
        block_rows: rows prepared at once, for a number of tokens.
        floats: of scratch memory per thread.
        multiply: the kernel that `code` calls.
        form: of results, as in `gemm.py`.
        activation: of results of the form PLAIN, by its number in `interface.ACTIVATIONS`; only in panel products.
    """

    code: CompiledKernel
    panels: Tensor
    bias: Tensor | None
    depth: int
    outputs: int
    stored: int
    block_rows: Callable[[int], int]
    floats: int
    multiply: CompiledKernel | None = None
    form: int = PLAIN
    activation: int = NO_ACTIVATION

    def product(self, launcher: KernelLauncher) -> Linear:
        """The product with these weights."""
        return PackedProduct(self, launcher)

    def kernel(self, kind: torch.dtype) -> CompiledKernel:
        """The kernel; weights are packed for one type of activations."""
        return self.code

    def arguments(
        self, launcher: KernelLauncher, x: int, out: int, tokens: int, stride: int = 0, tables: Tables = NO_TABLES,
    ) -> tuple[int, ...]:
        """The arguments of the product of `tokens` rows at `x` to `out`; valid until the launcher's next kernel.

        Args:
            stride: numbers of a row of the result; these kernels store rows of `stored` numbers only.
            tables: of the rows; with a table of blocks `tokens` is 1.
        """
        bias, multiply = self.bias, self.multiply
        return (
            x, self.panels.data_ptr(), 0 if bias is None else bias.data_ptr(), 0, out, tokens, self.depth,
            self.outputs, self.stored, self.form, self.block_rows(tokens),
            launcher.scratch(launcher.threads * self.floats), self.floats * 4, launcher.threads, *tables,
            0 if multiply is None else multiply.address, self.activation)


class PackedPart(Protocol):
    """Packed weights of some outputs of a product: `PackedWeights`, or the panels of `linear_blocks.py`."""

    @property
    def depth(self) -> int: ...

    @property
    def stored(self) -> int:
        """Numbers per token in the result."""
        ...

    @property
    def floats(self) -> int:
        """Floats of scratch memory per thread."""
        ...

    @property
    def block_rows(self) -> Callable[[int], int]:
        """Rows prepared at once, for a number of tokens."""
        ...

    def kernel(self, kind: torch.dtype) -> CompiledKernel:
        """The kernel for activations of `kind`."""
        ...

    def arguments(
        self, launcher: KernelLauncher, x: int, out: int, tokens: int, stride: int = 0, tables: Tables = NO_TABLES,
    ) -> tuple[int, ...]:
        """The kernel's arguments, in the order of the words above."""
        ...


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """The product with packed weights, a function of `x [..., depth]`."""

    packed: PackedWeights
    launcher: KernelLauncher

    def __call__(self, x: Tensor) -> Tensor:
        packed, launcher, x = self.packed, self.launcher, x.contiguous()
        out = launcher.empty((*x.shape[:-1], packed.stored), torch.float32 if packed.form == WIDE else x.dtype)
        launcher.give(*packed.arguments(launcher, x.data_ptr(), out.data_ptr(), x.numel() // packed.depth))
        launcher.together(packed.code)
        return out


def in_panels(outputs: Tensor, size: int, *, is_gated: bool = False) -> Tensor:
    """`outputs [out, ...]`, padded with zeros to whole panels of `size`.

    Args:
        is_gated: they are gates, then the up projection: a panel becomes half of either.
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
        target = (first + row) * outputs + column
        if load(words, FORM, INT64) == WIDE:
            for i in range(columns):
                store(load(words, OUT, INT64), target + i, load(source, i, FLOAT32), FLOAT32)
        else:
            for i in range(columns):
                store(load(words, OUT, INT64), target + i, load(source, i, FLOAT32), kind)


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


PRODUCT = for_floats(_product)


def pack_panels(weight: Tensor) -> Tensor:
    """`weight [out, in]` as `[out / PAIR, in, PAIR]`, zeros up to whole panels, columns in the order they are read."""
    filled = in_panels(weight, PANEL).view(-1, PAIR, weight.shape[1])
    return filled[:, stored_order(PAIR, weight.dtype)].transpose(1, 2).contiguous()


def tiled_linear(weight: Tensor, bias: Tensor | None, launcher: KernelLauncher, form: int = PLAIN) -> Linear:
    """`weight [out, in]` through `gemm.py`, with results of a form, PLAIN or WIDE."""
    outputs, depth = weight.shape
    block = max(TILE, BLOCK_FLOATS // depth // TILE * TILE)
    packed = PackedWeights(
        PRODUCT[weight.dtype], pack_panels(weight), bias, depth, outputs, outputs, lambda tokens: block,
        TILE * PANEL + block * -(-depth // STRIP) * STRIP, MULTIPLY[weight.dtype], form)
    return packed.product(launcher)


# Products with panels of packed weights: the loop that `linear_bf16.py`, `linear_fp16.py` and other modules share.  A
# `Method` and a `PanelLayout` of the packed weights say what differs.


class PanelLayout(NamedTuple):
    """How weights and a thread's memory are laid out; sizes are in bytes.

    Args:
        columns: outputs of a panel.
        unit: inputs that are packed together.
        steps: of a unit; memory is prefetched with each step.
        line: weights of a step.
        behind: what a panel has after its weights.
        tallest: the most rows of a tile.
        whole: a block of rows is filled up to a multiple of this number.
        odd: 1: an odd number of rows lies in each strip of a block, the last one unused.  Strips of a power of two of
            rows would all lie in the same few sets of the first-level cache, which holds only twelve of each.
        ahead: between what is read and what is prefetched of the same panel.
        block: of rows prepared at once.
        row: of a prepared row, for a unit.
        results, rows: in a thread's memory, before the results of a tile, and before the prepared rows.
        widened: after the prepared rows, for each unit of a panel that is widened there.
    """

    columns: int
    unit: int
    steps: int
    line: int
    behind: int
    tallest: int
    whole: int
    ahead: int
    block: int
    row: int
    results: int
    rows: int
    widened: int = 0
    odd: int = 0


class Tile(NamedTuple):
    """A panel and the rows that it is multiplied with: addresses, and strides in bytes.

    Args:
        rows, first: of the tile, and the first of them in the block.
        block_rows: of a strip of the block.
        x: the block's prepared rows.
        memory: of the thread.
        form: of results, as in `gemm.py`.
        asked, step: what to prefetch, and how much with each step of the layout.
    """

    weights: int
    bias: int
    rows: int
    first: int
    block_rows: int
    x: int
    memory: int
    target: int
    stride: int
    form: int
    asked: int
    step: int


@kernel
def _nothing(memory: int) -> None:
    """The beginning and end of a method that has neither."""


class Method(NamedTuple):
    """The parts of a kernel that differ between products.

        prepare(words, first, rows, strip_rows, target)     rows `first ... first + rows` of x as `multiply` reads them
        multiply(words, tile)                               the product of a `Tile`
        begin(memory), end(memory)                          around all that a thread multiplies
    """

    prepare: Callable[[int, int, int, int, int], None]
    multiply: Callable[[int, Tile], None]
    begin: Callable[[int], None] = _nothing
    end: Callable[[int], None] = _nothing


@kernel
def _filled_up(rows: int, whole: int) -> int:
    return (rows + whole - 1) // whole * whole


@dataclass(frozen=True, slots=True)
class PanelProduct:
    """A kernel of products with panels that are packed as `layout` says."""

    code: CompiledKernel
    layout: PanelLayout

    def linear(
        self, panels: Tensor, bias: Tensor | None, shape: tuple[int, int], launcher: KernelLauncher, form: int
    ) -> Linear:
        """The product with `panels` of a weight of `shape`, outputs and inputs.

        Args:
            bias: `[outputs]` of float32 in the order of the panels, or None where panels hold their own.
            form: of results, as in `gemm.py`; GATED: half of the outputs are gates, half the up projection.
        """
        (outputs, depth), layout = shape, self.layout
        units = -(-depth // layout.unit)
        row_bytes = units * layout.row
        most = max(layout.tallest, layout.block // row_bytes // layout.tallest * layout.tallest)

        def block_rows(tokens: int) -> int:
            wanted = rows_of_a_block(tokens, most, launcher.threads)
            return -(-wanted // layout.whole) * layout.whole

        memory = layout.rows + (most | layout.odd) * row_bytes + units * layout.widened
        packed = PackedWeights(self.code, launcher.weights.copy(panels), bias, depth, outputs,
                        outputs // 2 if form == GATED else outputs, block_rows, (memory + 63) // 64 * 16, form=form)
        return packed.product(launcher)


def _panel_kernel(multiply: Callable[[int, Tile], None], layout: PanelLayout, kind: Real) -> Callable[..., None]:
    """`multiply_panel`: the product of a panel and a block of rows, tile by tile, with a method's `multiply`."""
    @kernel
    def multiply_panel(
        words: int, memory: int, block: RowBlock, panel: int, following: int, is_cold: int
    ) -> None:
        """Multiply one panel with a block of rows, while the panel at `following` is prefetched."""
        first, rows, weights, bias, _ = block
        stored, form, activation = load(words, STORED, INT64), load(words, FORM, INT64), load(words, ACTIVATION, INT64)
        units = (load(words, DEPTH, INT64) + layout.unit - 1) // layout.unit
        width = layout.columns // 2 if form == GATED else layout.columns
        size = result_bytes(form, kind)
        left, stride = stored - panel * width, stored * size
        weights += panel * (units * layout.steps * layout.line + layout.behind)
        tiles = (rows + layout.tallest - 1) // layout.tallest
        share = (layout.line + tiles - 1) // tiles
        row = 0
        for turn in range(tiles):
            # Tiles have nearly equal heights, because a low tile costs nearly as much as a tall one.
            count = min(_filled_up((rows - row + tiles - turn - 1) // (tiles - turn), layout.whole), rows - row)
            asked, step = following + turn * share * units * layout.steps, share
            if tiles == 1 or (turn == 0 and is_cold):
                asked, step = weights + layout.ahead, layout.line
            place = load(words, OUT, INT64) + (first + row) * stride + panel * width * size
            target, target_stride = (
                (place, stride) if left >= width else (memory + layout.results, width * size))
            multiply(words, Tile(
                weights, bias + panel * layout.columns * 4, count, row, _filled_up(rows, layout.whole) | layout.odd,
                memory + layout.rows, memory, target, target_stride, form, asked, step))
            if activation != NO_ACTIVATION:
                for i in range(count):  # while they are in the first-level cache
                    activate_columns(target + i * target_stride, activation, kind)
            if left < width:
                for i in range(count):
                    copy_results(target + i * target_stride, place + i * stride, left, form, kind)
            row += count

    return multiply_panel


def panel_product(name: str, method: Method, layout: PanelLayout, kind: Real) -> PanelProduct:
    """The kernel of products by a method, with results of `kind`; `name` is unique in the module of `multiply`."""
    prepare, multiply, begin, end = method

    multiply_panel = _panel_kernel(multiply, layout, kind)

    def product(words: int) -> None:
        panels = (load(words, OUTPUTS, INT64) + layout.columns - 1) // layout.columns
        threads, items = load(words, THREADS, INT64), num_blocks(words) * panels
        units = (load(words, DEPTH, INT64) + layout.unit - 1) // layout.unit
        panel_bytes = units * layout.steps * layout.line + layout.behind
        thread = fetch_add(words + THREAD_COUNTER, 1)
        memory = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
        held, prefetched = -1, NOTHING
        begin(memory)
        item = pop(words, thread, threads, items)
        while item != NOTHING:
            number, panel = item // panels, item % panels
            block = block_at(words, number)
            if number != held:
                strip_rows = _filled_up(block.rows, layout.whole) | layout.odd
                prepare(words, block.first, block.rows, strip_rows, memory + layout.rows)
                held = number
            after = upcoming(words, thread, threads, items)
            following = panel_after(words, item, after, panels, panel_bytes, layout.ahead)
            multiply_panel(words, memory, block, panel, following, item != prefetched)
            prefetched = after if block.rows > layout.tallest else NOTHING
            item = pop(words, thread, threads, items)
        end(memory)

    source = inspect.unwrap(multiply)
    product.__module__, product.__name__, product.__qualname__ = source.__module__, name, name
    return PanelProduct(CompiledKernel(product, source=source.__code__.co_filename), layout)
