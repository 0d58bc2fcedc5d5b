"""The process of a rank other than 0: `python -m slotwise.compose.rank_process FD`, started by `compose.ranks` alone.

It computes its share of the plans that rank 0 sends, and ends when rank 0 does.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

from slotwise.compose.adapter_loading import AdapterLoading
from slotwise.compose.default_sizes import cache_groups, sized
from slotwise.compose.engine_builder import Loaded, following, load
from slotwise.compose.engine_process import end
from slotwise.compose.launch import hold_off, settle
from slotwise.compose.rank_messages import (
    Allocate,
    Collect,
    Failed,
    Join,
    Known,
    Measure,
    RankLoaded,
    RunShare,
    decode_order,
    encode,
)
from slotwise.compose.ranks import Rank, RankMemory, group_of, store_of
from slotwise.compute.kernels.group import Group
from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.lazy_imports import spare_torch
from slotwise.compute.model.lora_weights import LoraWeights
from slotwise.compute.runner.model_runner import FirstStageRunner, StageRunner
from slotwise.core.record import StepPlan
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.config import EngineConfig
from slotwise.engine.ipc import BlockingChannel, ChannelClosed
from slotwise.engine.messages import LoadAdapter, UnloadAdapter
from slotwise.errors import one_line
from slotwise.platform import spawn

# A rank other than 0: its share of the model, and the caches of its heads and layers.

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
        self._loaded.center(limits)
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


def main(descriptor: int) -> int:
    spawn.end_with_parent()
    hold_off()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return obey(BlockingChannel(socket.socket(fileno=descriptor)))


def obey(channel: BlockingChannel) -> int:
    """Computes what rank 0 orders until it closes the channel; returns the status of the process."""
    ended = threading.Event()
    try:
        _serve(channel, ended)
    except ChannelClosed:
        return 0
    except Exception as error:
        with contextlib.suppress(ChannelClosed):
            channel.send(encode(Failed(one_line(f"{type(error).__name__}: {error}"))))
        return 1
    finally:
        ended.set()
    return 0


def _serve(channel: BlockingChannel, ended: threading.Event) -> None:
    """Loads, then obeys rank 0 until it closes the channel; heartbeats stop when it has `ended`."""
    while not (messages := channel.receive(None)):
        pass
    join = decode_order(messages[0])
    assert isinstance(join, Join)
    spare_torch()
    from slotwise.compose.rank_process import Follower
    from slotwise.compose.ranks import BEAT, Rank, RankMemory

    rank = Rank.of(join.rank, join.config)
    memory = RankMemory(join.memory, join.boxes, rank)

    def beat() -> None:
        while not ended.wait(BEAT):
            memory.stage.beat(rank.within)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    follower = Follower(join, rank, memory)
    loading = AdapterLoading(follower.adapters, lambda loaded: channel.send(encode(loaded)))
    settle()
    channel.send(encode(RankLoaded()))
    while True:
        for message in channel.receive(None):
            order = decode_order(message)
            if isinstance(order, Measure):
                follower.measure(order.config)
            elif isinstance(order, Allocate):
                follower.allocate(order.limits)
            elif isinstance(order, RunShare):
                began = time.monotonic_ns()
                follower.run(order.plan, order.known)
                memory.boxes.note(rank.number, order.plan.step, max(began, memory.boxes.arrived(rank.number)),
                                  time.monotonic_ns())
            elif isinstance(order, Collect):
                follower.collect()
            elif isinstance(order, LoadAdapter):
                loading.load(order)
            elif isinstance(order, UnloadAdapter):
                assert follower.adapters is not None
                follower.adapters.unload(order.number)


if __name__ == "__main__":
    end(partial(main, int(sys.argv[1])))
