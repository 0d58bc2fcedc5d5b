"""Capabilities of this processor, as torch and LLVM report them."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from numba import config
from numba.core.codegen import get_host_cpu_features

CAPABILITY = torch.backends.cpu.get_cpu_capability()
AVX2, AVX512 = CAPABILITY == "AVX2", CAPABILITY == "AVX512"
LANES = 16 if AVX512 else 8
"""The float32 in a vector: one register, on processors with registers of that width."""

PAIR = 2 * LANES
"""Columns that products read together."""


def features() -> str:
    """The features that kernels are compiled for, by LLVM's names, separated by commas."""
    forced: str | None = cast(Any, config).CPU_FEATURES
    return _host_features() if forced is None else forced


def has(feature: str) -> bool:
    """Whether kernels may use a feature, by LLVM's name; all but `avxvnni` belong to AVX-512."""
    possible = AVX512 or (AVX2 and feature == "avxvnni")
    return possible and f"+{feature}" in features().split(",")


@functools.cache
def _host_features() -> str:
    return str(get_host_cpu_features())
