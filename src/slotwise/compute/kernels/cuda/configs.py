"""Launch parameters of attention and products: tiles, warps, stages, segments.

Those of attention are found by `benchmarks/gpu/tune.py` on the device itself and kept in `configs/<device name>.json`
next to this file; they are never searched at start.  The repository has no such file so far, because no device has been
tuned.  Without a file the defaults below are used, chosen by what the assembler makes of them
(`benchmarks/gpu-compile.md`).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# A row of 32,000 tokens is 64 programs for each key head, and as many parts in memory.
SEGMENT = 512
# Compute capabilities.
AMPERE, ADA, HOPPER, BLACKWELL = 80, 89, 90, 100
FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tiles of attention over rows with many new tokens: packed queries by cached positions.

    A multiprocessor runs at least `programs` at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 1


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tiles of attention over rows with few new tokens: cached positions.

    A multiprocessor runs at least `programs` at once.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: int = 1


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Tiles of products: tokens by outputs, and so many inputs at a time.

    A multiprocessor runs at least `programs` at once.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """The launch parameters for heads of one size and type.

    `segment` positions are summed together: a multiple of both tiles' `block_n`.
    """

    prefill: PrefillConfig
    decode: DecodeConfig
    segment: int = SEGMENT


def file_of(device_name: str) -> Path:
    """The file of a device's configurations, which may not exist."""
    return FOLDER / f"{device_name.replace(' ', '_').replace('/', '_')}.json"


def key_of(head_dim: int, kind: torch.dtype) -> str:
    """The name of a configuration in such a file, such as `128-bfloat16`."""
    return f"{head_dim}-{str(kind).removeprefix('torch.')}"


@functools.lru_cache(maxsize=64)
def tuning_for(device_name: str, head_dim: int, kind: torch.dtype, capability: int = AMPERE) -> Tuning:
    """A device's own configuration for heads of this size and type, or the default of its compute capability.

    Raises:
        ValueError: an entry of the device's file is incomplete.
    """
    path = file_of(device_name)
    found = json.loads(path.read_text()).get(key_of(head_dim, kind)) if path.exists() else None
    return default_tuning(head_dim, kind, capability) if found is None else parse(found, str(path))


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


def default_tuning(head_dim: int, kind: torch.dtype, capability: int = AMPERE) -> Tuning:
    """For a device without a file, by its compute capability (80 is 8.0).

    No kernel of 16-bit types spills registers: `make gpu-compile` checks that, and the `programs` that are claimed.
    """
    if kind == torch.float32:
        prefill = PrefillConfig(32, 16, 8, 2) if head_dim <= 128 else PrefillConfig(16, 16, 8, 2)
        return Tuning(prefill, DecodeConfig(16 if head_dim > 128 else 32, 4, 2))
    stages = 2 if 32 < head_dim <= 64 and (capability == ADA or capability >= BLACKWELL) else 3  # three spill there
    decode = DecodeConfig(64 if head_dim <= 128 else 32, 4, stages, 2)
    return Tuning(_prefill(head_dim, capability), decode)


def latent_stages(capability: int) -> int:
    """Stages of attention over latents of 16 bits: two spill on compute capability 8.0, three from 9.0 on."""
    return 2 if capability >= HOPPER else 3


def _prefill(head_dim: int, capability: int) -> PrefillConfig:
    """Tiles as large as registers allow with two sums of values, one of a segment and one of those before it."""
    if head_dim > 128:
        return PrefillConfig(32, 64, 8, 2)
    if capability == ADA and head_dim <= 32:
        return PrefillConfig(64, 32, 8, 2)  # three stages spill there
    if capability >= HOPPER:
        return PrefillConfig(128, 64 if 32 < head_dim <= 64 else 32, 8, 3)
    return PrefillConfig(128 if 32 < head_dim <= 64 else 64, 32, 8, 3)


# Tokens of the smallest tile of a product.
FEW = 16
_DECODE = ProductConfig(FEW, 64, 64, 4, 4, 2)
_PREFILL = ProductConfig(128, 128, 64, 8, 3)
_FLOAT32 = ProductConfig(FEW, 32, 32, 4, 2), ProductConfig(64, 64, 32, 8, 2)
_CODES = ProductConfig(FEW, 32, 0, 4, 4, 2), ProductConfig(128, 64, 0, 8, 3)
# Larger tiles spill on compute capability 8.9.
_CODES_OF_A_TABLE = _CODES[0], ProductConfig(64, 64, 0, 8, 3)
# With a third stage it spills on 8.0.
_EXPERT_CODES = _CODES[0], ProductConfig(64, 64, 0, 8, 2)
_CODES_FLOAT32 = ProductConfig(FEW, 32, 0, 4, 2), ProductConfig(32, 32, 0, 8, 2)
_NARROW = ProductConfig(FEW, 64, 128, 4, 4, 2), ProductConfig(128, 128, 128, 8, 3)


def codes_tile(tokens: int, kind: torch.dtype, *, has_table: bool) -> ProductConfig:
    """The tile of `packed.multiply`, by whether codes stand for levels of a table; its inputs at a time are a chunk."""
    tiles = _CODES_FLOAT32 if kind == torch.float32 else _CODES_OF_A_TABLE if has_table else _CODES
    return tiles[tokens > FEW]


def expert_codes_tile(pairs: int, experts: int, kind: torch.dtype) -> ProductConfig:
    """The tile of `experts.multiply_codes`: by how many pairs an expert has on average."""
    return (_CODES_FLOAT32 if kind == torch.float32 else _EXPERT_CODES)[pairs > 2 * FEW * experts]


def narrow_tile(tokens: int) -> ProductConfig:
    """The tile of `narrow.multiply`."""
    return _NARROW[tokens > FEW]


def experts_tile(pairs: int, experts: int, kind: torch.dtype) -> ProductConfig:
    """The tile of `experts.multiply`: by how many pairs an expert has on average."""
    return (_FLOAT32 if kind == torch.float32 else (_DECODE, _PREFILL))[pairs > 2 * FEW * experts]
