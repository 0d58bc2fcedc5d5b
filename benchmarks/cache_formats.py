"""Times attention and the cache write over an int8 cache against the model's own type, with cold caches, in turns.

Each call reads another layer's memory, with the geometry of `benchmarks/kernels.py`; rounds of the two formats
alternate, so that a busy neighbour slows both.  Prints microseconds per layer, the time of the bytes that must be read
at the bandwidth measured in the same run, and the ratio of the two formats.

    OMP_PROC_BIND=true python benchmarks/cache_formats.py --rows 64 --contexts 256 1024
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from kernels import SHAPE, bytes_per_microsecond, step

from slotwise.kernels.cpu.kernels import CpuKernels
from slotwise.kernels.interface import RaggedBatch

FORMATS = ("auto", "int8")
BLOCK = 64  # tokens


def in_turns(calls: list[Callable[[int], object]], layers: int, rounds: int) -> list[float]:
    """Median microseconds of each kind of call, over rounds through all layers, one kind after the other."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, times in zip(calls, taken, strict=True):
            began = time.perf_counter()
            for layer in range(layers):
                call(layer)
            times.append((time.perf_counter() - began) / layers * 1e6)
    return [statistics.median(times[1:]) for times in taken]


class Bench:
    """The memory of the same layers in each format."""

    def __init__(self, layers: int, rounds: int, kind: torch.dtype) -> None:
        self.layers, self.rounds, self.kind = layers, rounds, kind
        self.kernels = [CpuKernels(kv_cache_dtype=name) for name in FORMATS]
        for kernels in self.kernels:
            kernels.warm_up(kind)
        self.bandwidth = bytes_per_microsecond()
        print(f"memory reads at {self.bandwidth / 1e3:.1f} GB/s; {torch.get_num_threads()} threads, {kind}\n")
        print(f"{'what':28}{'auto':>9}{'floor':>9}{'int8':>9}{'floor':>9}{'ratio':>8}", flush=True)

    def compare(self, name: str, query_lens: list[int], context_lens: list[int]) -> None:
        """Times one step's attention and its cache write."""
        batch = step(query_lens, context_lens, BLOCK)
        blocks = int(batch.block_tables.max()) + 1
        caches = [[kernels.allocate_cache(blocks, BLOCK, SHAPE, self.kind) for _ in range(self.layers)]
                  for kernels in self.kernels]
        qkv = torch.randn(blocks * BLOCK, (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim).to(self.kind)
        table = torch.rand(blocks * BLOCK, SHAPE.head_dim)
        everything = whole(blocks * BLOCK)
        for kernels, layers in zip(self.kernels, caches, strict=True):
            for cache in layers:
                kernels.rotary_store(qkv, table, everything, cache, SHAPE, None)
        query = torch.randn(len(batch.positions), SHAPE.num_heads, SHAPE.head_dim).to(self.kind)
        tokens = sum(context_lens)
        sizes = [kernels.cache_bytes_per_block(BLOCK, SHAPE, self.kind) * tokens / BLOCK for kernels in self.kernels]
        self.line(f"attention {name}", [
            lambda i, k=k, c=c: k.attention(query, c[i], batch, SHAPE)
            for k, c in zip(self.kernels, caches, strict=True)], sizes)
        new = qkv[: len(query)]
        self.line(f"rotary_store {name}", [
            lambda i, k=k, c=c: k.rotary_store(new, table, batch, c[i], SHAPE, None)
            for k, c in zip(self.kernels, caches, strict=True)], [0.0, 0.0])

    def line(self, name: str, calls: list[Callable[[int], object]], sizes: list[float]) -> None:
        """Times both formats and prints a line; `sizes` in bytes."""
        times = in_turns(calls, self.layers, self.rounds)
        cells = "".join(f"{us:9.0f}{size / self.bandwidth:9.0f}" for us, size in zip(times, sizes, strict=True))
        print(f"{name:28}{cells}{times[0] / times[1]:8.2f}", flush=True)


def whole(tokens: int) -> RaggedBatch:
    """Returns a prompt that fills the cache from its first position on."""
    places = torch.arange(tokens)
    return RaggedBatch(
        torch.zeros(tokens, dtype=torch.int64), places, places, torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32), torch.arange(tokens // BLOCK, dtype=torch.int32)[None],
        torch.tensor([tokens - 1]), tokens, tokens)


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="rows of a decode step")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024], help="tokens of context of each row")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt, also over 1,500; 0: none")
    parser.add_argument("--layers", type=int, default=30, help="layers whose memory is visited in turn")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of which the median is taken")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    asked = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(asked.layers, asked.rounds, getattr(torch, asked.dtype))
    for context in asked.contexts:
        for rows in asked.rows:
            bench.compare(f"{rows} x {context}", [1] * rows, [context] * rows)
    for context in (0, 1500) if asked.chunk else ():
        bench.compare(f"{asked.chunk} over {context}", [asked.chunk], [asked.chunk + context])


if __name__ == "__main__":
    with torch.inference_mode():
        main()
