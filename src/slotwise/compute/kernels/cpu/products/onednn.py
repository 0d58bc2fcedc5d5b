"""Products of bfloat16 by oneDNN, through torch, for processors on which it is the fastest (`paths.py`).

The operators are the ones that torch's own compiler uses.  They are private, so they are tried before they are used.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import Linear

# For each weight shape and number of rows torch caches a plan and oneDNN its code: up to 1,024 of either.  More than a
# hundred are in use at a time where the number of rows varies.

# The variables that bound these caches; torch and oneDNN read them at their first product.
BOUNDS = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
# Products that are cached, and bytes of one in both caches: 300,000 to 750,000 from 2 to 512 rows, measured on AVX-512
# BF16.
KEPT = 128
KEPT_BYTES = 600_000


def onednn_linear(weight: Tensor, bias: Tensor | None, *, is_wide: bool = False) -> Linear:
    """`weight [out, in]` packed once for many products; results are rounded, and float32 if it `is_wide`."""
    bound_caches()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    apply = torch.ops.mkldnn._linear_pointwise
    if is_wide:
        return lambda x: apply(x, packed, bias, "none", [], "").float()
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
    """Why oneDNN does not multiply bfloat16 here; empty where it does, even if slowly."""
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    try:
        onednn_linear(weight, None)(weight)
    except (AttributeError, RuntimeError) as error:
        return f"torch multiplies no bfloat16 by oneDNN on this processor ({f'{error}'.splitlines()[0]})"
    return ""
