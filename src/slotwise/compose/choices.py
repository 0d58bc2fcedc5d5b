"""What is chosen and checked before a model's weights are read: device, kernels, settings, ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.kernels.checked import CheckedKernels
from slotwise.kernels.group import ALONE, Divided, Group, Stage
from slotwise.kernels.interface import Kernels
from slotwise.kernels.select import choose, resolve
from slotwise.model.family_table import tensor_shapes
from slotwise.model.model_config import ModelConfig

if TYPE_CHECKING:
    from slotwise.compose.ranks import Ranks


def chosen(config: EngineConfig, wrap: Callable[[Kernels], Kernels]) -> tuple[str, Kernels]:
    """Returns the device and its kernels.

    Raises:
        ConfigError: the device is missing, or does not support the settings.
    """
    try:
        device = resolve(config.device)
        kernels = choose(device, config.quantization, config.kv_cache_dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    kernels = wrap(CheckedKernels(kernels) if os.environ.get("SLOTWISE_DEBUG") == "1" else kernels)
    if config.enable_lora and kernels.adapter_refusal:
        raise ConfigError(f"enable_lora: {kernels.adapter_refusal}")
    return device, kernels


def check_model(config: EngineConfig, folder: Path, described: ModelConfig, kernels: Kernels) -> None:
    """Raises ConfigError where this model cannot have the settings."""
    if config.quantization != "none" and described.quantization is not None:
        raise ConfigError(f"quantization {config.quantization} is for full weights: those of {folder} are quantised "
                          f"already ({described.quantization.description}); leave the option out")
    if config.packed_weights_cache and kernels.name != "cpu":
        raise ConfigError(f"packed_weights_cache needs device cpu, not {kernels.name}: only there weights are repacked")
    if config.packed_weights_cache and described.quantization is None:
        raise ConfigError(f"packed_weights_cache is for quantised checkpoints: the weights of {folder} are plain")
    if config.batch_invariant and (why := kernels.batch_dependence(described.dtype)):
        raise ConfigError(f"batch_invariant cannot be kept: {why}")
    if described.recurrent is None:
        return
    if config.pipeline_parallel_size > 1:
        raise ConfigError(f"pipeline_parallel_size {config.pipeline_parallel_size}: layers with a recurrent state are "
                          "not divided into stages: serve this model with 1")
    if config.speculative_config is not None and config.speculative_config.model is not None:
        raise ConfigError("speculative_config: a draft model is not supported beside a model with recurrent states: "
                          "choose method suffix, ngram or prediction")


def divided(config: EngineConfig) -> Group:
    """What rank 0 holds of the model, and exchanges with no other: to know sizes before the others start."""
    if config.num_ranks == 1:
        return ALONE
    return Divided(config.tensor_parallel_size, Stage(0, config.pipeline_parallel_size),
                   splits_experts=config.enable_expert_parallel)


def other_ranks(
    config: EngineConfig, kernels: Kernels, described: ModelConfig, on_lost: Callable[[str], None],
) -> Ranks | None:
    """Starts the other ranks; None: there are none.

    Raises:
        ConfigError: there are fewer GPUs than ranks, no experts to divide, or other ranks in torch's process group.
    """
    if config.num_ranks == 1:
        return None
    if kernels.device.type == "cuda" and (there := torch.cuda.device_count()) < config.num_ranks:
        raise ConfigError(f"a model of {config.num_ranks} ranks needs as many GPUs, and torch sees {there}")
    if kernels.name != "cpu" and torch.distributed.is_initialized():
        raise ConfigError(f"on device {kernels.name} a process has one model of several ranks at a time: drop the one "
                          "before, or start another process")
    if kernels.name != "cpu" and not hasattr(os, "memfd_create"):
        raise ConfigError(f"several ranks on device {kernels.name} need Linux, whose files in memory they find each "
                          "other by")
    if config.enable_expert_parallel and described.mixture is None:
        raise ConfigError("enable_expert_parallel needs a model with experts, and this one has none: leave it out")
    from slotwise.compose.ranks import Ranks  # needs msgspec, which one process does without

    for number in range(config.pipeline_parallel_size):  # raises where the model cannot be divided
        stage = Stage(number, config.pipeline_parallel_size)
        tensor_shapes(described, Divided(
            config.tensor_parallel_size, stage, splits_experts=config.enable_expert_parallel))
    return Ranks(config, kernels, described, on_lost)
