"""Adapters in the format of Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`.

What the config asks for and is not computed is an error that names the field.  The file says which products are
adapted: `base_model.model.NAME.lora_A.weight [rank, inputs]`, `.lora_B.weight [outputs, rank]`, a trained bias
`NAME.bias`, and, of `lora_bias`, `.lora_B.bias`.

A file is read whole, and never mapped: an adapter is loaded while others are served, and one that its writer truncates
meanwhile must end that load alone.  What is parsed at once is bounded, because no step runs while it is.
"""

from __future__ import annotations

import errno
import io
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.files import read_part
from slotwise.model.errors import CheckpointError
from slotwise.model.fields import Fields, read_json
from slotwise.model.formats import ADAPTER
from slotwise.model.names import canonical
from slotwise.model.safetensors_files import Entry, damaged, read_table

FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_B.bias": "added", ".base_layer.bias": "bias",
           ".bias": "bias"}
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_TABLE = 2 << 20  # bytes: some 15,000 tensors
MAX_CONFIG = 1 << 20  # bytes
MAX_PATTERNS = 4096

FREE = {  # fields that change nothing here, or are read below
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "r",
    "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "lora_bias", "lora_dropout", "task_type",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "runtime_config",
    "qalora_group_size", "ensure_weight_tying", "init_lora_weights", "megatron_core", "eva_config",
}
INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # those that leave the base weights as they are
NEUTRAL: tuple[object, ...] = (None, False, {}, [], "")


class AdapterTensor(NamedTuple):
    """A tensor in the bytes of a file."""

    data: bytes
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def values(self) -> Tensor:
        """Its numbers in memory of their own, as float32."""
        first, number = self.entry.at, math.prod(self.shape)
        raw = bytearray(self.data[first : first + self.entry.nbytes])
        return torch.frombuffer(raw, dtype=DENSE[self.entry.kind], count=number).float().reshape(self.shape)


class PeftAdapter(NamedTuple):
    """An adapter's config, checked, and the tensors of its file by product and by sort (`FACTORS`)."""

    where: str
    alpha: float
    alphas: dict[str, float]  # of products whose name ends so
    is_rank_stabilised: bool
    tensors: dict[str, dict[str, AdapterTensor]]

    def scale(self, name: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski, 2023)."""
        alpha = next((value for key, value in self.alphas.items() if f".{name}".endswith(f".{key}")), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_adapter(folder: Path, most: int) -> PeftAdapter:
    """Reads an adapter's config and its file, of at most `most` bytes beside its table.

    Raises CheckpointError, with one line, for what is missing, damaged or not supported.
    """
    if not (folder / ADAPTER).is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER}: it is not a LoRA adapter in the format of PEFT")
    fields = read_json(folder / ADAPTER, MAX_CONFIG)
    _check(fields)
    if not (folder / FILE).is_file():
        raise CheckpointError(f"{folder} has no {FILE}: adapters are read from safetensors only")
    patterns = fields.section("alpha_pattern")
    if len(patterns.values) > MAX_PATTERNS:
        raise fields.error("alpha_pattern", f"may have at most {MAX_PATTERNS} entries")
    for key in patterns.values:
        if not all(part.replace("_", "a").isalnum() for part in key.split(".")):
            raise fields.error("alpha_pattern", f"has {key!r:.60}: only names of modules are supported")
    return PeftAdapter(
        str(folder), fields.number("lora_alpha"), {canonical(key): patterns.number(key) for key in patterns.values},
        fields.flag("use_rslora"), _tensors(folder / FILE, most))


def _check(fields: Fields) -> None:
    """Raises CheckpointError for a config that asks for something else than LoRA."""
    if fields.text("peft_type") != "LORA":
        raise fields.error("peft_type", f"must be LORA, not {fields.text('peft_type')!r:.40}")
    fields.integer("r")
    if fields.text("bias", default="none") not in ("none", "all", "lora_only"):
        raise fields.error("bias", f"must be none, all or lora_only, not {fields.text('bias')!r:.40}")
    if (init := fields.values.get("init_lora_weights")) not in INITS:
        raise fields.error("init_lora_weights", f"{init!r:.40} is not supported: it changes the base weights")
    for name, value in fields.values.items():
        if name not in FREE and value not in NEUTRAL:
            raise fields.error(name, f"{value!r:.40} is not supported")


def _read(path: Path, most: int) -> tuple[bytes, dict[str, Entry]]:
    """The bytes of a file, and its table."""
    try:
        data = read_part(path, most + MAX_TABLE)
        return data, read_table(io.BytesIO(data), len(data), MAX_TABLE)
    except OSError as error:
        hint = ", the most that an adapter of max_lora_rank has for this model" * (error.errno == errno.EFBIG)
        raise CheckpointError(f"cannot read {path}: {error.strerror}{hint}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(path, error) from error


def _tensors(path: Path, most: int) -> dict[str, dict[str, AdapterTensor]]:
    data, table = _read(path, most)
    found: dict[str, dict[str, AdapterTensor]] = {}
    for name, entry in table.items():
        kind = entry.kind
        ending = next((each for each in FACTORS if name.endswith(each)), None)
        if ending is None or not name.startswith(PREFIX):
            raise CheckpointError(f"{path}: {name!r:.120} is not supported: it is no factor and no bias of a product")
        if kind not in DENSE:
            raise CheckpointError(f"{path}: {name:.120} is stored as {kind:.20}; supported are {', '.join(DENSE)}")
        if entry.nbytes != math.prod(entry.shape) * DENSE[kind].itemsize:
            raise damaged(path, ValueError(f"{name:.120} has {entry.nbytes} bytes for {list(entry.shape)}"))
        module, sort = canonical(name[len(PREFIX) : -len(ending)]), FACTORS[ending]
        if sort in found.setdefault(module, {}):
            raise CheckpointError(f"{path}: {name:.120} is there twice, under names that mean the same")
        found[module][sort] = AdapterTensor(data, entry)
    if not found:
        raise CheckpointError(f"{path} holds no tensors")
    return found
