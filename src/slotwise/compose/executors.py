"""Builds the executor of a rank, with its own caches, slots and sampler: of the one process of a model, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from slotwise.core.limits import SchedulerLimits
from slotwise.core.step import StepPlan
from slotwise.engine.executor import Executor
from slotwise.kernels.cpu.memory import LARGE
from slotwise.kernels.interface import LayerCache, LayerShape
from slotwise.kernels.select import draw_for, launcher_of, mask_for
from slotwise.model.decoder import Decoder, Returned
from slotwise.model.layer_groups import LayerGroups, cache_shapes
from slotwise.runner.draft_model_runner import DraftModelRunner, DraftPositions
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.kv_blocks import HostBlocks
from slotwise.runner.model_runner import FirstStageRunner, ModelRunner, StageRunner
from slotwise.runner.prefault import Prefault
from slotwise.runner.sampling.cpu import Sampler
from slotwise.runner.sampling.gpu import DeviceSampler
from slotwise.runner.sampling.grammar_masks import Masks
from slotwise.runner.sampling.sampler import Sampling, SilentSampler


class Caches(NamedTuple):
    """The caches of a rank."""

    every: list[LayerCache]  # each once
    by_layer: list[LayerCache]  # of the layers that the rank holds


class Built(NamedTuple):
    """An executor, and the slots that learn what it sampled from the rank that samples; None: it learns by itself."""

    executor: Executor
    slots: SlotTable | None
    pieces: Sequence[Tensor] = ()  # of all caches, as `[blocks, ...]`


def leading(
    decoder: Decoder, draft: Decoder | None, limits: SchedulerLimits, groups: LayerGroups, masks: Masks,
    announce: Callable[[StepPlan], None] = lambda plan: None,
) -> Built:
    """The executor of the rank that samples; the caches of `draft` lie in the same blocks.

    Args:
        announce: receives the plans with drafts that the executor has proposed, before it computes them.
    """
    kernels, vocab_size = decoder.kernels, decoder.config.vocab_size
    caches, slots = _caches(decoder, limits, groups), _slots(decoder, limits, groups)
    draft_caches = [] if draft is None else _allocated(draft, limits, draft.layer_shapes)
    is_divided = decoder.group.pipe.stage.total > 1
    known = _slots(decoder, limits, groups) if is_divided else slots  # of what is sampled
    sampler: Sampling = (
        Sampler(limits.max_num_seqs, vocab_size, launcher_of(kernels), masks) if kernels.name == "cpu"
        else DeviceSampler(known, vocab_size, draw_for(kernels), kernels.device, masks, mask_for(kernels)))
    pieces: list[Tensor] = []
    draft_model = None if draft is None else DraftModelRunner(
        draft, draft_caches, slots, sampler, vocab_size,
        DraftPositions(slots, limits.num_blocks, limits.num_host_blocks), announce)
    if is_divided:
        runner: Executor = FirstStageRunner(
            StageRunner(decoder, caches.by_layer, slots),
            ModelRunner(Returned(decoder), [], known, sampler, masks=masks), draft_model)
    else:
        pieces = [piece for cache in (*caches.every, *draft_caches) for piece in kernels.cache_pieces(cache)]
        runner = ModelRunner(
            decoder, caches.by_layer, slots, sampler, HostBlocks(limits.num_host_blocks, pieces), masks, draft_model)
    if kernels.name == "cpu":
        shape = decoder.layer_shapes[0]
        per_block = kernels.cache_bytes_per_block(limits.block_size, shape, decoder.config.dtype)
        distance = max(2 * limits.max_num_seqs, 2 * LARGE // per_block)
        runner = Prefault(runner, [*caches.every, *draft_caches], limits.num_blocks, distance)
    return Built(runner, slots if is_divided else None, pieces)


def following(
    decoder: Decoder, limits: SchedulerLimits, groups: LayerGroups,
) -> tuple[SlotTable, Executor | StageRunner]:
    """The slots and the runner of a rank that samples nothing."""
    caches, slots, stage = _caches(decoder, limits, groups), _slots(decoder, limits, groups), decoder.group.pipe.stage
    if stage.total == 1:
        return slots, ModelRunner(decoder, caches.by_layer, slots, SilentSampler())
    runner = StageRunner(decoder, caches.by_layer, slots)
    if not stage.is_first:
        return slots, runner
    returned = ModelRunner(Returned(decoder), [], _slots(decoder, limits, groups), SilentSampler())
    return slots, FirstStageRunner(runner, returned)


def _slots(decoder: Decoder, limits: SchedulerLimits, groups: LayerGroups) -> SlotTable:
    """Known tokens and block tables; the block behind the scheduler's is the null block."""
    return SlotTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.num_blocks,
                     decoder.kernels.device, groups.of_layers)


def _caches(decoder: Decoder, limits: SchedulerLimits, groups: LayerGroups) -> Caches:
    own = groups.caches[decoder.layers.start : decoder.layers.stop]

    def num_bytes(shape: LayerShape) -> int:
        return decoder.kernels.cache_bytes_per_block(limits.block_size, shape, decoder.config.dtype)

    shapes = cache_shapes(groups, decoder.layer_shapes, decoder.layers, num_bytes)
    made = dict(zip(shapes, _allocated(decoder, limits, [*shapes.values()]), strict=True))
    return Caches(list(made.values()), [made[number] for number in own])


def _allocated(decoder: Decoder, limits: SchedulerLimits, shapes: Sequence[LayerShape]) -> list[LayerCache]:
    return [decoder.kernels.allocate_cache(limits.num_blocks + 1, limits.block_size, shape, decoder.config.dtype)
            for shape in shapes]
