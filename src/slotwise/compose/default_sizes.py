"""Sizes an engine, tokens of a step and blocks of the cache, from the model, the device and the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from slotwise.compute.kernels.group import PLACES, PipelineStage, UnconnectedRank, num_ranks
from slotwise.compute.kernels.interface import AttentionShape, Kernels, LayerShape, StateShape
from slotwise.compute.kernels.select import draw_for
from slotwise.compute.model.decoder import Decoder, DecoderSizes
from slotwise.compute.model.family_table import weight_bytes
from slotwise.compute.model.layer_groups import (
    LayerGroups,
    cache_shapes,
    layer_groups,
    least_block_size,
    one_cache,
    one_group,
)
from slotwise.compute.model.network import caches_of
from slotwise.compute.runner import kv_blocks, memory_budget
from slotwise.compute.runner.decode_graphs import MAX_TOKENS, num_graphs
from slotwise.compute.runner.draft_model_runner import ALL_LOGITS, CATCH_UP
from slotwise.compute.runner.memory_budget import measured_graph, measured_workspace
from slotwise.compute.runner.prompt_results import workspace_rows
from slotwise.core.cache_groups import CacheGroups
from slotwise.core.drafting import MAX_STEP_DRAFTS
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.speculation.speculation_settings import NONE
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.messages import MemoryUse

STEP_SECONDS = 0.1  # where streams wait for whole steps
BURST_SECONDS = 0.5  # where steps are that long only when hardly any stream waits for them (core/step_budget.py)
STEP_SIZES = (512, 256, 128)  # tokens; fewer would read the weights too often for the tokens they compute
ENCODER_STEP_SIZES = (1024, *STEP_SIZES)  # no stream waits for a step of whole prompts; larger ones have fewer gaps
GPU_STEP_SIZES = (8192, 4096, 2048)  # products reach their rate at a few thousand tokens
BLOCK_SIZE = 64  # tokens; as in the measurements of benchmarks/results/kernels-cpu.md


class _Room(NamedTuple):
    """Bytes of memory."""

    workspace: int  # of steps
    graphs: int
    budget: int  # what the cache may take


def step_tokens(decoder: DecoderSizes, *, stalls_are_bounded: bool) -> int:
    """Returns the token capacity of the longest step."""
    seconds = BURST_SECONDS if stalls_are_bounded else STEP_SECONDS
    sizes = STEP_SIZES if decoder.config.is_causal else ENCODER_STEP_SIZES
    if decoder.kernels.device.type == "cuda":
        sizes = GPU_STEP_SIZES
    rate = decoder.kernels.operations_per_second(decoder.config.dtype)
    tokens = seconds * rate / (2 * decoder.config.layer_weights)
    return next(size for size in sizes if size <= tokens or size == sizes[-1])


def check_sizes(
    config: EngineConfig, models: Sequence[DecoderSizes], freed: int = 0,
) -> tuple[SchedulerLimits, MemoryUse]:
    """Returns, before weights are read, what `sized` finds afterwards; on a GPU with a cache that is not bounded.

    Args:
        models: the model, and the draft model if there is one.
        freed: bytes of host memory that will be free in addition to those that are.

    Raises:
        ConfigError: the settings contradict each other or the model.
        MemoryError: the weights or the settings need more memory than there is.
    """
    decoder, weights, adapters = models[0], _weights(models), _adapters(models[0])
    device = decoder.kernels.device
    config = config.sized(step_tokens(decoder, stalls_are_bounded=config.bounds_stalls))

    def on_gpu(longest: int, staging: int) -> _Room:
        return _Room(staging, 0, config.kv_cache_memory or memory_budget.UNLIMITED)

    def on_host(longest: int, staging: int) -> _Room:
        # Idle programs, while weights are read.
        swapped = max(0, memory_budget.loadable_bytes() - memory_budget.available_bytes())
        read = 0 if config.packed_weights_cache else weights - adapters  # else mapped, which takes no memory
        return _on_host(config, models, longest, staging, freed + swapped - read)

    if device.type == "cuda":
        check_weights(models, device)
    else:
        memory_budget.check_weights(weights, memory_budget.loadable_bytes() + freed, "memory", adapters)
    limits, used = _sized(config, models, on_gpu if device.type == "cuda" else on_host, freed)
    check_transfers(config, limits, decoder.kernels)
    return limits, used


def check_weights(models: Sequence[DecoderSizes], device: torch.device) -> None:
    """Raises MemoryError if the weights do not fit the free memory of a GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    memory_budget.check_weights(_weights(models), free + torch.cuda.memory_reserved(device), "the GPU's memory",
                         _adapters(models[0]))


def sized(
    config: EngineConfig, decoder: Decoder, draft: Decoder | None = None,
) -> tuple[SchedulerLimits, MemoryUse]:
    """Returns the scheduler's limits and the memory they take; of the runtime only the libraries' buffers.

    Args:
        draft: the draft model, whose layers use the same blocks.

    Raises:
        ConfigError: the settings contradict each other or the model.
        MemoryError: the settings need more memory than there is.
    """
    models = [decoder] if draft is None else [decoder, draft]
    on_device = _on_gpu if decoder.kernels.device.type == "cuda" else _on_host
    return _sized(config, models, lambda longest, staging: on_device(config, models, longest, staging))


def _sized(
    config: EngineConfig, models: Sequence[DecoderSizes], room_for: Callable[[int, int], _Room], freed: int = 0,
) -> tuple[SchedulerLimits, MemoryUse]:
    """As `sized`.

    Args:
        room_for: returns the room with sequences of so many tokens and so many bytes of staging.
        freed: bytes of host memory that will be free in addition to those that are.
    """
    decoder = models[0]
    kernels = decoder.kernels
    if config.kv_offloading_size and kernels.name == "cpu":
        raise ConfigError("kv_offloading_size is for devices with memory of their own: on the CPU the cache is in host "
                          "memory already, so raise kv_cache_memory instead")
    model_tokens = decoder.config.longest
    groups = cache_groups(config, decoder)
    block_size = block_tokens(config, decoder, groups)
    per_block = sum(kernels.cache_bytes_per_block(block_size, shape, model.config.dtype)
                    for model in models[1:] for shape in model.layer_shapes)
    per_block += _block_bytes(decoder, groups, block_size)
    longest = min(config.max_model_len or model_tokens, model_tokens)
    useful = config.max_num_seqs * CacheGroups(groups.windows, block_size, config.step_tokens).most_blocks(longest)
    asked = config.offloading_bytes
    room = room_for(longest, kv_blocks.staging_bytes(asked // per_block, per_block))
    # Of what was asked, blocks that no slot can use keep the prefixes of ended requests.
    is_asked = config.kv_cache_memory is not None or config.gpu_memory_utilization is not None
    is_kept = is_asked and config.enable_prefix_caching and decoder.config.is_causal
    num_blocks = memory_budget.num_blocks(
        per_block, useful, room.budget, is_capped=not is_kept or room.budget == memory_budget.UNLIMITED)
    beside = 0 if kernels.device.type == "cuda" else room.workspace + num_blocks * per_block
    num_host_blocks = memory_budget.num_host_blocks(per_block, asked, beside - freed)
    library = kernels.library_bytes(decoder.config.dtype)
    limits = config.limits(model_tokens, num_blocks, block_size, per_block, num_host_blocks, groups.windows,
                           whole_prompts=not decoder.config.is_causal)
    return limits, MemoryUse(
        _weights(models), room.workspace, (num_blocks + 1) * per_block, num_host_blocks * per_block, library,
        room.graphs)


def cache_groups(config: EngineConfig, decoder: DecoderSizes) -> LayerGroups:
    """Returns the cache groups of the model's layers: with a draft model one, whose blocks hold the layers of both.

    A model that computes whole prompts has one cache, in which each layer overwrites the one before.
    """
    if not decoder.config.is_causal:
        return one_cache(len(decoder.layer_shapes))
    kv_layers = decoder.config.kv_layers
    if config.speculative_config and config.speculative_config.model:
        return one_group(len(decoder.layer_shapes), kv_layers)
    model_tokens = decoder.config.longest
    return layer_groups(decoder.layer_shapes, min(config.max_model_len or model_tokens, model_tokens), kv_layers)


def block_tokens(config: EngineConfig, decoder: DecoderSizes, groups: LayerGroups) -> int:
    """Returns the tokens of a cache block: as asked, or those of the measurements, as many times as a state needs.

    Where all layers have states, blocks may have any size, and the default is that of a model with as wide keys and
    values as its hidden states: a state then costs as much as the tokens that it stands for.

    Raises:
        ConfigError: a block of so many tokens holds no state.
    """
    def num_bytes(tokens: int, shape: LayerShape) -> int:
        return decoder.kernels.cache_bytes_per_block(tokens, shape, decoder.config.dtype)

    shapes = decoder.layer_shapes
    least = least_block_size(groups, shapes, num_bytes)
    if config.block_size and config.block_size < least:
        raise ConfigError(f"block_size {config.block_size}: a block of this model must also hold the recurrent state "
                          f"of a layer, as large as {least} tokens: set at least {least}, or leave it out")
    if all(isinstance(shape, StateShape) for shape in shapes):
        wide = AttentionShape(1, 1, decoder.config.hidden_size, 1.0)
        least = least_block_size(LayerGroups((0, 1), (0, 1), (0, 0)), [wide, shapes[0]], num_bytes)
    return config.block_size or -(-least // BLOCK_SIZE) * BLOCK_SIZE


def _on_host(
    config: EngineConfig, models: Sequence[DecoderSizes], longest: int, staging: int, freed: int = 0,
) -> _Room:
    """Returns the room by the computed size of the largest step plus `staging`; graphs are part of the runtime.

    A draft model's passes and the target's forward pass take their workspace in turn.
    """
    decoder, *drafts = models
    rows, tokens = workspace_rows(config.max_num_seqs) + _most_drafts(config), _largest_step(config, decoder, longest)
    workspace = staging + _ranks(decoder) * max(
        decoder.workspace_bytes(tokens, rows) + _handed_on(decoder, tokens),
        *(draft.workspace_bytes(CATCH_UP + config.max_num_seqs, max(ALL_LOGITS, config.max_num_seqs))
          for draft in drafts), 0)
    others = workspace + decoder.kernels.library_bytes(decoder.config.dtype)
    asked, share = config.kv_cache_memory, config.gpu_memory_utilization
    unread = _adapters(decoder)  # requests load them later
    return _Room(workspace, 0, memory_budget.cache_budget(_weights(models), others, asked, share, freed - unread))


def _largest_step(config: EngineConfig, decoder: DecoderSizes, longest: int) -> int:
    """Returns the most tokens of a step with sequences of up to `longest` tokens."""
    return max(config.largest_step(longest), 0 if decoder.config.is_causal else longest)


def _ranks(decoder: DecoderSizes) -> int:
    """Returns the ranks that take the memory of one device together."""
    return num_ranks(decoder.group) if decoder.kernels.device.type == "cpu" else 1


def _weights(models: Sequence[DecoderSizes]) -> int:
    """Returns the bytes of all ranks' weights in the memory of one device: none of a stage has more than its first."""
    held, decoder = sum(model.weight_bytes for model in models), models[0]
    width, count = decoder.group.size, decoder.group.pipe.stage.total
    if decoder.kernels.device.type == "cuda" or count == 1:
        return _ranks(decoder) * held
    stages = [UnconnectedRank(width, PipelineStage(number, count), splits_experts=decoder.group.splits_experts)
              for number in range(count)]
    return _adapters(decoder) + width * sum(
        weight_bytes(decoder.config, decoder.kernels, decoder.formats, stage) for stage in stages)


def _adapters(decoder: DecoderSizes) -> int:
    """Returns the bytes of as many adapters as fit, of all ranks in the memory of one device."""
    if decoder.adapters is None:
        return 0
    if decoder.kernels.device.type == "cuda":
        return decoder.adapters.bytes
    return decoder.group.size * decoder.adapters.bytes_of_stages


def _block_bytes(decoder: DecoderSizes, groups: LayerGroups, block_size: int) -> int:
    """Returns the bytes of a block of the cache, in the ranks that share a memory, or in the one that has most."""
    count = decoder.group.pipe.stage.total

    def num_bytes(shape: LayerShape) -> int:
        return decoder.kernels.cache_bytes_per_block(block_size, shape, decoder.config.dtype)

    of_stages: list[int] = []
    for number in range(count):
        layers = caches_of(decoder.config, PipelineStage(number, count))
        shapes = cache_shapes(groups, decoder.layer_shapes, layers, num_bytes)
        of_stages.append(sum(map(num_bytes, shapes.values())))
    return max(of_stages) if decoder.kernels.device.type == "cuda" else decoder.group.size * sum(of_stages)


def _handed_on(decoder: DecoderSizes, tokens: int) -> int:
    """Returns the bytes of hidden states between a stage and the next."""
    of_step = tokens * decoder.config.hidden_size * decoder.kernels.wide_kind(decoder.config.dtype).itemsize
    return PLACES * of_step if decoder.group.pipe.stage.total > 1 else 0


def _most_drafts(config: EngineConfig) -> int:
    """Returns the most drafts of a step, each of which has logits."""
    return MAX_STEP_DRAFTS if config.speculative_config and config.speculative_config.method != NONE else 0


def _on_gpu(config: EngineConfig, models: Sequence[Decoder], longest: int, staging: int) -> _Room:
    """Returns the room by the measured size of the largest steps plus `staging`, and that of their graphs."""
    decoder, *drafts = models
    kernels, rows, tokens = decoder.kernels, config.max_num_seqs, _largest_step(config, decoder, longest)
    decoded = max(rows, MAX_TOKENS if _most_drafts(config) and kernels.records_drafts else 0)
    recorded = max(decoded, kernels.graph_size(decoded, longest)[0])
    sampled = min(rows + _most_drafts(config), tokens)
    shapes = [(tokens, sampled, longest), (recorded, recorded, longest)]
    block_size = config.block_size or BLOCK_SIZE
    is_divided = decoder.group.pipe.stage.total > 1  # then no stage can run a step by itself
    workspace = staging + (sum(decoder.workspace_bytes(*shape[:2]) for shape in shapes) if is_divided
                           else measured_workspace(decoder, draw_for(kernels), block_size, shapes))
    for draft in drafts:
        shapes = [(CATCH_UP + rows, max(ALL_LOGITS, rows), longest), (recorded, recorded, longest)]
        workspace += measured_workspace(draft, draw_for(kernels), block_size, shapes)
    free, total = torch.cuda.mem_get_info(kernels.device)
    number = num_graphs(kernels, rows, longest, drafts=_most_drafts(config) > 0, adapters=config.enable_lora)
    graphs = 0 if is_divided else number * sum(
        measured_graph(model, block_size, recorded, longest) for model in models)
    asked, share = config.kv_cache_memory, config.gpu_memory_utilization
    return _Room(workspace, graphs, memory_budget.gpu_cache_budget(free, total, workspace + graphs, asked, share))


def check_transfers(config: EngineConfig, limits: SchedulerLimits, kernels: Kernels) -> None:
    """Raises ConfigError where the blocks of this model cannot travel, or be stored on disk."""
    for name in ("kv_transfer_config", "kv_disk"):
        if getattr(config, name) is None:
            continue
        if kernels.device.type != "cpu":
            raise ConfigError(f"{name} needs device cpu, not {kernels.device.type}")
        if any(limits.windows):
            raise ConfigError(f"{name} is not supported with windowed attention or recurrent states: leave it out")
        if limits.whole_prompts:
            raise ConfigError(f"{name} is not supported with a model that computes whole prompts: leave it out")
