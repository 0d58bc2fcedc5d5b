"""Measures the machine's memory and compute rates, and builds a model's roofline from them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from slotwise.core.roofline import Machine, Roofline
from slotwise.model.decoder import Decoder

MIB = 1 << 20
BLOCK = 64  # tokens; a multiple of the vector length, so that no padding of blocks is counted


CPU = torch.device("cpu")


def measure_machine(
    megabytes: int = 256, size: int = 2048, repeats: int = 8, device: torch.device = CPU,
    kind: torch.dtype = torch.float32,
) -> Machine:
    """Times reads of `megabytes` and products of `size` x `size`, best of `repeats`; about two seconds on a CPU."""
    data = torch.ones(megabytes * MIB // 4, device=device)
    square = torch.randn(size, size, device=device, dtype=kind)
    reads = _best(lambda: data.sum().item(), repeats)
    products = _best(lambda: (square @ square)[0, 0].item(), repeats)
    return Machine(data.numel() * 4 / reads, 2 * size**3 / products)


def glance(device: torch.device, kind: torch.dtype) -> Machine:
    """Measures the same on smaller data, quickly enough for the start of a server."""
    if device.type == "cuda":
        return measure_machine(1024, 8192, 3, device, kind)
    return measure_machine(32, 768, 2)


def roofline(decoder: Decoder, machine: Machine) -> Roofline:
    config, kernels = decoder.config, decoder.kernels
    return Roofline(
        machine, decoder.step_weight_bytes,
        sum(kernels.cache_bytes_per_block(BLOCK, shape, config.dtype) for shape in decoder.attention_shapes) // BLOCK,
        config.layer_weights, config.hidden_size * config.vocab_size,
        4 * config.num_layers * config.num_heads * config.head_dim)


def _best(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
