"""Decode steps of a mixture with the proportions of Qwen3-30B-A3B, beside the bytes of the experts that they hit.

    python -m benchmarks.experts --json benchmarks/results/experts-cpu.json

128 experts of which a token chooses eight, in fewer and narrower layers; random weights, so that tokens choose their
experts nearly at random, which reads more of them than text does.  A step is run as the runner runs it, from a graph.
The bound is the bytes of all weights that the step reads, experts that no token chose left out, at the rate at which
this machine reads memory.  Neighbours change that within seconds, so steps and reads are measured in turns.  Steps of a
few batches follow each other, or the last cache would hold experts of the step before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slotwise.bench.results import environment, write_json
from slotwise.compose.machine import read_rate
from slotwise.kernels.cpu.kernels import CpuKernels
from slotwise.kernels.interface import Mixture, RaggedBatch
from slotwise.kernels.reference import route
from slotwise.model.decoder import Decoder
from slotwise.model.family_table import configure, tensor_shapes
from slotwise.model.fields import Fields
from slotwise.runner.decode_graphs import DecodeGraphs
from slotwise.runner.input_batch import SlotTable

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 16_384, "hidden_size": 1024, "intermediate_size": 3072,
    "moe_intermediate_size": 384, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 4096}
BLOCK, CONTEXT, ROWS = 64, 128, (1, 8, 32)
BATCHES = 4  # whose tokens differ
TURNS, READ_SECONDS = 4, 0.1


def decoder_of(kernels: CpuKernels, dtype: str, seed: int) -> Decoder:
    """A decoder with random weights, which are made one after another."""
    config = configure(Fields(CONFIG | {"dtype": dtype}, "config.json"))
    shapes, generator = tensor_shapes(config), torch.Generator().manual_seed(seed)

    def read(*names: str) -> Tensor:
        parts = [torch.randn(shapes[name], generator=generator) for name in names]
        return torch.cat(parts).mul_(parts[0].shape[-1] ** -0.5).to(config.dtype)

    return Decoder(config, read, kernels, CONTEXT * 4)


class Counted(CpuKernels):
    """Notes the experts that tokens choose, in steps that are not recorded."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.hits: list[int] | None = None

    def experts(self, *arguments: Any) -> Mixture:
        mixture, routing = super().experts(*arguments), arguments[1]

        def counted(x: Tensor, logits: Tensor) -> Tensor:
            if self.hits is not None:
                self.hits.append(len(route(logits, routing)[0].unique()))
            return mixture(x, logits)

        return counted


def decode_batch(rows: int, number: int) -> RaggedBatch:
    """A decode step of `rows` rows with `CONTEXT` tokens each, of different tokens in each step of a `number`."""
    tables = torch.arange(rows * (CONTEXT // BLOCK), dtype=torch.int32).view(rows, -1)
    contexts = torch.full((rows,), CONTEXT, dtype=torch.int32)
    return RaggedBatch(
        (torch.arange(rows) + number * rows) * 3 + 5, contexts.long() - 1, tables[:, -1].long() * BLOCK + BLOCK - 1,
        torch.arange(rows + 1, dtype=torch.int32), contexts, tables, torch.arange(rows), 1, CONTEXT)


@torch.inference_mode()
def measured(dtype: str, quantization: str, seconds: float, seed: int) -> list[dict[str, float]]:
    """Of each number of rows: experts hit per layer, bytes read, the mean step, and the share of the bound."""
    kernels = Counted(quantization=quantization)
    decoder = decoder_of(kernels, dtype, seed)
    blocks = max(ROWS) * (CONTEXT // BLOCK) + 1
    caches = [kernels.allocate_cache(blocks, BLOCK, shape, decoder.config.dtype) for shape in decoder.layer_shapes]
    graphs = DecodeGraphs(decoder, caches, SlotTable(max(ROWS), CONTEXT * 2, BLOCK, blocks - 1))
    routing, layers = decoder.config.mixture_of_experts.routing, decoder.config.num_layers
    of_experts = decoder.weight_bytes - decoder.step_weight_bytes - _embedding_bytes(decoder)
    one = of_experts / (layers * (routing.num_experts - routing.top_k))
    found = []
    for rows in ROWS:
        batches = [decode_batch(rows, number) for number in range(BATCHES)]
        kernels.hits = []
        for batch in batches:
            decoder.hidden(batch, caches)
        hit, kernels.hits = sum(kernels.hits) / BATCHES, None
        num_bytes = decoder.step_weight_bytes + (hit - layers * routing.top_k) * one
        step, rate = _in_turns(graphs, batches, decoder, seconds)
        bound = num_bytes / rate
        found.append({"rows": rows, "experts_hit": hit / layers, "bytes": num_bytes, "step_ms": step * 1e3,
                      "bound_ms": bound * 1e3, "share": bound / step, "bytes_per_second": rate})
    return found


def _in_turns(
    graphs: DecodeGraphs, batches: Sequence[RaggedBatch], decoder: Decoder, seconds: float,
) -> tuple[float, float]:
    """Seconds of a step, and bytes read in a second: the means of turns, of which each is a median."""
    def steps() -> None:
        for batch in batches:
            assert graphs.logits(batch) is not None, "the step was not recorded"

    of_steps, of_reads = [], []
    for _ in range(TURNS):
        of_reads.append(1 / read_rate(decoder.kernels, decoder.step_weight_bytes, READ_SECONDS))
        of_steps.append(_median(steps, seconds / TURNS) / len(batches))
    return statistics.fmean(of_steps), 1 / statistics.fmean(of_reads)


def _embedding_bytes(decoder: Decoder) -> int:
    config = decoder.config
    return config.vocab_size * config.hidden_size * config.dtype.itemsize


def _median(work: Callable[[], None], seconds: float) -> float:
    work()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while not times or time.perf_counter() < ends:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Measures, prints, and adds to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each number of rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="the file to which the run is added")
    settings = parser.parse_args()
    rows = measured(settings.dtype, settings.quantization, settings.seconds, settings.seed)
    for row in rows:
        print(f"{row['rows']:3} rows: {row['experts_hit']:5.1f} experts a layer, {row['bytes'] / 1e6:6.0f} MB, "
              f"{row['step_ms']:6.2f} ms, bound {row['bound_ms']:6.2f} ms "
              f"at {row['bytes_per_second'] / 1e9:.1f} GB/s: {row['share']:.2f}")
    if settings.json:
        runs = json.loads(settings.json.read_text())["runs"] if settings.json.exists() else []
        write_json(settings.json, {"runs": [*runs, {
            "environment": environment(), "config": CONFIG, "dtype": settings.dtype,
            "quantization": settings.quantization, "context": CONTEXT, "seed": settings.seed, "rows": rows}]})


if __name__ == "__main__":
    main()
