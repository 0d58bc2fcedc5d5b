"""A rank other than 0: its share of the model, and the caches of its heads and layers."""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.compose.engine_builder import Loaded, following, load
from slotwise.compose.rank_messages import Join, Known
from slotwise.compose.ranks import Rank, RankMemory, group_of, store_of
from slotwise.compose.sizes import cache_groups, sized
from slotwise.core.limits import SchedulerLimits
from slotwise.core.step import StepPlan
from slotwise.engine.config import EngineConfig
from slotwise.kernels.group import Group
from slotwise.kernels.interface import Kernels
from slotwise.model.lora_weights import LoraWeights
from slotwise.runner.model_runner import FirstStageRunner, StageRunner


class Follower:
    """Loads the rank's weights.

    Raises:
        Exception: as `compose.engine_builder.load` does.
    """

    def __init__(self, join: Join, rank: Rank, memory: RankMemory) -> None:
        def group(kernels: Kernels) -> Group:
            return group_of(kernels, rank, memory, store_of(join.store, rank.size) if join.store >= 0 else None)

        self._config = join.config
        self._loaded: Loaded = load(join.config, joining=group)

    @property
    def adapters(self) -> LoraWeights | None:
        """Its parts of adapters; None where requests have none."""
        return self._loaded.own_adapters

    def measure(self, config: EngineConfig) -> None:
        """Runs the steps by which rank 0 sizes an engine, and with it exchanges what they sum.

        Raises:
            MemoryError: the settings need more memory than this rank's device has.
        """
        sized(config, self._loaded.ready())

    def allocate(self, limits: SchedulerLimits) -> None:
        """Makes caches and slots, in place of those before."""
        decoder = self._loaded.ready()
        self._slots, self._runner = following(decoder, limits, cache_groups(self._config, decoder))

    def run(self, plan: StepPlan, known: Sequence[Known]) -> None:
        """Computes this rank's share of a plan, after `known` tokens of the steps before.

        Raises:
            Exception: the step failed.
        """
        for one in known:
            self._slots.learn(one.slot, one.start, one.tokens)
        if isinstance(self._runner, StageRunner):
            self._runner.run(plan)
            return
        self._runner.submit(plan)
        if not isinstance(self._runner, FirstStageRunner):
            self._runner.collect()

    def collect(self) -> None:
        """Computes the end of the oldest plan.

        Raises:
            Exception: the step failed.
        """
        assert isinstance(self._runner, FirstStageRunner)
        self._runner.collect()
