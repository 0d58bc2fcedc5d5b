"""Reads memory the way products read their weights, to measure its rate: in adjacent pieces per thread, prefetched.

That rate bounds every product with few rows.  Work is divided as in products (`threads.py`), so a thread that the
system has preempted holds up one piece, not a barrier.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from torch import Tensor

from slotwise.compute.kernels.cpu.jit.compiler import INT, CompiledKernel, intrinsic
from slotwise.compute.kernels.cpu.jit.llvm import LONG, Loop, all_of, behind, number, prefetch, read, write
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.simd import INT64, fetch_add, load
from slotwise.compute.kernels.cpu.threads import NOTHING, pop

# In bytes: what a thread takes at once, what it reads at once, and how far ahead of that it prefetches.
PIECE = 1 << 18
TURN = 256
AHEAD = 2048
ADDRESS, PIECES, THREADS, SINK = range(HEADER, HEADER + 4)
_LINE = ir.VectorType(LONG, 8)


def _fold(builder: ir.IRBuilder, address: ir.Value, target: ir.Value) -> None:
    """Fold a whole piece to a cache line at `target`, so that no read is optimized away."""
    turns = Loop(builder, number(PIECE), TURN, [all_of(_LINE, 0)] * (TURN // 64))
    place = builder.add(address, turns.index)
    prefetch(builder, behind(builder, place, AHEAD), TURN)
    lines = turns.close([
        builder.xor(so_far, read(builder, behind(builder, place, 64 * at), _LINE, 64))
        for at, so_far in enumerate(turns.values)])
    whole = lines[0]
    for line in lines[1:]:
        whole = builder.xor(whole, line)
    write(builder, whole, target)


_fold_piece: Callable[[int, int], None] = intrinsic(_fold, INT, INT)


def _read_pieces(words: int) -> None:
    pieces, threads = load(words, PIECES, INT64), load(words, THREADS, INT64)
    thread = fetch_add(words + THREAD_COUNTER, 1)
    sink = load(words, SINK, INT64) + thread * 64
    piece = pop(words, thread, threads, pieces)
    while piece != NOTHING:
        _fold_piece(load(words, ADDRESS, INT64) + piece * PIECE, sink)
        piece = pop(words, thread, threads, pieces)


READ = CompiledKernel(_read_pieces)


def read_all(data: Tensor, launcher: KernelLauncher) -> None:
    """Read all whole pieces of `data`, whose address is a multiple of 64, on all threads of `launcher`."""
    launcher.give(data.data_ptr(), data.nbytes // PIECE, launcher.threads, launcher.scratch(16 * launcher.threads))
    launcher.together(READ)
