"""Adapters in the format of Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`.

What the config asks for and is not computed is an error that names the field.  The file says which products are
adapted: `base_model.model.NAME.lora_A.weight [rank, inputs]`, `.lora_B.weight [outputs, rank]`, a trained bias
`NAME.bias`, and, of `lora_bias`, `.lora_B.bias`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from slotwise.model.errors import CheckpointError
from slotwise.model.fields import Fields, read_json
from slotwise.model.formats import ADAPTER
from slotwise.model.safetensors_files import SafetensorsFile, SafetensorsTensor

FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_B.bias": "added", ".base_layer.bias": "bias",
           ".bias": "bias"}
DENSE = ("F32", "F16", "BF16")
MAX_TENSORS = 1 << 16
MAX_PATTERNS = 4096

FREE = {  # fields that change nothing here, or are read below
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "r",
    "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "lora_bias", "lora_dropout", "task_type",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "runtime_config",
    "qalora_group_size", "ensure_weight_tying", "init_lora_weights", "megatron_core",
}
INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # those that leave the base weights as they are
NEUTRAL: tuple[object, ...] = (None, False, {}, [], "")


class PeftAdapter(NamedTuple):
    """An adapter's config, checked, and the tensors of its file by product and by sort (`FACTORS`)."""

    where: str
    alpha: float
    alphas: dict[str, float]  # of products whose name ends so
    is_rank_stabilised: bool
    tensors: dict[str, dict[str, SafetensorsTensor]]

    def scale(self, name: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski, 2023)."""
        alpha = next((value for key, value in self.alphas.items() if f".{name}".endswith(f".{key}")), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_adapter(folder: Path) -> PeftAdapter:
    """Reads an adapter's config and the table of its file.

    Raises CheckpointError, with one line, for what is missing, damaged or not supported.
    """
    if not (folder / ADAPTER).is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER}: it is not a LoRA adapter in the format of PEFT")
    fields = read_json(folder / ADAPTER)
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
        str(folder), fields.number("lora_alpha"), {key: patterns.number(key) for key in patterns.values},
        fields.flag("use_rslora"), _tensors(folder / FILE))


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


def _tensors(path: Path) -> dict[str, dict[str, SafetensorsTensor]]:
    file = SafetensorsFile(path)
    if len(file.table) > MAX_TENSORS:
        raise CheckpointError(f"{path} has more than {MAX_TENSORS} tensors")
    found: dict[str, dict[str, SafetensorsTensor]] = {}
    for name, (kind, _, _) in file.table.items():
        ending = next((each for each in FACTORS if name.endswith(each)), None)
        if ending is None or not name.startswith(PREFIX):
            raise CheckpointError(f"{path}: {name!r:.120} is not supported: it is no factor and no bias of a product")
        if kind not in DENSE:
            raise CheckpointError(f"{path}: {name:.120} is stored as {kind:.20}; supported are {', '.join(DENSE)}")
        found.setdefault(name[len(PREFIX) : -len(ending)], {})[FACTORS[ending]] = SafetensorsTensor(file, name)
    if not found:
        raise CheckpointError(f"{path} holds no tensors")
    return found
