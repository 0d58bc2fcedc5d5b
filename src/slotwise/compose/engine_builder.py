"""Builds an engine from its settings: kernels, model, draft model, caches, executor and scheduler.

A checkpoint's tokens for grammars are read on a thread of their own while the weights are read.  The compiler's
constructor holds the interpreter's lock, half a second for 150,000 tokens, so it runs before the first request and not
with the first grammar.  The tokenizer itself is read first: meanwhile the process has no stderr
(`text.tokenizer.no_panic_messages`), and no other thread's message may be lost.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import slotwise
from slotwise import grammar_compiler
from slotwise.compose.default_sizes import cache_groups, check_sizes, check_weights, sized, step_tokens
from slotwise.compose.machine import glance, measure_machine, roofline
from slotwise.compute.kernels.checked import CheckedKernels
from slotwise.compute.kernels.cpu.jit import workers
from slotwise.compute.kernels.cpu.memory import LARGE
from slotwise.compute.kernels.cpu.threads import roam
from slotwise.compute.kernels.group import SINGLE_RANK, Group, PipelineStage, UnconnectedRank, num_ranks
from slotwise.compute.kernels.interface import Kernels, LayerCache, LayerShape
from slotwise.compute.kernels.select import choose, draw_for, launcher_of, mask_for, packing_of, resolve
from slotwise.compute.model.calibration import center, needed_bytes, read_calibrated
from slotwise.compute.model.checkpoint import content_digest, fingerprint, locate
from slotwise.compute.model.decoder import Decoder, DecoderSizes, HeadStage
from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.generation_config import named_file
from slotwise.compute.model.layer_groups import LayerGroups, cache_shapes
from slotwise.compute.model.layers.rope import LongRope
from slotwise.compute.model.loading import UnreadModel, describe
from slotwise.compute.model.lora_weights import LoraWeights
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.model_registry import find
from slotwise.compute.model.network import caches_of
from slotwise.compute.runner import memory_budget
from slotwise.compute.runner.draft_model_runner import DraftModelRunner, DraftPositions
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.kv_blocks import HostBlocks, HostCacheBlocks
from slotwise.compute.runner.model_runner import FirstStageRunner, ModelRunner, StageRunner
from slotwise.compute.runner.prefault import Prefault, SleepingMemory
from slotwise.compute.runner.sampling.cpu_sampler import Sampler
from slotwise.compute.runner.sampling.gpu_sampler import DeviceSampler
from slotwise.compute.runner.sampling.grammar_masks import Grammars, Masks
from slotwise.compute.runner.sampling.sampler import Sampling, SilentSampler
from slotwise.compute.runner.slots import LoraSlots, SlotListener
from slotwise.compute.runner.staging import DeviceExpertCounts
from slotwise.core.record import StepPlan
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.speculation.proposer import proposer_of
from slotwise.core.speculation.speculation_settings import NONE, PREDICTION, Speculation
from slotwise.core.step_time import Machine, Roofline
from slotwise.core.transfer.connectors import connector_of
from slotwise.core.transfer.kv_transfer_config import KVTransferConfig
from slotwise.core.transfer.receiver import Receiver
from slotwise.core.transfer.sender import Sender
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.executor import AdapterStore, Executor
from slotwise.engine.kv_disk import DiskLink, DiskStore
from slotwise.engine.kv_link import KVLink, TransferLink
from slotwise.engine.messages import EngineInfo, MemoryUse
from slotwise.engine.warmup import check_steps, warmup
from slotwise.errors import CheckpointError, described
from slotwise.observe.step_time_store import load_or_learn
from slotwise.text.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer, TokenizerError

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
        raise ConfigError(f"quantization {config.quantization} is for full weights: those of {folder} are quantized "
                          f"already ({described.quantization.description}); leave the option out")
    if config.packed_weights_cache and kernels.name != "cpu":
        raise ConfigError(f"packed_weights_cache needs device cpu, not {kernels.name}: only there weights are repacked")
    if config.packed_weights_cache and described.quantization is None and config.quantization == "none":
        raise ConfigError(f"packed_weights_cache is for quantized weights: those of {folder} are plain; leave it out, "
                          "or choose a quantization")
    if config.batch_invariant and (why := kernels.batch_dependence(described.dtype)):
        raise ConfigError(f"batch_invariant cannot be kept: {why}")
    if not described.is_causal:
        drafts = config.speculative_config is not None and config.speculative_config.method not in (NONE, PREDICTION)
        for name, is_set in (("pipeline_parallel_size", config.pipeline_parallel_size > 1),
                             ("speculative_config", drafts),
                             ("kv_transfer_config", config.kv_transfer_config is not None)):
            if is_set:
                raise ConfigError(f"{name} is not supported with a model whose tokens attend to later ones, which "
                                  "computes whole prompts and generates nothing: leave it out")
    if described.recurrent is None:
        return
    if config.pipeline_parallel_size > 1 and (described.doubled_layers or config.speculative_config is not None):
        why = "layers with a recurrent state next to attention are" if described.doubled_layers else (
            "drafts in a model with a recurrent state are")
        raise ConfigError(f"pipeline_parallel_size {config.pipeline_parallel_size}: {why} not divided into stages: "
                          "serve this model with 1")
    if config.speculative_config is not None and config.speculative_config.model is not None:
        raise ConfigError("speculative_config: a draft model is not supported with a model with recurrent states: "
                          "choose method suffix, ngram or prediction")


def divided(config: EngineConfig) -> Group:
    """What rank 0 holds of the model, and exchanges with no other: to know sizes before the others start."""
    if config.num_ranks == 1:
        return SINGLE_RANK
    return UnconnectedRank(config.tensor_parallel_size, PipelineStage(0, config.pipeline_parallel_size),
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
        stage = PipelineStage(number, config.pipeline_parallel_size)
        tensor_shapes(described, UnconnectedRank(
            config.tensor_parallel_size, stage, splits_experts=config.enable_expert_parallel))
    return Ranks(config, kernels, described, on_lost)


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
    listeners = _adapters_of(decoder, slots)
    if draft is not None:
        listeners.append(DraftModelRunner(
            draft, draft_caches, slots, sampler, vocab_size,
            DraftPositions(slots, limits.num_blocks, limits.num_host_blocks), announce))
    if is_divided:
        runner: Executor = FirstStageRunner(
            StageRunner(decoder, caches.by_layer, slots, listeners),
            ModelRunner(HeadStage(decoder), [], known, sampler, [masks]))
    else:
        pieces = [piece for cache in (*caches.every, *draft_caches) for piece in kernels.cache_pieces(cache)]
        listeners += [HostBlocks(limits.num_host_blocks, pieces), masks]
        runner = ModelRunner(decoder, caches.by_layer, slots, sampler, listeners)
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
        return slots, ModelRunner(decoder, caches.by_layer, slots, SilentSampler(), _adapters_of(decoder, slots))
    runner = StageRunner(decoder, caches.by_layer, slots, _adapters_of(decoder, slots))
    if not stage.is_first:
        return slots, runner
    head = ModelRunner(HeadStage(decoder), [], _slots(decoder, limits, groups), SilentSampler())
    return slots, FirstStageRunner(runner, head)


def _adapters_of(decoder: Decoder, slots: SlotTable) -> list[SlotListener]:
    """What follows the adapters of requests, where there are any."""
    return [LoraSlots(decoder.adapters, slots.num_slots)] if decoder.adapters is not None else []


def _slots(decoder: Decoder, limits: SchedulerLimits, groups: LayerGroups) -> SlotTable:
    """Known tokens and block tables; the block behind the scheduler's is the null block."""
    return SlotTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.num_blocks,
                     decoder.kernels.device, groups.of_layers)


def _caches(decoder: Decoder, limits: SchedulerLimits, groups: LayerGroups) -> Caches:
    held = caches_of(decoder.config, decoder.group.pipe.stage)
    own = groups.caches[held.start : held.stop]

    def num_bytes(shape: LayerShape) -> int:
        return decoder.kernels.cache_bytes_per_block(limits.block_size, shape, decoder.config.dtype)

    shapes = cache_shapes(groups, decoder.layer_shapes, held, num_bytes)
    made = dict(zip(shapes, _allocated(decoder, limits, [*shapes.values()]), strict=True))
    return Caches(list(made.values()), [made[number] for number in own])


def _allocated(decoder: Decoder, limits: SchedulerLimits, shapes: Sequence[LayerShape]) -> list[LayerCache]:
    return [decoder.kernels.allocate_cache(limits.num_blocks + 1, limits.block_size, shape, decoder.config.dtype)
            for shape in shapes]


TOKENIZER = "tokenizer.json"


class DraftCheckpoint:
    """The draft model that the settings of an engine name.

    Raises:
        CheckpointError: it cannot be found.
    """

    def __init__(self, path: str) -> None:
        try:
            self.folder = find(path).path
        except CheckpointError as error:
            raise CheckpointError(f"speculative_config: model: {error}") from error

    @classmethod
    def of(cls, config: EngineConfig) -> DraftCheckpoint | None:
        """The draft model of `config`; None: it has none."""
        speculation = config.speculative_config
        return None if speculation is None or speculation.model is None else cls(speculation.model)

    def check(self, folder: Path, model: ModelConfig, kernels: Kernels) -> None:
        """Checks that it can propose tokens of the model in `folder`.

        Raises:
            CheckpointError: it cannot be loaded.
            ConfigError: its tokens are others.
        """
        if self.describe(model, kernels).recurrent is not None:
            raise ConfigError(f"speculative_config: the draft model in {self.folder} has recurrent states, which is "
                              "not supported")
        why = _difference(folder, self.folder)
        if why is None:
            own = self.describe(model, kernels).vocab_size
            why = f"{own:,} tokens and not {model.vocab_size:,}" if own != model.vocab_size else ""
        if why:
            raise ConfigError(f"speculative_config: the draft model in {self.folder} has another vocabulary than the "
                              f"model in {folder}: {why}")

    def describe(self, model: ModelConfig, kernels: Kernels) -> ModelConfig:
        """Its config, in the type in which the model is computed."""
        return describe(self.folder, _dtype_of(model), kernels)

    def unread(self, model: ModelConfig, kernels: Kernels) -> UnreadModel:
        """Its files, checked.  Raises CheckpointError."""
        unread = UnreadModel(self.folder, self.describe(model, kernels), _dtype_of(model), kernels)
        if not unread.config.has_head:
            raise CheckpointError(f"{self.folder} has no head, so it cannot draft")
        return unread


def _dtype_of(model: ModelConfig) -> str:
    return str(model.dtype).removeprefix("torch.")


def _difference(folder: Path, other: Path) -> str | None:
    """How the tokens in `other` differ from those in `folder`; "" if they do not, None if one has no tokenizer."""
    paths = folder / TOKENIZER, other / TOKENIZER
    try:
        if _are_equal(*paths):
            return ""
        ours, theirs = (Tokenizer.load(path.parent).inner.get_vocab(with_added_tokens=True) for path in paths)
    except (OSError, TokenizerError):
        return None
    if len(ours) != len(theirs):
        return f"{len(theirs):,} tokens and not {len(ours):,}"
    token = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    if token is None:
        return ""
    place = f"is token {theirs[token]}" if token in theirs else "is none of its tokens"
    return f"{token!r:.40} {place}, and token {ours[token]} of the model"


def _are_equal(one: Path, other: Path) -> bool:
    """Whether two files have the same content.  Raises OSError where one cannot be read."""
    sizes = one.stat().st_size, other.stat().st_size
    return sizes[0] == sizes[1] <= MAX_TOKENIZER_BYTES and one.read_bytes() == other.read_bytes()


def linked(
    transfer: KVTransferConfig | None, runner: Executor, pieces: Sequence[Tensor], limits: SchedulerLimits,
    identity: str,
) -> TransferLink | None:
    """Returns the link of an engine, which listens if it sends prompts; None: it has none.

    Args:
        runner: its executor.
        pieces: its caches, as `[blocks, ...]`.
        identity: of its model.

    Raises:
        ConfigError: its address cannot be had.
    """
    if transfer is None:
        return None
    blocks = HostCacheBlocks(pieces, f"{limits.block_size} tokens of model {identity}")
    try:
        connector = connector_of(transfer, blocks.block_bytes)
        sender = None if not transfer.is_producer else Sender(
            blocks, connector.listen(transfer.kv_ip, transfer.kv_port), transfer.timeout, roam)
    except OSError as error:
        raise ConfigError(f"kv_transfer_config: {transfer.kv_ip}:{transfer.kv_port}: {described(error)}") from error
    receiver = Receiver(blocks, connector, transfer.timeout, roam) if transfer.is_consumer else None
    if transfer.is_consumer and isinstance(runner, Prefault):
        runner.touch_all()  # a prompt that arrives is written faster than one that is computed
    return TransferLink(sender, receiver, limits.block_size)


def stored(
    config: EngineConfig, decoder: Decoder, pieces: Sequence[Tensor], scheduler: Scheduler, content: str,
) -> DiskLink:
    """Returns the link to the prefix cache's blocks on disk.

    Args:
        pieces: the caches, as `[blocks, ...]`.
        content: digest of the checkpoint's files.

    Raises:
        ConfigError: the folder cannot be used.
    """
    is_long = any(isinstance(rope, LongRope) for rope in decoder.config.ropes)  # its factors depend on max_model_len
    blocks = HostCacheBlocks(pieces, f"{scheduler.limits.block_size} tokens of model {content}")
    identity = repr((
        _code_digest(COMPUTE), blocks.layout, config.quantization, decoder.kernels.name, platform.machine(),
        torch.backends.cpu.get_cpu_capability(), decoder.kernels.product_path(decoder.config.dtype),
        scheduler.limits.max_model_len if is_long else 0))
    try:
        store = DiskStore(Path(config.kv_disk or ""), blocks.block_bytes, int(config.kv_disk_size * 2**30),
                          config.kv_disk_max_age)
    except OSError as error:
        raise ConfigError(f"kv_disk {config.kv_disk}: {described(error)}") from error
    adapters = decoder.adapters
    return DiskLink(store, blocks, scheduler, identity, roam, adapters.digest if adapters is not None else lambda _: "")


CODE = ("compute/kernels/cpu/products/block_layout.py", "compute/kernels/cpu/products/packing.py",
        "compute/kernels/cpu/products/quantize.py", "compute/kernels/matrix.py", "compute/model/**/*.py")
"""What determines which panels a checkpoint becomes."""
COMPUTE = ("compute/**/*.py",)
"""What determines the keys and values of tokens."""
CALIBRATED_CACHE = 4.0
"""GiB of disk for weights that were calibrated, unless an option says otherwise."""


def read_weights(
    config: EngineConfig, unread: UnreadModel, kernels: Kernels, folder: Path, progress: Progress,
) -> tuple[Decoder, bool]:
    """Reads and packs the weights of the model, or takes their panels from disk, where an option keeps them.

    Weights that are rounded to few bits are calibrated, unless that takes more memory than there is; their panels are
    kept, because that takes seconds.  Returns whether they could be, too: else the same checkpoint has other weights.
    """
    from slotwise.compute.kernels.cpu.products import packed_file

    def read() -> Decoder:
        return unread.read(config.max_model_len, partial(progress, "weights"))

    asked = config.packed_weights_cache
    is_calibrated = kernels.name == "cpu" and config.num_ranks == 1 and packing_of(kernels).compensates
    most = CALIBRATED_CACHE if asked is None and is_calibrated else asked or 0.0
    key = _packed_key(config, folder) if most else ""
    if is_calibrated and not (key and packed_file.is_kept(key)) and (why := _calibration_obstacle(unread, kernels)):
        logger.warning("quantization %s of %s: weights are rounded without calibration, which loses more, because %s",
                       config.quantization, folder, why)
        return read(), False
    with packed_file.kept(launcher_of(kernels), key, int(most * 2**30), copies=asked is None) if key else (
            nullcontext(enter_result=False)) as are_kept:
        if not is_calibrated or are_kept:
            return read(), True
        return read_calibrated(packing_of(kernels), read, partial(progress, "calibration")), True


def _calibration_obstacle(unread: UnreadModel, kernels: Kernels) -> str:
    """Why a model cannot be calibrated; empty where it can."""
    with packing_of(kernels).recording():
        needed = needed_bytes(unread.sizes)
    free = memory_budget.loadable_bytes()
    return "" if needed <= free else (
        f"that takes {memory_budget.gib(needed)} of memory and {memory_budget.gib(free)} are free")


def _packed_key(config: EngineConfig, checkpoint: Path) -> str:
    of_config = config.quantization, config.dtype, config.enable_lora
    return hashlib.sha256(f"{content_digest(checkpoint)} {_code_digest(CODE)} {of_config}".encode()).hexdigest()


def _code_digest(patterns: Sequence[str]) -> str:
    digest, root = hashlib.sha256(), Path(slotwise.__file__).parent
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


logger = logging.getLogger(__name__)


class Vocabulary:
    """The tokens of the checkpoint in `folder`, being read."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._vocabulary: Any = None
        self._thread: threading.Thread | None = None
        self._config = config
        try:
            tokenizer = Tokenizer.load(folder)
        except Exception as error:  # a server has refused such a folder; an engine alone needs no tokenizer
            logger.debug("no grammars: %s", error)
            return
        self._thread = threading.Thread(target=self._read, args=(tokenizer,), name="vocabulary")
        self._thread.start()

    def result(self) -> Any:
        """What grammars are compiled for (`grammar_compiler.tokenizer_of`); None: this model's tokenizer has none."""
        if self._thread is not None:
            self._thread.join()
        return self._vocabulary

    def _read(self, tokenizer: Tokenizer) -> None:
        roam()
        try:
            if tokenizer.bytes_by_id is not None and self._config.eos_token_ids:
                self._vocabulary = grammar_compiler.tokenizer_of(
                    [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
                    sorted(tokenizer.special_ids), self._config.eos_token_ids, self._config.vocab_size,
                    lambda text: tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # an engine runs without grammars
            logger.debug("no grammars: %s", error)


Progress = Callable[[str, int, int], None]
"""Called with `(stage, done, total)` while an engine is built."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignores progress."""


REFRESH = 0.2  # seconds between two reports of kernels that are being compiled


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

    def finish(self, progress: Progress = silent) -> None:
        """Waits until all kernels are ready, those of formats that the weights brought included.

        Raises the error of one that failed to compile.
        """
        while self._thread.is_alive():
            progress("kernels", workers.compilation.done, workers.compilation.total)
            self._thread.join(REFRESH)
        if self._error is not None:
            raise self._error
        self._kernels.warm_up(self._kind)
        progress("kernels", workers.compilation.done, workers.compilation.total)


class Loaded:
    """A model in memory, from which one engine or several in turn (for comparisons) are built."""

    def __init__(self, name: str, device: str, decoder: Decoder, warming: Warming, *, checkpoint: str = "",
                 identity: str = "", content: Callable[[], str] = lambda: "", vocabulary: Vocabulary | None = None,
                 draft: Decoder | None = None, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._name = name
        self._checkpoint = checkpoint
        self._identity = identity
        self._content = content
        self._device = device
        self._decoder = decoder
        self._warming = warming
        self._vocabulary = vocabulary
        self._draft = draft
        self._is_centered = False

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
        from slotwise.compose.ranks import RankAdapters  # needs msgspec

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
        self._warming.finish(progress)
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
        self.center(limits)
        if self._ranks is not None:
            from slotwise.compose.ranks import LeadingExecutor  # needs msgspec

            runner = LeadingExecutor(runner, self._ranks, slots)
        check_steps(runner, limits, time.monotonic_ns)
        times = load_or_learn(config, info, lambda: warmup(
            runner, limits, time.monotonic_ns, drafts=info.speculation is not None))
        scheduler = Scheduler(limits, scheduling.discipline(), scheduling.policy(times), times,
                              proposer_of(info.speculation, times))
        link: KVLink | None = linked(config.kv_transfer_config, runner, pieces, limits, self._identity)
        disk = stored(config, decoder, pieces, scheduler, self._content()) if config.kv_disk is not None else None
        engine = Engine(scheduler, runner, time.monotonic_ns, info.eos_token_ids, depth=depth, scheduling=scheduling,
                        grammars=grammars, experts=DeviceExpertCounts(ends) if (ends := decoder.expert_ends) else None,
                        memory=lent, adapters=self.adapters, kv_link=link or disk)
        if disk is not None:
            weakref.finalize(engine, disk.close).atexit = False  # its threads refer to the cache
        info.learned = times.learned() if times.is_trained else None
        info.roofline = self.roofline(glance(decoder, self._stored_as(config)))
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
            hidden_size=decoder.config.vector_size, has_head=decoder.config.has_head,
            num_labels=decoder.config.num_labels, pooling_type=decoder.config.pooling,
            tensor_parallel_size=decoder.group.size, pipeline_parallel_size=limits.stages,
            speculation=self._speculation(config), expert_layers=tuple(decoder.expert_ends),
            max_adapters=config.max_cpu_loras if config.enable_lora else 0,
            kv_transfer=config.kv_transfer_config and config.kv_transfer_config.told(),
            has_disk=config.kv_disk is not None)

    def ready(self) -> Decoder:
        """Returns the model when its kernels are ready, for a rank that samples nothing."""
        self._warming.finish()
        _warm_up(self._decoder)
        return self._decoder

    def center(self, limits: SchedulerLimits) -> None:
        """Centers the inputs of products where they are rounded (`calibration.center`): once, on all ranks."""
        if self._is_centered or self._decoder.kernels.name != "cpu":
            return
        self._is_centered = True
        for decoder in (self._decoder, self._draft):
            if decoder is not None:
                center(decoder, packing_of(decoder.kernels), limits.max_model_len)

    def _stored_as(self, config: EngineConfig) -> str:
        """What is told of the types of weights: the checkpoint's quantization, or the one applied to it."""
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
        freed: bytes of host memory that will be free in addition to those that are.
    """
    expected(config, freed)


class Expected(NamedTuple):
    """What an engine would be made of, as far as it can be known before weights are read."""

    device: str
    model: DecoderSizes
    limits: SchedulerLimits
    used: MemoryUse


def expected(config: EngineConfig, freed: int = 0) -> Expected:
    """Returns what an engine with these settings would be made of.  Raises and takes arguments as `check_loadable`."""
    device, kernels = chosen(config, lambda plain: plain)
    found = _found(config, locate(config.model), kernels, DraftCheckpoint.of(config), divided(config))
    models = found.sizes
    return Expected(device, models[0], *check_sizes(config, models, freed))


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
    content = _digested(folder) if config.kv_disk is not None else (lambda: "")
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
    with _threads(packing):
        decoder, is_whole = read_weights(config, unread, kernels, folder, progress)
        draft = None if found.draft is None else found.draft.read(config.max_model_len, partial(progress, "weights"))
    return Loaded(config.model, device, decoder, warming, checkpoint=checkpoint, identity=identity,
                  content=content if is_whole else (lambda: f"{content()} uncalibrated"), vocabulary=vocabulary,
                  draft=draft, ranks=ranks)


def _digested(folder: Path) -> Callable[[], str]:
    """Starts to digest a checkpoint's files on a thread; returns a function that waits for the digest."""
    pool = ThreadPoolExecutor(1, "digest")
    digest = pool.submit(content_digest, folder)
    pool.shutdown(wait=False)
    return digest.result


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
