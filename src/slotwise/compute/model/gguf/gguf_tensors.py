"""The tensors of a GGUF file under the names that families use, mapped: pages are read when a tensor is.

Tensors are copied, and their pages are then released; otherwise the file would stay resident next to the packed
weights.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Rows, reordered
from slotwise.compute.model.gguf.architectures import (
    ARCHITECTURES,
    BOTH,
    MAX_EXPERTS,
    NEXTN,
    Architecture,
    is_unread,
)
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES
from slotwise.compute.model.gguf.gguf_config import open_separated
from slotwise.compute.model.stored_tensors import StoredTensor, TensorSource
from slotwise.errors import CheckpointError
from slotwise.platform.gguf_file import Metadata
from slotwise.platform.gguf_file import TensorEntry as Entry

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
INTERLEAVED = ("self_attn.q_proj", "self_attn.k_proj")
MATRIX = 2  # dimensions
CORRECTIONS, SHARED_GATE = ("correction_bias", "expert_bias"), "shared_expert_gate.weight"
NORM = "norm.weight"  # how the names of norms' weights end
CONVOLUTIONS = "conv1d.weight", "conv.conv.weight"
STATE_NORMS = "mamba.norm.weight", "mixer.norm.weight", "linear_attn.norm.weight"
LINEAR, DECAYS_OF_LINES = ".linear_attn.", "self_attn.A_log"
RATE, SKIP = ".A_log", ".D"
_C = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class GGUFSource(TensorSource):
    architecture: Architecture = ARCHITECTURES["llama"]

    def shown(self, name: str) -> str:
        return f"tensor {self.architecture.stored_name(name)}"


class GGUFTensor:
    """One tensor.

    Args:
        data: the tensor's bytes, uint8, of a mapped file.
        order: the stored row of each row of the original; None: they are in order.
        offset: that was added to the numbers of the original.
        is_rate: the numbers are those of the original, negated exponentials of them.
    """

    def __init__(
        self, data: Tensor, entry: Entry, order: Tensor | None, offset: float, *, is_rate: bool = False,
    ) -> None:
        self.kind, self.shape, self.nbytes = entry.type.name, entry.shape, entry.end - entry.start
        self._data, self._offset, self._is_rate = data, offset, is_rate
        self._order = order

    def rows(self, first: int, end: int) -> Tensor:
        stored = self._data.view(DTYPES[self.kind]).view(self.shape)
        found = stored[first:end].clone() if self._order is None else stored[self._order[first:end]]
        _give_back(self._data)
        if self._is_rate:
            return torch.log(-found.float())
        return found - self._offset if self._offset else found

    @property
    def format(self) -> Format | None:
        return BLOCK_TYPES[self.kind].format if self.kind in BLOCK_TYPES and len(self.shape) == MATRIX else None

    def matrix(self) -> QuantizedMatrix:
        matrix = BLOCK_TYPES[self.kind].matrix(self._data, *self.shape)

        def read(first: int, end: int) -> Rows:
            rows = matrix.read(first, end)
            _give_back(self._data)
            return rows

        mapped = replace(matrix, read=read)
        return mapped if self._order is None else reordered(mapped, self._order)


class MetadataNumber:
    """A tensor of one number, which is in an array of the metadata."""

    kind, nbytes, format = "F32", 4, None

    def __init__(self, number: float, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._number = torch.full(shape, number)

    def rows(self, first: int, end: int) -> Tensor:
        return self._number

    def matrix(self) -> QuantizedMatrix:
        raise TypeError("a number is not a quantized matrix")


def open_gguf_tensors(path: Path) -> GGUFSource:
    """Opens a GGUF model, given its first file.

    Raises:
        CheckpointError: a file is missing or not valid.
    """
    model, architecture = open_separated(path)
    name = model.metadata.text("general.architecture")
    heads = {INTERLEAVED[0]: model.metadata.numbers(f"{name}.attention.head_count"),
             INTERLEAVED[1]: model.metadata.numbers(f"{name}.attention.head_count_kv")}
    heads[INTERLEAVED[1]] = heads[INTERLEAVED[1]] or heads[INTERLEAVED[0]]
    tiled = _Tiles.read(model.metadata, name) if architecture.has_tiled_values else None
    maps = {file: _map(file) for file in {file for file, _ in model.tensors.values()}}
    tensors: dict[str, StoredTensor] = {}
    drafting = model.metadata.integer(f"{name}.{NEXTN}", 0)
    read_blocks = model.metadata.integer(f"{name}.block_count", 0) - drafting
    for stored, (file, entry) in model.tensors.items():
        if is_unread(stored) or (drafting and _block(stored) >= read_blocks):
            continue
        name, bytes_of = architecture.name_of(stored), maps[file][entry.start : entry.end]
        interleaved = _heads_of(name, heads) if architecture.is_interleaved else 0
        if interleaved and entry.shape[0] % (2 * interleaved):
            raise CheckpointError(f"{file}: tensor {stored} has {entry.shape[0]} rows, no multiple of twice the heads")
        order = _original_order(entry.shape[0], interleaved) if interleaved else None
        if architecture.ungrouped and f".{architecture.ungrouped}." in name:
            order = _grouped_order(entry.shape[0], *(int(heads[part][0]) for part in INTERLEAVED))
        offset = architecture.norm_offset if name.endswith(NORM) and not name.endswith(STATE_NORMS) else 0.0
        entry = entry._replace(shape=_shape_here(name, entry.shape))
        if tiled is not None and LINEAR in name:
            order = _grouped_values(entry.shape[0], name, tiled)
        where = f"{file}: tensor {stored}"
        wholes = [(name, entry)] if "{}" not in name else [
            (name.replace("{}", str(number)), one) for number, one in enumerate(_experts(entry, where))]
        pieces = [piece for whole in wholes for piece in _halves(*whole, where)]
        for place, (one, described) in enumerate(pieces):
            if one in tensors:
                raise CheckpointError(f"{file}: tensor {stored} is there twice, under names that mean the same")
            size = len(bytes_of) // len(pieces)
            tensors[one] = GGUFTensor(bytes_of[place * size : (place + 1) * size], described, order, offset,
                                       is_rate=one.endswith(RATE))
    for key, (part, shape) in architecture.numbers.items():
        for layer, number in enumerate(model.metadata.numbers(key)):
            tensors[f"model.layers.{layer}.{part}"] = MetadataNumber(number, shape)
    return GGUFSource(str(path), "metadata", tensors, is_exact=True, architecture=architecture)


def _experts(entry: Entry, where: str) -> list[Entry]:
    """The entry of each expert in a tensor `[experts, outputs, inputs]`, or in one of biases `[experts, outputs]`.

    Norms of heads that are stored together are divided as biases are.
    """
    count, *shape = entry.shape
    if len(shape) != (1 if where.endswith((".bias", "_norm.weight")) else MATRIX) or count > MAX_EXPERTS:
        raise CheckpointError(f"{where} has shape {list(entry.shape)}, and must be that of at most {MAX_EXPERTS} "
                              "experts")
    size = (entry.end - entry.start) // count
    return [Entry(tuple(shape), entry.type, entry.start + place * size, entry.start + (place + 1) * size)
            for place in range(count)]


def _halves(name: str, entry: Entry, where: str) -> list[tuple[str, Entry]]:
    """Splits a tensor with two names in `name` into the entries of the first and the second half of its rows."""
    names = name.split(BOTH)
    if len(names) == 1:
        return [(name, entry)]
    rows, *others = entry.shape
    if rows % len(names):
        raise CheckpointError(f"{where} has {rows} rows, which must be even: gates and what they gate")
    size = (entry.end - entry.start) // len(names)
    return [(one, Entry((rows // len(names), *others), entry.type, entry.start + place * size,
                        entry.start + (place + 1) * size)) for place, one in enumerate(names)]


class _Tiles(NamedTuple):
    """An order of value heads: the first one of each key head, then the second one of each, and so on."""

    keys: int  # rows before those of values where queries, keys and values are one tensor
    groups: int  # key heads
    heads: int  # value heads

    @classmethod
    def read(cls, metadata: Metadata, name: str) -> _Tiles:
        groups, heads = (metadata.integer(f"{name}.ssm.{key}", minimum=1) for key in ("group_count", "time_step_rank"))
        return cls(2 * groups * metadata.integer(f"{name}.ssm.state_size"), groups, heads)


def _grouped_values(rows: int, name: str, tiles: _Tiles) -> Tensor | None:
    """The stored row of each row of a tensor whose value heads were grouped by key heads in the original."""
    if name.endswith(("out_proj.weight", *STATE_NORMS)):
        return None
    before = tiles.keys if name.endswith(("in_proj_qkv.weight", *CONVOLUTIONS)) else 0
    if rows <= before or (rows - before) % tiles.heads or tiles.heads % tiles.groups:
        return None  # the shape is refused when it is read
    values = torch.arange(before, rows).view(tiles.heads // tiles.groups, tiles.groups, -1).transpose(0, 1)
    return torch.cat((torch.arange(before), values.flatten()))


def _shape_here(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor that a file has in another one, which does not move a number.

    Convolutions have a dimension of 1 more here, decays and skips of Mamba-2 one less, and its norm has no groups.
    Files may lack a dimension of 1, or have one, where experts have corrections and the gate of a shared one.
    """
    if name.endswith(CORRECTIONS):
        return (prod(shape),)
    if name.endswith(SHARED_GATE):
        return 1, prod(shape)
    if name.endswith(CONVOLUTIONS) and len(shape) in (MATRIX, 2 * MATRIX):
        return prod(shape) // shape[-1], 1, shape[-1]
    if name.endswith(DECAYS_OF_LINES):
        return 1, 1, prod(shape), 1
    if name.endswith((RATE, SKIP)) and shape[-1] == 1:
        return shape[:-1]
    return (prod(shape),) if name.endswith(STATE_NORMS) else shape


def _block(stored: str) -> int:
    """The number of the block that a tensor belongs to; -1 for another tensor."""
    number = stored.removeprefix("blk.").partition(".")[0]
    return int(number) if stored.startswith("blk.") and number.isdecimal() else -1


def _heads_of(name: str, heads: Mapping[str, list[float]]) -> int:
    """The number of heads in the rows of a tensor of queries or keys; 0 for another."""
    for part, numbers in heads.items():
        if f".{part}." in name:
            return int(max(numbers))  # 0 in layers with a state
    return 0


def _grouped_order(rows: int, heads: int, kv_heads: int) -> Tensor:
    """The stored row of each row of a fused weight: `[queries | keys | values]` as groups, one for each key head."""
    parts = torch.arange(rows).view(heads + 2 * kv_heads, -1)
    queries, keys, values = parts.split([heads, kv_heads, kv_heads])
    return torch.cat((queries.view(kv_heads, heads // kv_heads, -1), keys[:, None], values[:, None]), dim=1).flatten()


def _original_order(rows: int, heads: int) -> Tensor:
    """The stored row of each row: `[heads, pairs, 2]` as `[heads, 2, pairs]`."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _map(path: Path) -> Tensor:
    """A file's bytes, mapped."""
    try:
        size = path.stat().st_size
        return torch.tensor([], dtype=torch.uint8).set_(torch.UntypedStorage.from_file(str(path), False, size))  # type: ignore[arg-type]
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot read {path}: {error!s:.200}") from error


def _give_back(data: Tensor) -> None:
    """Give back the whole pages of bytes of a mapped file, which are read again at the next use."""
    start = -(-data.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (data.data_ptr() + data.numel()) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and hasattr(_C, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
        _C.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_DONTNEED))
