"""Capabilities of this processor, as torch and LLVM report them."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from numba import config
from numba.core.codegen import get_host_cpu_features

CAPABILITY = torch.backends.cpu.get_cpu_capability()
AVX2, AVX512 = CAPABILITY == "AVX2", CAPABILITY == "AVX512"
LANES = 16 if AVX512 else 8  # float32 in a vector: one register, where there are registers of that width
PAIR = 2 * LANES  # columns that products read together


def has(feature: str) -> bool:
    """Whether kernels may use a feature, by LLVM's name, on the processor they are compiled for.

    All that are asked for but `avxvnni` belong to AVX-512.
    """
    forced: str | None = cast(Any, config).CPU_FEATURES
    possible = AVX512 or (AVX2 and feature == "avxvnni")
    return possible and f"+{feature}" in (_host_features() if forced is None else forced).split(",")


_host_features = functools.cache(get_host_cpu_features)
