"""A rank other than 0: its share of the model, and the caches of its heads."""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.compose.engine import Loaded, load
from slotwise.compose.rank_messages import Join, Known
from slotwise.compose.ranks import group_of, store_of
from slotwise.compose.sizes import cache_groups, sized
from slotwise.core.limits import SchedulerLimits
from slotwise.core.step import StepPlan
from slotwise.engine.config import EngineConfig
from slotwise.engine.executor import Executor
from slotwise.kernels.cpu.shared_group import SharedMemory
from slotwise.kernels.group import Group
from slotwise.kernels.interface import Kernels
from slotwise.model.cache_groups import LayerGroups
from slotwise.model.decoder import Decoder
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.kv_offload import HostBlocks
from slotwise.runner.model_runner import ModelRunner
from slotwise.runner.silent_sampler import SilentSampler


class Follower:
    """Loads the rank's weights.

    Raises:
        Exception: as `compose.engine.load` does.
    """

    def __init__(self, join: Join, memory: SharedMemory) -> None:
        def group(kernels: Kernels) -> Group:
            return group_of(kernels, memory, join.rank, store_of(join.port, memory.ranks) if join.port else None)

        self._config = join.config
        self._loaded: Loaded = load(join.config, joining=group)

    def measure(self, config: EngineConfig) -> None:
        """Runs the steps by which rank 0 sizes an engine, and with it exchanges what they sum.

        Raises:
            MemoryError: the settings need more memory than this rank's device has.
        """
        sized(config, self._loaded.ready())

    def allocate(self, limits: SchedulerLimits) -> None:
        """Makes caches and slots, in place of those before."""
        decoder = self._loaded.ready()
        self._slots, self._runner = _executor(decoder, limits, cache_groups(self._config, decoder, None))

    def run(self, plan: StepPlan, known: Sequence[Known]) -> None:
        """Computes this rank's share of a plan, after `known` tokens of the steps before.

        Raises:
            Exception: the step failed.
        """
        for one in known:
            self._slots.learn(one.slot, one.start, one.tokens)
        self._runner.submit(plan)
        self._runner.collect()


def _executor(decoder: Decoder, limits: SchedulerLimits, groups: LayerGroups) -> tuple[SlotTable, Executor]:
    """The slots and the executor of a rank that samples nothing, with its own caches."""
    kernels, null_block = decoder.kernels, limits.num_blocks
    caches = [kernels.allocate_cache(null_block + 1, limits.block_size, shape, decoder.config.dtype)
              for shape in decoder.attention_shapes[: groups.num_caches]]
    slots = SlotTable(
        limits.max_num_seqs, limits.max_model_len, limits.block_size, null_block, kernels.device, groups.of_layers)
    pieces = [piece for cache in caches for piece in kernels.cache_pieces(cache)]
    layers = [caches[cache] for cache in groups.caches]
    return slots, ModelRunner(decoder, layers, slots, SilentSampler(), HostBlocks(0, pieces))
