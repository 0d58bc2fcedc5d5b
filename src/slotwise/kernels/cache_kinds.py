"""The types that a cache of keys and values may have."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, dtype, float8_e4m3fn, int8

CACHE_KINDS: dict[str, dtype | None] = {"auto": None, "int8": int8, "fp8": float8_e4m3fn}
"""The types of a cache, by the names of options; None: the type that the model computes in.

int8 has a scale for each token and head.  fp8 has none; values beyond FP8_LARGEST are stored as FP8_LARGEST.
"""

FP8_LARGEST = 448.0  # of four bits of exponent and three of fraction (Micikevicius et al., 2022)


def cache_kind(name: str, device: str, kept: Sequence[str]) -> dtype | None:
    """The type of `CACHE_KINDS` for `name`, which must be in `kept`, the names a device supports.

    Raises:
        ValueError: it is not in `kept`.
    """
    if name not in kept:
        raise ValueError(f"kv_cache_dtype must be {' or '.join(kept)} on device {device}, not {name!r}")
    return CACHE_KINDS[name]


def as_bytes(x: Tensor) -> Tensor:
    """`x` itself, or for one-byte elements that torch does not index, a view as int8, which it does."""
    return x.view(int8) if x.itemsize == 1 else x
