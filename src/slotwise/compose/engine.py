"""Builds an engine from scheduler, runner, model and kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from slotwise.compose.choices import check_model, chosen, divided, other_ranks
from slotwise.compose.draft_model import DraftCheckpoint
from slotwise.compose.executors import leading
from slotwise.compose.kv_transfer import linked
from slotwise.compose.machine import glance, measure_machine, roofline
from slotwise.compose.packed_weights import packed_weights
from slotwise.compose.sizes import cache_groups, check_sizes, check_weights, sized, step_tokens
from slotwise.compose.vocabulary import Vocabulary
from slotwise.core.limits import SchedulerLimits
from slotwise.core.scheduler import Scheduler
from slotwise.core.step_time import Machine, Roofline
from slotwise.engine.adapters import AdapterStore
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import EngineInfo, MemoryUse
from slotwise.engine.warmup import check_steps, warmup
from slotwise.kernels.cpu.jit import workers
from slotwise.kernels.cpu.threads import roam
from slotwise.kernels.group import Group, num_ranks
from slotwise.kernels.interface import Kernels
from slotwise.kernels.select import launcher_of
from slotwise.model.checkpoint import fingerprint, locate
from slotwise.model.decoder import Decoder, DecoderSizes
from slotwise.model.generation_config import named_file
from slotwise.model.loading import UnreadModel, describe
from slotwise.model.lora_weights import LoraWeights
from slotwise.model.model_config import ModelConfig
from slotwise.observe.step_time import load_or_learn
from slotwise.runner import memory_budget
from slotwise.runner.expert_counts import ExpertCounts
from slotwise.runner.prefault import Prefault, SleepingMemory
from slotwise.runner.sampling.grammar_masks import Grammars, Masks
from slotwise.speculation.proposer import proposer_of
from slotwise.speculation.settings import NONE, Speculation

if TYPE_CHECKING:
    from slotwise.compose.ranks import Ranks

Progress = Callable[[str, int, int], None]
"""Called with `(stage, done, total)` while an engine is built."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignores progress."""


class Warming:
    """Warms up the kernels on a thread of its own while weights are read."""

    def __init__(self, kernels: Kernels, kind: torch.dtype) -> None:
        self._kernels = kernels
        self._kind = kind
        self._error: BaseException | None = None
        # No daemon: a process whose loading failed would tear libraries down while this compiles, and be aborted.
        self._thread = threading.Thread(target=self._run, name="warming")
        self._thread.start()

    def _run(self) -> None:
        try:
            roam()
            self._kernels.warm_up(self._kind)
        except BaseException as error:
            self._error = error
        finally:
            workers.dismiss()  # workers that were not needed

    def finish(self) -> None:
        """Waits until all kernels are ready, those of formats that the weights brought included.

        Raises the error of one that failed to compile.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._kernels.warm_up(self._kind)


class Loaded:
    """A model in memory, from which one engine or several in turn (for comparisons) are built."""

    def __init__(self, name: str, device: str, decoder: Decoder, warming: Warming, *, checkpoint: str = "",
                 identity: str = "", vocabulary: Vocabulary | None = None, draft: Decoder | None = None,
                 ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._name = name
        self._checkpoint = checkpoint
        self._identity = identity
        self._device = device
        self._decoder = decoder
        self._warming = warming
        self._vocabulary = vocabulary
        self._draft = draft

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration."""
        return self._decoder.config

    @property
    def own_adapters(self) -> LoraWeights | None:
        """This rank's parts of the adapters of requests; None where there are none."""
        return self._decoder.adapters

    @property
    def adapters(self) -> AdapterStore | None:
        """The adapters of requests, on all ranks; None where there are none."""
        if self._ranks is None or self.own_adapters is None:
            return self.own_adapters
        from slotwise.compose.rank_adapters import RankAdapters  # needs msgspec

        return RankAdapters(self.own_adapters, self._ranks)

    @property
    def product_path(self) -> str:
        """The name of the path that multiplies with its weights."""
        return self._decoder.kernels.product_path(self._decoder.config.dtype)

    def measure_machine(self) -> Machine:
        """Returns the rates of this machine that its steps can reach."""
        return measure_machine(self._decoder)

    def roofline(self, machine: Machine) -> Roofline:
        """Returns lower bounds of the costs of its steps on `machine`."""
        return roofline(self._decoder, machine)

    def engine(self, config: EngineConfig, progress: Progress = silent) -> tuple[Engine, EngineInfo]:
        """Returns an engine with its own cache; model, device and dtype of `config` are those already loaded.

        Raises:
            ConfigError: the settings contradict each other or the model.
            Exception: a kernel failed to compile.
            FirstStepError: the engine cannot compute.
        """
        decoder, kernels = self._decoder, self._decoder.kernels
        config = config.sized(step_tokens(decoder, stalls_are_bounded=config.bounds_stalls))
        if self._ranks is not None:
            self._ranks.wait()
            self._ranks.measure(config)
        limits, used = sized(config, decoder, self._draft)
        progress("kernels", 0, 1)
        self._warming.finish()
        progress("kernels", 1, 1)
        used = self._with_runtime(used)
        is_ahead = kernels.device.type == "cuda" and self._ranks is None
        depth = max(int(is_ahead), limits.stages - 1) if config.overlap is None else config.overlap
        info = self._info(config, limits, used, depth)
        scheduling = info.scheduling
        grammars = Grammars(self._vocabulary.result() if self._vocabulary is not None else None)
        drafts = info.speculation is not None and info.speculation.method != NONE
        groups = cache_groups(config, decoder)
        masks = Masks(grammars, decoder.config.vocab_size, forces=drafts)
        announce = (lambda plan: None) if self._ranks is None else self._ranks.run
        runner, slots, pieces = leading(decoder, self._draft, limits, groups, masks, announce)
        lent = SleepingMemory(runner, launcher_of(kernels).mapped) if (
            isinstance(runner, Prefault) and self._ranks is None and config.kv_transfer_config is None) else None
        info.gives_back = lent is not None
        if self._ranks is not None:
            _warm_up(decoder)
            self._ranks.allocate(limits)
            from slotwise.compose.leading_executor import LeadingExecutor  # needs msgspec

            runner = LeadingExecutor(runner, self._ranks, slots)
        check_steps(runner, limits, time.monotonic_ns)
        times = load_or_learn(config, info, lambda: warmup(
            runner, limits, time.monotonic_ns, drafts=info.speculation is not None))
        scheduler = Scheduler(limits, scheduling.discipline(), scheduling.policy(times), times,
                              proposer_of(info.speculation, times))
        engine = Engine(scheduler, runner, time.monotonic_ns, info.eos_token_ids, depth=depth, scheduling=scheduling,
                        grammars=grammars, experts=ExpertCounts(ends) if (ends := decoder.expert_ends) else None,
                        memory=lent, adapters=self.adapters,
                        kv_link=linked(config.kv_transfer_config, runner, pieces, limits, self._identity))
        info.learned = times.learned() if times.is_trained else None
        info.roofline = self.roofline(glance(decoder))
        return engine, info

    def _info(self, config: EngineConfig, limits: SchedulerLimits, used: MemoryUse, depth: int) -> EngineInfo:
        """Returns what the engine tells of itself before it has run a step."""
        decoder = self._decoder
        return EngineInfo(
            model=self._name, device=self._device, dtype=str(decoder.config.dtype).removeprefix("torch."),
            vocab_size=decoder.config.vocab_size, limits=limits, scheduling=config.scheduling(),
            eos_token_ids=decoder.config.eos_token_ids,
            memory=used, depth=depth, quantization=self._stored_as(config), kv_cache_dtype=config.kv_cache_dtype,
            threads=torch.get_num_threads(), product_path=self.product_path,
            batch_invariant=not decoder.kernels.batch_dependence(decoder.config.dtype), checkpoint=self._checkpoint,
            hidden_size=decoder.config.hidden_size, has_head=decoder.config.has_head,
            tensor_parallel_size=decoder.group.size, pipeline_parallel_size=limits.stages,
            speculation=self._speculation(config), expert_layers=tuple(decoder.expert_ends),
            max_adapters=config.max_cpu_loras if config.enable_lora else 0,
            kv_transfer=config.kv_transfer_config and config.kv_transfer_config.told())

    def ready(self) -> Decoder:
        """Returns the model when its kernels are ready, for a rank that samples nothing."""
        self._warming.finish()
        _warm_up(self._decoder)
        return self._decoder

    def _stored_as(self, config: EngineConfig) -> str:
        """What is told of the types of weights: the checkpoint's quantisation, or the one applied to it."""
        stored = self._decoder.config.quantization
        return config.quantization if stored is None else stored.description

    def _speculation(self, config: EngineConfig) -> Speculation | None:
        """Returns the settings of drafts with what depends on the model."""
        is_exact = not self._decoder.kernels.batch_dependence(self._decoder.config.dtype)
        return config.speculative_config and config.speculative_config.resolved(is_exact=is_exact)

    def _with_runtime(self, used: MemoryUse) -> MemoryUse:
        """Returns `used` with the runtime's bytes, measured when kernels are ready and before the cache exists."""
        memory_budget.give_back()
        decoder = self._decoder
        ranks = num_ranks(decoder.group)
        unread = decoder.adapters.bytes if decoder.adapters is not None else 0  # none of them is loaded yet
        held = decoder.weight_bytes + (0 if self._draft is None else self._draft.weight_bytes)
        weights = 0 if decoder.kernels.device.type == "cuda" else held - unread
        runtime = used.runtime + ranks * (max(0, memory_budget.resident_bytes() - weights) + memory_budget.STEPS_LEAVE)
        return MemoryUse(used.weights, used.workspace, used.cache, used.host, runtime, used.graphs)


class _CheckedModel(NamedTuple):
    """A model's files and those of its draft model, checked for the settings of an engine."""

    folder: Path
    described: ModelConfig
    unread: UnreadModel
    draft: UnreadModel | None

    @property
    def sizes(self) -> list[DecoderSizes]:
        return [one.sizes for one in (self.unread, self.draft) if one is not None]


def check_loadable(config: EngineConfig, freed: int) -> None:
    """Raises what `load` and `Loaded.engine` would raise, as far as it can be known before weights are read.

    Args:
        freed: bytes of host memory that will be free beside those that are.
    """
    _, kernels = chosen(config, lambda plain: plain)
    found = _found(config, locate(config.model), kernels, DraftCheckpoint.of(config), divided(config))
    check_sizes(config, found.sizes, freed)


def _found(
    config: EngineConfig, folder: Path, kernels: Kernels, draft_model: DraftCheckpoint | None, group: Group,
) -> _CheckedModel:
    """Reads configs and headers.

    Raises:
        CheckpointError: the files are invalid.
        ConfigError: the settings do not suit the model.
    """
    described = describe(folder, config.dtype, kernels, named_file(config.generation_config))
    check_model(config, folder, described, kernels)
    if draft_model is not None:
        draft_model.check(folder, described, kernels)
    return _CheckedModel(folder, described, _unread(config, folder, described, kernels, group),
                  None if draft_model is None else draft_model.unread(described, kernels))


def _unread(
    config: EngineConfig, folder: Path, described: ModelConfig, kernels: Kernels, group: Group,
) -> UnreadModel:
    """Raises CheckpointError: the files are invalid."""
    adapters = (config.max_cpu_loras, config.max_lora_rank) if config.enable_lora else None
    return UnreadModel(folder, described, config.dtype, kernels, group, adapters)


def load(
    config: EngineConfig, progress: Progress = silent, wrap: Callable[[Kernels], Kernels] = lambda k: k,
    joining: Callable[[Kernels], Group] | None = None, on_lost: Callable[[str], None] = lambda why: None,
) -> Loaded:
    """Reads the model's weights and packs them for the device; `wrap` may wrap its kernels.

    With several ranks, rank 0 starts the others, and `on_lost` receives why one of them was lost; these are given what
    makes them one of the group, `joining`.

    With SLOTWISE_DEBUG=1 in the environment the kernels check all their arguments.

    Raises:
        CheckpointError: the model's files are invalid.
        ConfigError: the device is missing, or does not support the settings.
        MemoryError: the weights do not fit the memory of the device.
    """
    if joining is None:
        torch.set_num_threads(max(1, torch.get_num_threads() // config.num_ranks))
    device, kernels = chosen(config, wrap)
    folder = locate(config.model)
    checkpoint = fingerprint(folder)  # first: what changes meanwhile is seen by the next engine
    identity = fingerprint(folder, is_timed=False) if config.kv_transfer_config is not None else ""
    draft_model = DraftCheckpoint.of(config) if joining is None else None  # rank 0 alone proposes
    if draft_model is not None:
        checkpoint += fingerprint(draft_model.folder)
    group = divided(config) if joining is None else joining(kernels)
    found = _found(config, folder, kernels, draft_model, group)
    described, unread, ranks = found.described, found.unread, None
    if joining is None:
        check_sizes(config, found.sizes)
        ranks = other_ranks(config, kernels, described, on_lost)
    elif kernels.device.type == "cuda":  # on a CPU, rank 0 has checked the weights of all
        check_weights([unread.sizes], kernels.device)
    if ranks is not None:
        unread = _unread(config, folder, described, kernels, ranks.group)
    packing = 1 if workers.are_waiting() else torch.get_num_threads()  # all other threads compile
    warming = Warming(kernels, described.dtype)  # loading kernels holds the GIL, packing weights does not
    vocabulary = Vocabulary(folder, described) if joining is None else None
    read = partial(progress, "weights")
    with _threads(packing):
        with packed_weights(config, kernels, folder):
            decoder = unread.read(config.max_model_len, read)
        draft = None if found.draft is None else found.draft.read(config.max_model_len, read)
    return Loaded(config.model, device, decoder, warming, checkpoint=checkpoint, identity=identity,
                  vocabulary=vocabulary, draft=draft, ranks=ranks)


def _warm_up(decoder: Decoder) -> None:
    """Compile what ranks exchange with."""
    for one in (decoder.group, decoder.group.pipe):
        one.warm_up(decoder.config.dtype)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Sets the number of torch's operator threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_engine(
    config: EngineConfig, progress: Progress = silent, on_lost: Callable[[str], None] = lambda why: None,
) -> tuple[Engine, EngineInfo]:
    """Loads the model, sizes the cache and builds the engine.

    Raises:
        CheckpointError: the model's files are invalid.
        ConfigError: the settings contradict each other or the model.
        FirstStepError: the engine cannot compute.
    """
    return load(config, progress, on_lost=on_lost).engine(config, progress)
