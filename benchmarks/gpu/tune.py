"""Tunes the sizes of the attention kernels on this GPU, and writes them to the file that the engine reads.

    python -m benchmarks.gpu.tune --head-dims 64 128 --dtypes bfloat16

It varies each parameter of `compute/kernels/cuda/configs.py` with the others fixed, in rounds until none improves. 
The cost of a configuration is the product of its times over some typical steps, so that each step counts by its gain
in percent. The file is `src/slotwise/compute/kernels/cuda/configs/<device name>.json`; entries of other sizes and
types in it stay.  Each takes about two minutes, mostly for compiling.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

import torch
from benchmarks.kernels.each import step

from slotwise.compute.kernels.interface import AttentionShape, RaggedBatch

PREFILL = {"block_m": (32, 64, 128, 256), "block_n": (16, 32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5)}
DECODE = {"block_n": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4, 5)}
SEGMENTS = {"segment": (256, 512, 1024)}
PREFILL_STEPS = (([8192], [8192]), ([2048] * 4, [2048] * 4), ([512] * 8, [4096] * 8))  # query and context lengths
DECODE_STEPS = tuple(([1] * rows, [context] * rows) for rows, context in (
    (1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 32768), (8, 16384)))
BLOCK_SIZE = 16

Config = TypeVar("Config")


def descend(start: Config, choices: Mapping[str, Sequence[int]], cost: Callable[[Config], float]) -> Config:
    """Returns the best configuration by coordinate descent; calls `cost` once for each configuration."""
    known: dict[Config, float] = {}

    def cost_of(config: Config) -> float:
        if config not in known:
            known[config] = cost(config)
        return known[config]

    best, improved = start, True
    while improved:
        improved = False
        for name, values in choices.items():
            found = min((replace(best, **{name: value}) for value in values), key=cost_of)
            if cost_of(found) < cost_of(best):
                best, improved = found, True
    return best


def on_gpu(batch: RaggedBatch) -> RaggedBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return RaggedBatch(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in values.items()})


def timer(shape: AttentionShape, kind: torch.dtype, steps: Sequence) -> Callable[[object], float]:
    """Returns a cost function: the sum of the logarithms of milliseconds; infinite if the kernel cannot launch."""
    from triton.runtime.errors import TritonError
    from triton.testing import do_bench

    from slotwise.compute.kernels.cuda import CudaKernels, attention

    batches = [on_gpu(step(*lengths, BLOCK_SIZE)) for lengths in steps]
    blocks = max(int(batch.block_tables.max()) for batch in batches) + 1
    cache = CudaKernels().allocate_cache(blocks, BLOCK_SIZE, shape, kind)
    cache.storage.normal_()
    queries = [
        torch.randn(len(batch.positions), shape.num_heads, shape.head_dim, device="cuda", dtype=kind)
        for batch in batches]

    def milliseconds(query: torch.Tensor, batch: RaggedBatch, tuning: object) -> float:
        return do_bench(lambda: attention.attend(query, cache, batch, shape, tuning))

    def cost(tuning: object) -> float:
        try:
            return sum(math.log(milliseconds(*given, tuning)) for given in zip(queries, batches, strict=True))
        except TritonError:  # too much shared memory, or too many registers
            return math.inf

    return cost


def tune(shape: AttentionShape, kind: torch.dtype) -> dict[str, Any]:
    """Returns the entry of one size and type."""
    from slotwise.compute.kernels.cuda.configs import default_tuning

    major, minor = torch.cuda.get_device_capability()
    tuning = default_tuning(shape.head_dim, kind, 10 * major + minor)
    of_prefill, of_decode = timer(shape, kind, PREFILL_STEPS), timer(shape, kind, DECODE_STEPS)
    prefill = descend(tuning.prefill, PREFILL, lambda config: of_prefill(replace(tuning, prefill=config)))
    decode = descend(tuning.decode, DECODE, lambda config: of_decode(replace(tuning, decode=config)))
    found = descend(replace(tuning, prefill=prefill, decode=decode), SEGMENTS, of_decode)
    for name, cost in (("prefill", of_prefill), ("decode", of_decode)):
        print(f"  {name}: {math.exp(cost(tuning) - cost(found)):.2f} times the default's speed, all steps multiplied")
    return asdict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], help="sizes of a head")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"],
                        help="data types of the cache")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="key and value heads")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU")
        return
    from slotwise.compute.kernels.cuda import configs

    path = configs.file_of(torch.cuda.get_device_name())
    entries = json.loads(path.read_text()) if path.exists() else {}
    for head_dim in options.head_dims:
        shape = AttentionShape(options.heads, options.kv_heads, head_dim, head_dim**-0.5)
        for name in options.dtypes:
            key = configs.key_of(head_dim, getattr(torch, name))
            print(key, flush=True)
            entries[key] = tune(shape, getattr(torch, name))
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
            print(f"  {entries[key]}\n  written to {path}", flush=True)


if __name__ == "__main__":
    main()
