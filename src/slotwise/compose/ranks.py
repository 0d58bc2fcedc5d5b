"""The ranks of a model that several processes of this host compute: rank 0 starts, drives and watches the others.

    rank 0    scheduler ─► plan n, tokens of n - 1 ─► its share ─┐
    rank 1                 └──────── socket ────────► its share ─┴─ sums, by `kernels.group`

A rank that ends, or gives no heartbeat for `SILENCE`, ends all: waiting for it is given up, the other ranks are killed,
and every later step fails.  The engine process then ends, and its supervisor starts all ranks again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from slotwise import child, spawn
from slotwise.compose.rank_messages import Allocate, Failed, Join, Known, Measure, Run, decode_report, encode
from slotwise.core.limits import SchedulerLimits
from slotwise.core.step import StepPlan, StepResult
from slotwise.engine.config import EngineConfig
from slotwise.engine.executor import Executor
from slotwise.engine.ipc import BlockingChannel, ChannelClosed, pair
from slotwise.errors import OneLineError
from slotwise.kernels.cpu.openmp import places
from slotwise.kernels.cpu.shared_group import CHUNK, SharedGroup, SharedMemory, shared_file, size_of
from slotwise.kernels.group import Group, TorchGroup
from slotwise.kernels.interface import Kernels
from slotwise.kernels.select import launcher_of

LOOK = 0.2  # seconds between two looks at the other ranks
SILENCE = 6.0  # seconds without a heartbeat after which a rank counts as lost
BEAT = 0.5  # seconds between two heartbeats
HOST = "127.0.0.1"
LOGIT = 4  # bytes


class RankLostError(OneLineError, RuntimeError):
    """A rank has ended or is frozen; the model is lost to this process."""


class _Rank:
    """The process of another rank.

    Args:
        gpu: the only one that it sees; "" on a CPU.
    """

    def __init__(self, number: int, threads: int, memory: int, gpu: str) -> None:
        self.number = number
        ours, theirs = pair()
        self.channel = BlockingChannel(ours)
        where = places()[number * threads : (number + 1) * threads]
        environment = child.environment() | {"OMP_NUM_THREADS": str(threads)}
        environment.pop("OMP_PLACES", None)
        if len(where) == threads:
            environment["OMP_PLACES"] = ",".join("{" + ",".join(map(str, sorted(place))) + "}" for place in where)
        else:
            environment["OMP_PROC_BIND"] = "false"
        if gpu:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with theirs, _everywhere():
            self.process: subprocess.Popen[bytes] = spawn.start(
                child.python("slotwise.compose.rank_worker", str(theirs.fileno())), env=environment,
                pass_fds=[theirs.fileno(), memory], stdin=subprocess.DEVNULL)
        self.beats, self.heard = -1, time.monotonic()


class Ranks:
    """Rank 0's hold on the others.

    Args:
        config: of the engine.
        vocab_size: tokens, whose logits are exchanged.
        on_lost: called once, by a thread of its own, with the reason.
    """

    def __init__(self, config: EngineConfig, kernels: Kernels, vocab_size: int,
                 on_lost: Callable[[str], None] = lambda why: None) -> None:
        size = config.tensor_parallel_size
        self.lost = ""
        self._on_lost = on_lost
        self._losing = threading.Lock()
        self._looked = 0.0  # monotonic seconds
        self._measures = kernels.name != "cpu"
        descriptor = shared_file(size_of(size, max(CHUNK, LOGIT * -(-vocab_size // size))))
        self._memory = SharedMemory(descriptor, size)
        store = None if kernels.name == "cpu" else store_of(0, size)
        gpus = visible_gpus(size) if kernels.device.type == "cuda" else [""] * size
        self._others = [
            _Rank(number, torch.get_num_threads(), descriptor, gpus[number]) for number in range(1, size)]
        for rank in self._others:
            rank.channel.send(encode(Join(
                replace(config, model=os.path.abspath(config.model) if os.path.exists(config.model) else config.model),
                rank.number, descriptor, store.port if store else 0)))
        os.close(descriptor)
        self.group = group_of(kernels, self._memory, 0, store)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Those of the other ranks."""
        return [rank.process for rank in self._others]

    def wait(self) -> None:
        """Waits until all ranks have read their weights, and watches them from here on.

        Raises:
            RankLostError: one could not.
        """
        for rank in self._others:
            try:
                while not (messages := rank.channel.receive(None)):
                    pass
            except ChannelClosed:
                raise RankLostError(f"rank {rank.number} ended while it was loading") from None
            report = decode_report(messages[0])
            if isinstance(report, Failed):
                raise RankLostError(f"rank {rank.number}: {report.message}")
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="ranks", daemon=True).start()

    def measure(self, config: EngineConfig) -> None:
        """Has all ranks run the largest steps, where a device measures what they take, as this rank does next."""
        if self._measures:
            self._send(encode(Measure(config)))

    def allocate(self, limits: SchedulerLimits) -> None:
        """Has all ranks make their caches."""
        self._send(encode(Allocate(limits)))

    def run(self, plan: StepPlan, known: list[Known]) -> None:
        """Has all ranks compute their shares of a plan."""
        self._send(encode(Run(plan._replace(preempted=(), refused=(), stop=None), known)))

    def leading(self, runner: Executor) -> Executor:
        """Returns the executor that runs plans on all ranks: `runner` on this one."""
        return LeadingExecutor(runner, self)

    def lose(self, why: str) -> None:
        """Give up: wait for no rank any more, and kill them."""
        with self._losing:
            if self.lost:
                return
            self.lost = why
        self._memory.end()
        for rank in self._others:
            rank.process.kill()
        self._on_lost(why)

    def _send(self, message: bytes) -> None:
        try:
            for rank in self._others:
                rank.channel.send(message)
        except ChannelClosed:
            self.lose(f"rank {rank.number} of {len(self._others) + 1} has closed its channel")
        if self.lost:
            raise RankLostError(self.lost)

    def look(self) -> None:
        """Gives up if a rank has ended or is frozen; called every `LOOK` seconds."""
        now, size = time.monotonic(), len(self._others) + 1
        was_paused, self._looked = now - self._looked > 2 * LOOK, now
        for rank in self._others:
            beats = self._memory.beats(rank.number)
            if beats != rank.beats or was_paused:  # this process was not there to count
                rank.beats, rank.heard = beats, now
            if (status := rank.process.poll()) is not None:
                self.lose(f"rank {rank.number} of {size} ended with status {status}")
            elif now - rank.heard > SILENCE:
                self.lose(f"rank {rank.number} of {size} has been frozen for {SILENCE:g} s")


def _watch(found: weakref.ref[Ranks]) -> None:
    """Looks at the ranks until they are lost, or their engine is dropped: then their channels close, and they end."""
    while (ranks := found()) is not None and not ranks.lost:
        ranks.look()
        del ranks
        time.sleep(LOOK)


class LeadingExecutor:
    """Runs plans on all ranks: `runner` on this one."""

    def __init__(self, runner: Executor, ranks: Ranks) -> None:
        self.ranks = ranks
        self._runner = runner
        self._plan: StepPlan | None = None
        self._known: list[Known] = []

    def submit(self, plan: StepPlan) -> None:
        """Raises RankLostError once a rank is lost."""
        self.ranks.run(plan, self._known)
        self._plan = plan
        self._runner.submit(plan)

    def collect(self) -> StepResult:
        assert self._plan is not None
        try:
            result = self._runner.collect()
        except Exception as error:  # the ranks may have stopped at different places
            self.ranks.lose(f"a step failed on rank 0: {type(error).__name__}: {error}")
            raise
        if self.ranks.lost:
            raise RankLostError(self.ranks.lost)
        plan = self._plan
        drafts = plan.drafts or ((),) * plan.num_rows
        self._known = [
            Known(slot, start + count - len(drafted), tokens) for slot, start, count, drafted, tokens
            in zip(plan.slots, plan.starts, plan.counts, drafts, result.tokens, strict=True) if tokens]
        return result


def visible_gpus(ranks: int) -> list[str]:
    """The GPUs of so many ranks, by the names that CUDA_VISIBLE_DEVICES has for them: the first ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:ranks] if visible else [str(number) for number in range(ranks)]


def store_of(port: int, size: int) -> Any:
    """The store of torch.distributed through which ranks find each other: this process' own where the port is 0."""
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        HOST, port, size, is_master=not port, wait_for_workers=False)


def group_of(kernels: Kernels, memory: SharedMemory, rank: int, store: Any) -> Group:
    """This process' view of the ranks; `store` is None where they exchange through `memory`."""
    if store is None:
        return SharedGroup(launcher_of(kernels), memory, rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if kernels.device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=memory.ranks)
    return TorchGroup()


@contextlib.contextmanager
def _everywhere() -> Iterator[None]:
    """A process started here may use all of OpenMP's places: the calling thread is bound to the first."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset()
    if bound := places():
        os.sched_setaffinity(0, frozenset().union(*bound))
    try:
        yield
    finally:
        if bound:
            os.sched_setaffinity(0, before)
