"""Measures the machine's memory and compute rates, and builds a model's roofline from them.

Both rates are those that the model's own steps can reach: bytes are read from where its weights lie, which for a small
model is a cache, and products are computed on the path that its weights use.  A share of the roofline above 100% would
mean that another rate than the one in use had been measured.

Reads go through far more memory than the last cache holds, on the kernels' own threads, in slices that take less time
than the system gives a thread at once.  Most slices are therefore undisturbed by other programs, and the upper quartile
of their rates is one that the machine keeps up; the fastest slice found a part of its bytes in a cache.

    memory     | slice | slice | slice | ...            each is read again only after all others
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import AttentionShape, Kernels, LatentShape, StateShape
from slotwise.compute.kernels.select import launcher_of
from slotwise.compute.model.decoder import DecoderSizes
from slotwise.core.step_time import Machine, Roofline
from slotwise.platform.host import last_cache_bytes

MIB = 1 << 20
BLOCK = 64  # tokens; a multiple of the vector length, so that no padding of blocks is counted
SLICE = 16 * MIB  # half a millisecond at 30 GB/s
CACHES = 8  # the memory read is so many times the last cache: as many as 3 of those may be hidden from a guest system
CUDA_READ = 1024 * MIB
SIZES = (512, 1024, 2048)  # of square products
REPEATS = 2  # of each measurement, at least


def measure_machine(
    decoder: DecoderSizes, sizes: Sequence[int] = SIZES, caches: int = CACHES, seconds: float = 0.5,
) -> Machine:
    """Times reads of memory, and square products with packed weights.

    Each is repeated for `seconds`.  A product's fastest run counts: other processes slow a run, and none makes it
    faster.
    """
    rate = read_rate(decoder.kernels, decoder.step_weight_bytes, seconds, caches)
    return Machine(rate, max(_product_rate(decoder, size, seconds) for size in sizes))


def read_rate(kernels: Kernels, size: int, seconds: float, caches: int = CACHES) -> float:
    """Bytes per second of reading `size` bytes of weights: from the last cache if it holds them, else from memory."""
    if kernels.device.type == "cuda":
        size = CUDA_READ
    elif size > last_cache_bytes():
        size = caches * last_cache_bytes()
    read, piece = _reader(kernels)
    slices = torch.ones(-(-size // piece) * piece, dtype=torch.uint8, device=kernels.device).split(SLICE)
    for part in slices:
        read(part)
    rates: list[float] = []
    ends = time.perf_counter() + seconds
    while not rates or time.perf_counter() < ends:
        rates += [len(part) / _seconds(functools.partial(read, part)) for part in slices]
    return sorted(rates)[3 * len(rates) // 4]


def _reader(kernels: Kernels) -> tuple[Callable[[Tensor], object], int]:
    """Reads all of some memory, and of how many bytes its size is a multiple."""
    if kernels.name != "cpu":
        return lambda data: data.view(torch.float32).sum().item(), 4
    from slotwise.compute.kernels.cpu.reading import PIECE, read_all

    launcher = launcher_of(kernels)
    return lambda data: read_all(data, launcher), PIECE


def _product_rate(decoder: DecoderSizes, size: int, seconds: float) -> float:
    """Operations per second of a product of `size` tokens with `size` x `size` weights, packed as the model's are."""
    kernels, kind = decoder.kernels, decoder.config.dtype
    weight, tokens = torch.randn(2, size, size, device=kernels.device, dtype=kind)
    multiply = kernels.linear(weight)
    return 2 * size**3 / _best(lambda: multiply(tokens)[0, 0].item(), seconds)


def glance(decoder: DecoderSizes, stored: str) -> Machine:
    """Measures the same on smaller data, quickly enough for the start of a server.

    A process measures once for all engines whose weights are `stored` in the same format, use the same product path and
    have the same size up to a power of two.
    """
    kernels, kind = decoder.kernels, decoder.config.dtype
    alike = (kernels.name, kernels.device, kind, kernels.product_path(kind), stored, torch.get_num_threads(),
             decoder.step_weight_bytes.bit_length())
    if alike not in _glances:
        is_cuda = kernels.device.type == "cuda"
        _glances[alike] = measure_machine(decoder, (8192,), seconds=0.05) if is_cuda else measure_machine(
            decoder, (768,), CACHES // 2, 0.01)
    return _glances[alike]


_glances: dict[tuple[object, ...], Machine] = {}


def faster(one: Machine, other: Machine) -> Machine:
    """Returns the higher of each rate."""
    return Machine(max(one.bytes_per_second, other.bytes_per_second),
                   max(one.operations_per_second, other.operations_per_second))


def roofline(decoder: DecoderSizes, machine: Machine) -> Roofline:
    """Returns lower bounds of the costs of a model's steps."""
    config, kernels = decoder.config, decoder.kernels
    attention = [shape for shape in decoder.layer_shapes if isinstance(shape, AttentionShape | LatentShape)]
    return Roofline(
        machine, decoder.step_weight_bytes,
        sum(kernels.cache_bytes_per_block(BLOCK, shape, config.dtype) for shape in attention) // BLOCK,
        config.layer_weights, config.hidden_size * config.vocab_size,
        sum(map(_position_operations, attention)),
        2 * sum(shape.state_bytes for shape in decoder.layer_shapes if isinstance(shape, StateShape)))


def _position_operations(shape: AttentionShape | LatentShape) -> int:
    """Returns the operations of a layer's attention for a position that a query sees."""
    if isinstance(shape, LatentShape):
        return 2 * shape.num_heads * (shape.width + shape.rank)
    return 4 * shape.num_heads * shape.head_dim


def _best(work: Callable[[], object], seconds: float) -> float:
    """Returns the seconds of the fastest run, of at least `REPEATS` and for at least `seconds`."""
    work()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < REPEATS or time.perf_counter() < ends:
        times.append(_seconds(work))
    return min(times)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
