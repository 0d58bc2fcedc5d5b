"""What each kernel should take on devices that are not here, on paper: `gpu-check` prints it beside what it measures.

    PYTHONPATH=src python -m benchmarks.gpu.paper      the table of benchmarks/gpu-paper.md

    seconds = the larger of  bytes / bandwidth  and  operations / rate,  divided by the expected share of it,
              and for each launch at least LAUNCH

Rates are those of the makers' data sheets: dense, 16 bits, tensor cores.  A share says how much of a bound a kernel of
its kind should reach; a device on which a kernel takes much longer tells which one is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slotwise.compute.model.model_config import ModelConfig

LAUNCH = 3e-6  # seconds from one small kernel's end to the next one's, back to back
KIND_BYTES = 2  # of the types that are modeled: 16 bits
TOKENS = (1, 64, 8192)  # of a step's norms and products
DECODES = ((1, 1024), (64, 1024), (256, 1024), (8, 16384))  # rows and tokens of context
DRAFTED = 4  # tokens of a row with three drafts
VERIFIED = ((8, 1024), (8, 16384))  # rows with drafts, and tokens of context
PROMPTS = ((1, 8192), (4, 2048))
SAMPLED = (1, 256)
CODE_BYTES = 0.5 + 2 / 128  # of a weight: 4 bits, and a scale for 128 of them
ADAPTERS, RANK = 4, 16


class Experts(NamedTuple):
    """The sizes of a layer of experts."""

    number: int
    top_k: int
    hidden: int
    intermediate: int

    def read(self, tokens: int) -> float:
        """How many experts tokens choose, on average, where each chooses at random."""
        return self.number * (1 - (1 - self.top_k / self.number) ** tokens)


EXPERTS, FEW_EXPERTS = Experts(128, 8, 2048, 768), Experts(8, 2, 64, 48)  # Qwen3-30B-A3B's, and a rehearsal's

SHARES = {  # of the bound, and why not all of it
    "stream": 0.80,  # read once, written once: what a copy reaches of the data sheet
    "product": 0.75,  # cuBLAS at large sizes; the clock falls under full load
    "decode": 0.70,  # blocks are scattered, and the last segments of a row are not full
    "prefill": 0.45,  # half of the work of a tile is softmax on other units; no warps are specialized
    "codes": 0.60,  # codes become numbers beside the tensor cores
    "narrow": 0.60,  # tokens are quantized by a kernel of their own
    "adapters": 0.30,  # tiles of a few rows and columns, and sums in float32 beside them
    "experts": 0.50,  # tiles of an expert are not full, and six kernels follow each other
    "sample": 0.50,  # four kernels read the logits, and the last has one program a row
}


class Device(NamedTuple):
    """A data sheet."""

    name: str
    bytes_per_second: float
    operations_per_second: float


DEVICES = (
    Device("A100 80 GB SXM", 2.039e12, 312e12),
    Device("L40S", 0.864e12, 362e12),
    Device("H100 SXM", 3.35e12, 989e12),
    Device("H200 SXM", 4.8e12, 989e12),
    Device("B200", 8.0e12, 2250e12),
)


class Work(NamedTuple):
    """A call of one kernel of the contract."""

    name: str  # of the kernel
    kind: str  # of SHARES
    size: tuple[int, ...]  # as `works` makes it
    bytes: int
    operations: int
    launches: int = 1

    @property
    def label(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.size))}"

    def seconds(self, bytes_per_second: float, operations_per_second: float) -> float:
        """What it should take on a device."""
        bound = max(self.bytes / bytes_per_second, self.operations / operations_per_second)
        return max(bound / SHARES[self.kind], self.launches * LAUNCH)


def works(model: ModelConfig, scale: int = 1) -> Iterator[Work]:
    """The work of a model's layers.  Sizes are divided by `scale` in a rehearsal."""
    heads, keys, dim, hidden = model.num_heads, model.num_kv_heads, model.head_dim, model.hidden_size
    for tokens in (max(1, each // scale) for each in TOKENS):
        wide = tokens * (heads + 2 * keys) * dim
        yield _stream("rms_norm", tokens, 2 * tokens * hidden)
        yield _stream("add_rms_norm", tokens, 4 * tokens * hidden)
        yield _stream("silu_mul", tokens, 3 * tokens * model.intermediate_size)
        yield _stream("rotary_store", tokens, 2 * wide)
        for name, outputs, depth in products(model):
            size = KIND_BYTES * (outputs * depth + tokens * (outputs + depth))
            yield Work(name, "product", (tokens,), size, 2 * tokens * outputs * depth)
        yield _four_bits(model, tokens)
        yield _eight_bits(model, tokens)
        yield _adapters(model, tokens)
        yield _experts(EXPERTS if scale == 1 else FEW_EXPERTS, tokens)
    for rows, context in DECODES:
        rows, context = -(-rows // scale), max(2, context // scale)
        yield Work("attention, decode", "decode", (rows, context), KIND_BYTES * 2 * rows * context * keys * dim,
                   4 * rows * context * heads * dim, launches=2)
    for rows, context in VERIFIED:
        rows, context = -(-rows // scale), max(DRAFTED, context // scale)
        yield Work("attention, drafts", "decode", (rows, context), KIND_BYTES * 2 * rows * context * keys * dim,
                   4 * rows * DRAFTED * context * heads * dim, launches=2)
    for rows, tokens in PROMPTS:
        tokens = max(2, tokens // scale)
        size = KIND_BYTES * rows * tokens * dim * (2 * heads + 2 * keys)
        yield Work("attention, prefill", "prefill", (rows, tokens), size,
                   4 * rows * (tokens * (tokens + 1) // 2) * heads * dim)
    for rows in (-(-rows // scale) for rows in SAMPLED):
        size = (rows, model.vocab_size)
        yield Work("sample", "sample", size, 3 * KIND_BYTES * rows * model.vocab_size, 0, launches=4)
        # Bits are read, and half of the logits written.
        yield Work("mask", "stream", size, rows * model.vocab_size * (2 * KIND_BYTES + 1) // 4, 0)


def products(model: ModelConfig) -> tuple[tuple[str, int, int], ...]:
    """Name, outputs and depth of a layer's products and the head's."""
    inner = model.num_heads * model.head_dim
    return (("qkv", inner + 2 * model.num_kv_heads * model.head_dim, model.hidden_size),
            ("out", model.hidden_size, inner),
            ("gate_up", 2 * model.intermediate_size, model.hidden_size),
            ("down", model.hidden_size, model.intermediate_size))


def _four_bits(model: ModelConfig, tokens: int) -> Work:
    """The product of gates, with weights of 4 bits."""
    _, outputs, depth = products(model)[2]
    size = int(CODE_BYTES * outputs * depth) + KIND_BYTES * tokens * (outputs + depth)
    return Work("gate_up, 4 bits", "codes", (tokens,), size, 2 * tokens * outputs * depth)


def _eight_bits(model: ModelConfig, tokens: int) -> Work:
    """The product of gates, with weights and tokens of 8 bits: tensor cores do two such operations in place of one."""
    _, outputs, depth = products(model)[2]
    size = outputs * depth + tokens * (KIND_BYTES * (outputs + depth) + 2 * depth)
    return Work("gate_up, 8 bits", "narrow", (tokens,), size, tokens * outputs * depth, launches=2)


def _adapters(model: ModelConfig, tokens: int) -> Work:
    """What adapters add to the product of gates: both products, and the sum of what they add, in float32 between."""
    _, outputs, depth = products(model)[2]
    factors = min(ADAPTERS, tokens) * 2 * RANK * (outputs + depth)  # a factor of each part's own
    size = KIND_BYTES * (factors + tokens * (depth + 2 * outputs)) + 4 * 3 * tokens * outputs
    return Work("gate_up, adapters", "adapters", (tokens,), size, 2 * tokens * 2 * RANK * (outputs + depth), launches=8)


def _experts(sizes: Experts, tokens: int) -> Work:
    """A mixture: the weights of what is chosen, and what goes between its kernels."""
    weights, pairs = 3 * sizes.hidden * sizes.intermediate, tokens * sizes.top_k
    between = pairs * (3 * sizes.hidden + 5 * sizes.intermediate)
    size = KIND_BYTES * int(sizes.read(tokens) * weights + between)
    return Work("experts", "experts", (tokens,), size, 2 * pairs * weights, launches=6)


def _stream(name: str, tokens: int, numbers: int) -> Work:
    return Work(name, "stream", (tokens,), KIND_BYTES * numbers, 0)


INTRODUCTION = """# Each kernel on paper

What a call should take, in microseconds, before any device has run it: `benchmarks/gpu/paper.py` has the model, its
shares and the data sheets' rates, and writes this page. The shapes are Llama-3.1-8B's, in bfloat16, and for experts
Qwen3-30B-A3B's. `make gpu-check` prints what it measured beside the prediction for its own device, whose bandwidth and
product rate it measures.

"""


def page(model: ModelConfig) -> str:
    """The page of predictions."""
    columns = " | ".join(device.name for device in DEVICES)
    lines = [f"| kernel | MB | GFLOP | {columns} |", "|---|" + "---|" * (2 + len(DEVICES))]
    for work in works(model):
        cells = " | ".join(f"{work.seconds(*device[1:]) * 1e6:,.0f}" for device in DEVICES)
        lines.append(f"| {work.label} | {work.bytes / 1e6:,.1f} | {work.operations / 1e9:,.1f} | {cells} |")
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    from benchmarks.gpu.setup import FULL

    Path(__file__).parents[1].joinpath("gpu-paper.md").write_text(page(FULL.model))
