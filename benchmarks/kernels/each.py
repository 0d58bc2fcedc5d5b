"""Times the CPU kernels under a step's conditions: cold caches, each call on another layer's memory.

Prints microseconds per layer beside the memory bound: bytes that must be read, at the bandwidth measured in the same
run.  The geometry is SmolLM2-135M's.

    python -m benchmarks.kernels each --rows 1 16 64 --context 256
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from benchmarks.commands import parser_of

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.interface import AttentionShape, RaggedBatch

HIDDEN, INTERMEDIATE, VOCABULARY = 576, 1536, 49152
SHAPE = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
PRODUCTS = {"qkv": (HIDDEN, 960), "out": (576, HIDDEN), "gate_up": (HIDDEN, 2 * INTERMEDIATE),
            "down": (INTERMEDIATE, HIDDEN)}


def microseconds(call: Callable[[int], object], layers: int, repeats: int) -> float:
    """Returns a call's median time over `repeats` rounds through all layers."""
    call(0)
    rounds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for layer in range(layers):
            call(layer)
        rounds.append((time.perf_counter() - start) / layers * 1e6)
    return statistics.median(rounds)


def bytes_per_microsecond() -> float:
    """Returns the memory read bandwidth: the best of a few sums over 256 MiB."""
    data = torch.ones(1 << 26)
    return data.numel() * 4 / min(microseconds(lambda _: data.sum(), 1, 1) for _ in range(7))


def step(query_lens: list[int], context_lens: list[int], block_size: int) -> RaggedBatch:
    """Returns a step of rows whose blocks are scattered."""
    blocks = [-(-context // block_size) for context in context_lens]
    order = torch.randperm(sum(blocks)).int()
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, part in enumerate(order.split(blocks)):
        tables[row, : len(part)] = part
    places = [torch.arange(c - q, c) for q, c in zip(query_lens, context_lens, strict=True)]
    slots = [t[p // block_size].long() * block_size + p % block_size for t, p in zip(tables, places, strict=True)]
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return RaggedBatch(
        token_ids=torch.zeros(int(starts[-1]), dtype=torch.int64), positions=torch.cat(places),
        slot_mapping=torch.cat(slots), query_starts=starts.int(), context_lens=torch.tensor(context_lens).int(),
        block_tables=tables, sample_at=starts[1:] - 1, max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )


class Bench:
    """The layers' memory and the table."""

    def __init__(self, layers: int, repeats: int, block_size: int, kind: torch.dtype) -> None:
        self.layers, self.repeats, self.block_size, self.kind = layers, repeats, block_size, kind
        self.kernels = CpuKernels()
        start = time.perf_counter()
        self.kernels.warm_up(kind)
        print(f"kernels ready after {time.perf_counter() - start:.1f} s")
        self.bandwidth = bytes_per_microsecond()
        print(f"memory reads at {self.bandwidth / 1e3:.1f} GB/s; torch {torch.__version__}, "
              f"{torch.get_num_threads()} threads, {kind}, blocks of {block_size}\n")
        print(f"{'what':40} {'us':>9} {'floor':>9} {'GFLOP/s':>9}")

    def line(self, what: str, call: Callable[[int], object], size: int, flops: int) -> None:
        """Times a call and prints it; `size` in bytes."""
        us = microseconds(call, self.layers, self.repeats)
        print(f"{what:40} {us:9.0f} {size / self.bandwidth:9.0f} {flops / us / 1e3:9.0f}", flush=True)

    def random(self, *size: int) -> torch.Tensor:
        """Returns random numbers of the type under test."""
        return torch.randn(*size).to(self.kind)

    def attention(self, name: str, query_lens: list[int], context_lens: list[int]) -> None:
        """Times attention and the cache write of one step."""
        batch = step(query_lens, context_lens, self.block_size)
        blocks = int(batch.block_tables.max()) + 1
        caches = [self.kernels.allocate_cache(blocks, self.block_size, SHAPE, self.kind) for _ in range(self.layers)]
        for cache in caches:
            cache.storage.normal_()
        query = self.random(len(batch.positions), SHAPE.num_heads, SHAPE.head_dim)
        qkv, table = self.random(len(query), 15 * SHAPE.head_dim), torch.rand(max(context_lens), SHAPE.head_dim)
        tokens = sum(context_lens) * SHAPE.num_kv_heads * SHAPE.head_dim
        pairs = sum(q * (2 * c - q + 1) // 2 for q, c in zip(query_lens, context_lens, strict=True))
        self.line(f"attention {name}", lambda i: self.kernels.attention(query, caches[i], batch, SHAPE),
                  2 * tokens * self.kind.itemsize, 4 * pairs * SHAPE.num_heads * SHAPE.head_dim)
        self.line(f"rotary_store {name}",
                  lambda i: self.kernels.rotary_store(qkv, table, batch, caches[i], SHAPE, None), qkv.nbytes * 2, 0)

    def products(self, rows: int) -> None:
        """Times the four products of a layer."""
        for name, (depth, outputs) in PRODUCTS.items():
            weights = [self.kernels.linear(self.random(outputs, depth)) for _ in range(self.layers)]
            x = self.random(rows, depth)
            self.line(f"{name} {depth}x{outputs}, {rows} rows", lambda i, w=weights, x=x: w[i](x),
                      depth * outputs * self.kind.itemsize, 2 * rows * depth * outputs)

    def head(self, rows: int) -> None:
        """Times the head."""
        weight, x = self.kernels.linear(self.random(VOCABULARY, HIDDEN)), self.random(rows, HIDDEN)
        self.line(f"head, {rows} rows", lambda _: weight(x), VOCABULARY * HIDDEN * self.kind.itemsize,
                  2 * rows * HIDDEN * VOCABULARY)

    def small(self, rows: int) -> None:
        """Times norms and activation."""
        x, residual, weight = self.random(rows, HIDDEN), self.random(rows, HIDDEN), self.random(HIDDEN)
        gate_up = self.random(rows, 2 * INTERMEDIATE)
        self.line(f"add_rms_norm, {rows} rows", lambda _: self.kernels.add_rms_norm(x, residual, weight, 1e-5),
                  x.nbytes * 3, 0)
        self.line(f"silu_mul, {rows} rows", lambda _: self.kernels.silu_mul(gate_up), gate_up.nbytes * 3 // 2, 0)


def main() -> None:
    """Parse the command line and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="rows of a decode step")
    parser.add_argument("--context", type=int, default=256, help="tokens of context of each row")
    parser.add_argument("--layers", type=int, default=30, help="layers whose memory is visited in turn")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of which the median is taken")
    parser.add_argument("--block-size", type=int, default=64, help="tokens in a cache block")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the weights")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        bench = Bench(args.layers, args.repeats, args.block_size, getattr(torch, args.dtype))
        for rows in args.rows:
            bench.attention(f"{rows} x {args.context}", [1] * rows, [args.context] * rows)
            bench.products(rows)
            bench.small(rows)
            bench.head(rows)
        bench.attention("512 over 1,500", [512], [2012])
        bench.products(512)
        bench.small(512)
