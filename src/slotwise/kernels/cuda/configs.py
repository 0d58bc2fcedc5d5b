"""Launch parameters of attention by device: tiles, warps, stages, segments.

Found by `benchmarks/tune_gpu.py` on the device itself and kept beside this file, `configs/<device name>.json`, never
searched at start.  The repository holds none so far: no device has been tuned.  Until then the defaults below are used,
chosen to fit the shared memory of Ampere and later.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SEGMENT = 512  # a row of 32,000 tokens is 64 programs for each key head, and as many parts in memory
FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tiles of `prefill.py`: packed queries by cached positions."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tiles of `decode.py`: cached positions."""

    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """The launch parameters for heads of one size and type."""

    prefill: PrefillConfig
    decode: DecodeConfig
    segment: int = SEGMENT  # positions summed together, a multiple of both tiles' `block_n`


def file_of(device_name: str) -> Path:
    """The file of a device's configurations, which may not exist."""
    return FOLDER / f"{device_name.replace(' ', '_').replace('/', '_')}.json"


def key_of(head_dim: int, kind: torch.dtype) -> str:
    """The name of a configuration in such a file, such as `128-bfloat16`."""
    return f"{head_dim}-{str(kind).removeprefix('torch.')}"


@functools.lru_cache(maxsize=64)
def tuning_for(device_name: str, head_dim: int, kind: torch.dtype) -> Tuning:
    """A device's own configuration for heads of this size and type, or the default.

    Raises:
        ValueError: an entry of the device's file is not complete.
    """
    path = file_of(device_name)
    found = json.loads(path.read_text()).get(key_of(head_dim, kind)) if path.exists() else None
    return default_tuning(head_dim, kind) if found is None else parse(found, str(path))


def parse(found: dict[str, Any], source: str) -> Tuning:
    """One entry of a file.

    Raises:
        ValueError: fields are missing or unknown; `source` is named.
    """
    try:
        prefill, decode = PrefillConfig(**found["prefill"]), DecodeConfig(**found["decode"])
        return Tuning(prefill, decode, int(found.get("segment", SEGMENT)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: not a configuration of attention: {error}") from error


def default_tuning(head_dim: int, kind: torch.dtype) -> Tuning:
    """For a device without a file: a stage of keys and values takes at most 32 KiB."""
    wide = kind.itemsize * (1 if head_dim <= 64 else 2 if head_dim <= 128 else 4)  # 2 ... 16
    if kind == torch.float32:
        block_n = 16 if head_dim > 128 else 32
        return Tuning(PrefillConfig(32, block_n, 4, 2), DecodeConfig(block_n, 4, 2))
    if wide <= 4:
        return Tuning(PrefillConfig(128, 64, 8 if head_dim > 64 else 4, 3), DecodeConfig(64, 4, 3))
    return Tuning(PrefillConfig(64, 32, 4, 2), DecodeConfig(32, 4, 3))
