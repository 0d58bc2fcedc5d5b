"""Products of bfloat16 by oneDNN, for processors that multiply it faster than float32.

The operators are those that torch's own compiler uses.  They are private, so they are tried before they are used.
"""

from __future__ import annotations

import functools
import os
import time

import torch
from torch import Tensor

from slotwise.kernels.interface import Linear

WORTH = 1.5  # times as fast as float32: with our own products a decode step can be captured, too
ROWS, DEPTH, OUTPUTS = 128, 512, 1024  # of the product that is measured: about a millisecond
TRIES = 12

# For each weight shape and number of rows torch caches a plan and oneDNN its code: up to 1,024 of either.  A hundred
# and more are in use at a time where the number of rows varies.
BOUNDS = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # read by torch and by oneDNN at their first product
KEPT = 128  # products
KEPT_BYTES = 600_000  # of one product, both together: 300,000 to 750,000 from 2 to 512 rows, measured on AVX-512 BF16


def onednn_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`weight [out, in]` packed once for many products."""
    bound_caches()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    apply = torch.ops.mkldnn._linear_pointwise
    return lambda x: apply(x, packed, bias, "none", [], "")


def bound_caches() -> None:
    """Bound both caches to `KEPT` products of any shape, unless the environment sets a bound.

    No effect in a process that has multiplied by oneDNN before.
    """
    for variable in BOUNDS:
        os.environ.setdefault(variable, str(KEPT))


def cache_bytes() -> int:
    """The most bytes of memory that cached products take."""
    bound_caches()
    bounds = [os.environ[variable] for variable in BOUNDS]
    return max(int(each) if each.isdecimal() else 1024 for each in bounds) * KEPT_BYTES


@functools.cache
def obstacle() -> str:
    """Why oneDNN does not multiply bfloat16 here; empty where it does, be it slowly."""
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    try:
        onednn_linear(weight, None)(weight)
    except (AttributeError, RuntimeError) as error:
        return f"torch multiplies no bfloat16 by oneDNN on this processor ({f'{error}'.splitlines()[0]})"
    return ""


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether products of bfloat16 are faster than those of float32, measured once.

    The presence of instructions does not tell: those of AMX are eight times as fast and more, those of AVX-512 BF16
    twice as fast on some processors and half as fast on others.  Without any, oneDNN emulates them.
    """
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private: absent means no
    if not any(getattr(torch.cpu, check, bool)() for check in checks) or obstacle():
        return False
    of_bfloat16, of_float32 = _seconds()
    return WORTH * of_bfloat16 < of_float32


@torch.inference_mode()
def _seconds() -> tuple[float, float]:
    """The least seconds of a product of bfloat16 and of float32, measured in turns: a machine's speed may change."""
    products = [_Product(kind) for kind in (torch.bfloat16, torch.float32)]
    rounds = [[product.seconds() for product in products] for _ in range(TRIES)]
    of_bfloat16, of_float32 = map(min, zip(*rounds, strict=True))
    return of_bfloat16, of_float32


class _Product:
    """A product to measure."""

    def __init__(self, kind: torch.dtype) -> None:
        self._apply = onednn_linear(torch.ones(OUTPUTS, DEPTH, dtype=kind), None)
        self._x = torch.ones(ROWS, DEPTH, dtype=kind)

    def seconds(self) -> float:
        started = time.perf_counter()
        self._apply(self._x)
        return time.perf_counter() - started
