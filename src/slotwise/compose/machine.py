"""Measures the machine's memory and compute rates, and builds a model's roofline from them.

Both rates are those that the model's own steps can reach: bytes are read from where its weights lie, which for a small
model is a cache, and products are computed on the path that its weights use.  A share of the roofline above 100% would
mean that another rate than the one in use had been measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from slotwise.core.roofline import Machine, Roofline
from slotwise.model.decoder import Decoder

MIB = 1 << 20
BLOCK = 64  # tokens; a multiple of the vector length, so that no padding of blocks is counted
MOST_READ = 256 * MIB  # beyond every cache
SIZES = (512, 1024, 2048)  # of square products
REPEATS = 2  # of each measurement, at least


def measure_machine(
    decoder: Decoder, sizes: Sequence[int] = SIZES, most_read: int = MOST_READ, seconds: float = 0.5,
) -> Machine:
    """Times reads of as many bytes as a step reads of weights, and square products with packed weights.

    Each is repeated for `seconds`, and its fastest run counts: other processes slow a run, and none makes it faster.
    """
    device = decoder.kernels.device
    data = torch.ones(min(most_read, decoder.step_weight_bytes) // 4, device=device)
    reads = _best(lambda: data.sum().item(), seconds)
    return Machine(data.numel() * 4 / reads, max(_product_rate(decoder, size, seconds) for size in sizes))


def _product_rate(decoder: Decoder, size: int, seconds: float) -> float:
    """Operations per second of a product of `size` tokens with `size` x `size` weights, packed as the model's are."""
    kernels, kind = decoder.kernels, decoder.config.dtype
    weight, tokens = torch.randn(2, size, size, device=kernels.device, dtype=kind)
    multiply = kernels.linear(weight)
    return 2 * size**3 / _best(lambda: multiply(tokens)[0, 0].item(), seconds)


def glance(decoder: Decoder) -> Machine:
    """Measures the same on smaller data, quickly enough for the start of a server."""
    if decoder.kernels.device.type == "cuda":
        return measure_machine(decoder, (8192,), 1024 * MIB, 0.05)
    return measure_machine(decoder, (768,), 32 * MIB, 0.01)


def faster(one: Machine, other: Machine) -> Machine:
    """Returns the higher of each rate."""
    return Machine(max(one.bytes_per_second, other.bytes_per_second),
                   max(one.operations_per_second, other.operations_per_second))


def roofline(decoder: Decoder, machine: Machine) -> Roofline:
    config, kernels = decoder.config, decoder.kernels
    return Roofline(
        machine, decoder.step_weight_bytes,
        sum(kernels.cache_bytes_per_block(BLOCK, shape, config.dtype) for shape in decoder.attention_shapes) // BLOCK,
        config.layer_weights, config.hidden_size * config.vocab_size,
        4 * config.num_layers * config.num_heads * config.head_dim)


def _best(work: Callable[[], object], seconds: float) -> float:
    """Returns the seconds of the fastest run, of at least `REPEATS` and for at least `seconds`."""
    work()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < REPEATS or time.perf_counter() < ends:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
