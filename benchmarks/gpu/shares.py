"""Times each kernel by itself, and compares it with what `paper.py` predicts for this device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from benchmarks.gpu import machine
from benchmarks.gpu.figures import tell
from benchmarks.gpu.paper import ADAPTERS, DRAFTED, EXPERTS, FEW_EXPERTS, RANK, Work, products, works
from benchmarks.gpu.setup import Setup, asked
from benchmarks.kernels.each import step

from slotwise.compute.kernels.cuda import CudaKernels
from slotwise.compute.kernels.cuda.sampling import mask_rows, sample
from slotwise.compute.kernels.interface import AttentionShape, ExpertWeights, RaggedBatch, Routing
from slotwise.compute.kernels.matrix import Factors, Format, QuantizedMatrix, Rows

BLOCK_SIZE = 16
SMALLER = 512  # times, in a rehearsal
QUANTIZED = {"gate_up, 4 bits": Format(4, 128, torch.float16, zero=8),
             "gate_up, 8 bits": Format(8, 0, torch.float32, zero=128)}


def main() -> None:
    setup = asked(__doc__)
    on_gpu = setup.device == "cuda"
    rates = machine.measure(setup)
    bench = Bench(setup, CudaKernels("cuda" if on_gpu else "cpu"))
    found: dict[str, Any] = {}
    different = {work.label: work for work in works(setup.model, 1 if on_gpu else SMALLER)}  # small sizes repeat
    for work in different.values():
        seconds = machine.median_seconds(bench.call(work), bench.kernels.device)
        expected = work.seconds(*rates)
        found[work.label] = {"seconds": seconds, "expected": expected, "of_expected": expected / seconds}
        tell(shares=found)


class Bench:
    """Tensors of one layer, and the calls of its kernels."""

    def __init__(self, setup: Setup, kernels: CudaKernels) -> None:
        self.kernels, self._model = kernels, setup.model
        self._products = {name: (outputs, depth) for name, outputs, depth in products(setup.model)}
        self._shape = AttentionShape(setup.model.num_heads, setup.model.num_kv_heads, setup.model.head_dim, 0.1)

    def call(self, work: Work) -> Callable[[], object]:
        """The call of one piece of work, on tensors of its own."""
        tokens, kernels, model = work.size[0], self.kernels, self._model
        if work.name in self._products:
            outputs, depth = self._products[work.name]
            product, x = kernels.linear(self._random(outputs, depth)), self._random(tokens, depth)
            return lambda: product(x)
        if work.name in QUANTIZED:
            return self._quantized(tokens, QUANTIZED[work.name])
        if work.name == "gate_up, adapters":
            return self._adapters(tokens)
        if work.name == "experts":
            return self._experts(tokens)
        if work.name == "mask":
            logits = self._random(*work.size)
            rows = torch.arange(tokens, device=kernels.device)
            bits = torch.full((tokens, -(-work.size[1] // 32)), 0x55555555, dtype=torch.int32, device=kernels.device)
            return lambda: mask_rows(logits, rows, bits)
        if work.name == "sample":
            logits, numbers = self._random(*work.size), torch.zeros(tokens, dtype=torch.int64, device=kernels.device)
            controls = torch.tensor([[1.0, 50.0, 0.9, 0.0]], device=kernels.device).repeat(tokens, 1)
            return lambda: sample(logits, controls, numbers, numbers)
        if work.name.startswith("attention"):
            rows, context = work.size
            new = {"attention, decode": 1, "attention, drafts": DRAFTED}.get(work.name, context)
            return self._attention(step([new] * rows, [context] * rows, BLOCK_SIZE))
        if work.name == "rotary_store":
            return self._rotary(step([tokens], [tokens], BLOCK_SIZE))
        if work.name == "silu_mul":
            gate_up = self._random(tokens, 2 * model.intermediate_size)
            return lambda: kernels.silu_mul(gate_up)
        x, residual, weight = (self._random(*size, model.hidden_size) for size in ((tokens,), (tokens,), ()))
        if work.name == "add_rms_norm":
            return lambda: kernels.add_rms_norm(x, residual, weight, 1e-5)
        return lambda: kernels.rms_norm(x, weight, 1e-5)

    def _quantized(self, tokens: int, form: Format) -> Callable[[], object]:
        outputs, depth = self._products["gate_up"]
        device = self.kernels.device
        codes = torch.randint(0, 1 << form.bits, (outputs, depth), dtype=torch.uint8, device=device)
        scales = torch.rand(outputs, -(-depth // (form.group or depth)), device=device).to(form.scale)
        matrix = QuantizedMatrix(form, outputs, depth,
                                 lambda first, end: Rows(codes[first:end], Factors(scales[first:end])))
        product, x = self.kernels.linear(matrix), self._random(tokens, depth)
        return lambda: product(x)

    def _adapters(self, tokens: int) -> Callable[[], object]:
        outputs, depth = self._products["gate_up"]
        adapters = self.kernels.adapters(ADAPTERS, RANK, self._model.dtype)
        adapters.assign([row % ADAPTERS for row in range(tokens)])
        added, x, out = adapters.product(outputs, depth, 2), self._random(tokens, depth), self._random(tokens, outputs)
        return lambda: added.add(x, out)

    def _experts(self, tokens: int) -> Callable[[], object]:
        sizes = EXPERTS if self.kernels.device.type == "cuda" else FEW_EXPERTS
        shapes = (2 * sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)
        weights = (ExpertWeights(*(self._random(*shape) for shape in shapes)) for _ in range(sizes.number))
        ends = torch.zeros(sizes.number, dtype=torch.int64, device=self.kernels.device)
        mixture = self.kernels.experts(weights, Routing(sizes.number, sizes.top_k, is_normalized=True), "silu", ends)
        x, logits = self._random(tokens, sizes.hidden), self._random(tokens, sizes.number)
        return lambda: mixture(x, logits)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.kernels.device).to(self._model.dtype)

    def _attention(self, batch: RaggedBatch) -> Callable[[], object]:
        batch = self._there(batch)
        query = self._random(len(batch.positions), self._shape.num_heads, self._shape.head_dim)
        cache = self._cache(batch)
        return lambda: self.kernels.attention(query, cache, batch, self._shape)

    def _rotary(self, batch: RaggedBatch) -> Callable[[], object]:
        batch = self._there(batch)
        shape, tokens = self._shape, len(batch.positions)
        qkv = self._random(tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        rotary, cache = torch.rand(tokens, shape.head_dim, device=self.kernels.device), self._cache(batch)
        return lambda: self.kernels.rotary_store(qkv, rotary, batch, cache, shape, None)

    def _cache(self, batch: RaggedBatch) -> Any:
        blocks = int(batch.block_tables.max()) + 1
        return self.kernels.allocate_cache(blocks, BLOCK_SIZE, self._shape, self._model.dtype)

    def _there(self, batch: RaggedBatch) -> RaggedBatch:
        """The batch on the kernels' device."""
        values = {name: getattr(batch, name) for name in RaggedBatch.__dataclass_fields__}
        return RaggedBatch(**{
            name: value.to(self.kernels.device) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()})


if __name__ == "__main__":
    main()
