"""Adapters in PEFT's format for small checkpoints, and the checkpoints that they make when they are merged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slotwise.compute.model.family_table import FAMILIES
from slotwise.compute.model.names import canonical

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


def write(
    folder: Path, base: Path, *, seed: int, rank: int = 4, targets: tuple[str, ...] = ALL, biases: bool = False,
    **config: Any,
) -> Path:
    """An adapter of the checkpoint `base`, as strong as its weights; `biases` of the base are trained, too.

    `targets` are names of modules, or the last parts of such names.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.rpartition(".")[0]
        if not {module, canonical(module), module.rpartition(".")[2]} & set(targets):
            continue
        if name.endswith(".weight"):
            outputs, inputs = weight.shape[::-1] if _is_transposed(base, module) else weight.shape
            a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a * 0.1
            tensors[f"base_model.model.{module}.lora_B.weight"] = b * 0.1
        elif biases:
            tensors[f"base_model.model.{module}.base_layer.bias"] = torch.randn(weight.shape, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets),
        "bias": "lora_only" if biases else "none", "task_type": "CAUSAL_LM", "lora_dropout": 0.1} | config))
    return folder


def _is_transposed(base: Path, module: str) -> bool:
    """Whether a module's weight is stored as `[inputs, outputs]`."""
    [architecture] = json.loads((base / "config.json").read_text())["architectures"]
    return module.endswith(FAMILIES[architecture].transposed)


def merged(folder: Path, base: Path, adapter: Path) -> Path:
    """The checkpoint with an adapter in its weights, by PEFT's formula."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(base / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, value in tensors.items():
        module = name.removeprefix("base_model.model.")
        if module.endswith(".lora_A.weight"):
            module = module.removesuffix(".lora_A.weight")
            alpha = next((alpha for key, alpha in config.get("alpha_pattern", {}).items() if module.endswith(key)),
                         config["lora_alpha"])
            scale = alpha / (math.sqrt(len(value)) if config.get("use_rslora") else len(value))
            added = scale * tensors[name.replace("lora_A", "lora_B")] @ value
            weights[f"{module}.weight"] += added.T if _is_transposed(base, module) else added
        elif module.endswith(".base_layer.bias"):
            weights[module.replace(".base_layer", "")] = value
        elif module.endswith(".lora_B.bias"):
            weights[module.replace(".lora_B", "")] += value * config["lora_alpha"] / config["r"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
