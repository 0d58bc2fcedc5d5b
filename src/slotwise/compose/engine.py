"""Builds an engine: the one place where scheduler, runner, model and kernels meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from slotwise.compose.step_times import recalled
from slotwise.core.limits import SchedulerLimits
from slotwise.core.scheduler import Scheduler
from slotwise.engine.config import EngineConfig
from slotwise.engine.loop import Engine
from slotwise.engine.messages import EngineInfo, MemoryUse
from slotwise.kernels.base import Kernels
from slotwise.kernels.select import choose
from slotwise.model.config import ModelConfig
from slotwise.model.decoder import Decoder
from slotwise.model.load import describe, load_model
from slotwise.model.locate import locate
from slotwise.runner import memory
from slotwise.runner.batch import SlotTable
from slotwise.runner.runner import Runner
from slotwise.runner.sampler import Sampler

Progress = Callable[[str, int, int], None]
"""Told `(stage, done, total)` while an engine is being built."""


def silent(stage: str, done: int, total: int) -> None:
    """The progress of someone who does not want to hear of it."""


STEP_SECONDS = 0.1
STEP_SIZES = (512, 256, 128)  # tokens; fewer would read the weights too often for what they compute
BLOCK_SIZE = 64  # tokens; what the figures in benchmarks/results/kernels-cpu.md were measured with


class Loaded:
    """A model in memory, from which engines are made: one, or one after another to compare them."""

    def __init__(self, name: str, device: str, decoder: Decoder, warming: threading.Thread) -> None:
        """`warming` has all kernels ready when it ends."""
        self._name = name
        self._device = device
        self._decoder = decoder
        self._warming = warming

    @property
    def model_config(self) -> ModelConfig:
        """The model's description."""
        return self._decoder.config

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that every step reads, as they are held."""
        return self._decoder.step_weight_bytes

    def engine(self, config: EngineConfig, progress: Progress = silent) -> tuple[Engine, EngineInfo]:
        """An engine with a cache of its own; of `config`, the model, the device and the type are taken as loaded.

        Raises:
            ConfigError: the settings contradict each other or the model.
        """
        decoder = self._decoder
        config = config.sized(_step_tokens(decoder))
        limits, used = _size(config, decoder)
        null_block = limits.num_blocks  # one more than the scheduler knows of
        caches = [
            decoder.kernels.allocate_cache(limits.num_blocks + 1, limits.block_size, shape, decoder.config.dtype)
            for shape in decoder.attention_shapes]
        sampler = Sampler(limits.max_num_seqs, decoder.config.vocab_size)
        progress("kernels", 0, 1)
        self._warming.join()
        progress("kernels", 1, 1)
        slots = SlotTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, null_block)
        scheduling = config.scheduling()
        eos_ids = decoder.config.eos_token_ids
        info = EngineInfo(
            model=self._name, device=self._device, dtype=str(decoder.config.dtype).removeprefix("torch."),
            vocab_size=decoder.config.vocab_size, limits=limits, scheduling=scheduling, eos_token_ids=eos_ids,
            memory=used, depth=config.overlap, quantization=config.quantization)
        times = recalled(config, info)
        scheduler = Scheduler(limits, scheduling.discipline(), scheduling.policy(times), times)
        engine = Engine(
            scheduler, Runner(decoder, caches, slots, sampler), time.monotonic_ns, eos_ids, depth=config.overlap,
            scheduling=scheduling)
        info.learned = times.learned() if times.knows else None
        return engine, info


def load(config: EngineConfig, progress: Progress = silent, wrap: Callable[[Kernels], Kernels] = lambda k: k) -> Loaded:
    """Read the model's weights and pack them for the device, whose kernels may be wrapped in others.

    Raises:
        CheckpointError: something is wrong with the model's files.
    """
    device = "cpu" if config.device == "auto" else config.device
    kernels = wrap(choose(device, config.quantization))
    kind = describe(locate(config.model), config.dtype).dtype
    warming = threading.Thread(target=_warm_up, args=(kernels, kind), daemon=True)
    warming.start()  # reading kernels is work for the interpreter, packing weights is none
    decoder = load_model(
        config.model, kernels=kernels, dtype=config.dtype, max_positions=config.max_model_len,
        progress=lambda done, total: progress("weights", done, total))
    return Loaded(config.model, device, decoder, warming)


def _warm_up(kernels: Kernels, kind: torch.dtype) -> None:
    kernels.warm_up(kind)
    Sampler.warm_up(kind)


def build_engine(config: EngineConfig, progress: Progress = silent) -> tuple[Engine, EngineInfo]:
    """Load the model, size the cache and put the engine together.

    Raises:
        CheckpointError: something is wrong with the model's files.
        ConfigError: the settings contradict each other or the model.
    """
    return load(config, progress).engine(config, progress)


def _step_tokens(decoder: Decoder) -> int:
    """Tokens that a step has room for if it is to take `STEP_SECONDS`: streams wait for it to end."""
    rate = decoder.kernels.operations_per_second(decoder.config.dtype)
    tokens = STEP_SECONDS * rate / (2 * decoder.config.layer_weights)
    return next(size for size in STEP_SIZES if size <= tokens or size == STEP_SIZES[-1])


def _size(config: EngineConfig, decoder: Decoder) -> tuple[SchedulerLimits, MemoryUse]:
    """The scheduler's limits, from the model, the memory and what was asked."""
    block_size = config.block_size or BLOCK_SIZE
    model_tokens = decoder.config.max_position_embeddings
    per_block = sum(
        decoder.kernels.cache_bytes_per_block(block_size, shape, decoder.config.dtype)
        for shape in decoder.attention_shapes)
    longest = min(config.max_model_len or model_tokens, model_tokens)
    useful = config.max_num_seqs * -(-longest // block_size)
    weights = decoder.weight_bytes
    workspace = decoder.workspace_bytes(config.largest_step(longest), config.max_num_seqs)
    budget = memory.cache_budget(weights, workspace, config.kv_cache_memory, config.gpu_memory_utilization)
    limits = config.limits(model_tokens, memory.num_blocks(per_block, useful, budget), block_size)
    return limits, MemoryUse(weights, workspace, (limits.num_blocks + 1) * per_block)
