"""The ranks of a model that several processes of this host compute: rank 0 starts, drives and watches the others.

    rank 0    scheduler ─► plan n, tokens of n - 1 ─► its share ─┐
    rank 1                 └──────── socket ────────► its share ─┴─ sums, by `kernels.group`, or
                                                                   hidden states in turn, by `kernels.pipe`

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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch

from slotwise import child, spawn
from slotwise.compose.rank_groups import Rank, RankFiles, RankMemory, group_of, store_file, store_of
from slotwise.compose.rank_messages import (
    Allocate,
    Collect,
    Failed,
    Join,
    Known,
    Measure,
    RankReport,
    Run,
    decode_report,
    encode,
)
from slotwise.core.limits import SchedulerLimits
from slotwise.core.step import RankSpan, StepPlan
from slotwise.engine.config import EngineConfig
from slotwise.engine.ipc import BlockingChannel, ChannelClosed, pair
from slotwise.engine.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from slotwise.errors import OneLineError
from slotwise.kernels.cpu.shared_group import SharedMemory
from slotwise.kernels.cpu.threads import places
from slotwise.kernels.interface import Kernels
from slotwise.model.model_config import ModelConfig

LOOK = 0.2  # seconds between two looks at the other ranks
SILENCE = 6.0  # seconds without a heartbeat after which a rank counts as lost
LOADING_SILENCE = 120.0  # the same while it loads: imports and kernels may hold up its heartbeats
BEAT = 0.5  # seconds between two heartbeats


class RankLostError(OneLineError, RuntimeError):
    """A rank has ended or is frozen; the model is lost to this process."""


class _Rank:
    """The process of another rank.

    Args:
        gpu: the only one that it sees; "" on a CPU.
        store: descriptor of torch.distributed's store; -1: not needed.
    """

    def __init__(self, rank: Rank, threads: int, files: RankFiles, gpu: str, store: int) -> None:
        self.rank, self.number = rank, rank.number
        number, of_stage = rank.number, files.of_stages[rank.stage.number]
        self.memory = SharedMemory(of_stage, rank.width)
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
        shared = [theirs.fileno(), of_stage, files.boxes, *([] if store < 0 else [store])]
        with theirs, _everywhere():
            self.process: subprocess.Popen[bytes] = spawn.start(
                child.python("slotwise.compose.rank_worker", str(theirs.fileno())), env=environment,
                pass_fds=shared, stdin=subprocess.DEVNULL)
        self.beats, self.heard = -1, time.monotonic()

    def report(self, silence: float = float("inf")) -> RankReport:
        """What it tells next; waits for it, but kills it after `silence` seconds without a heartbeat.

        Raises:
            RankLostError: it has ended, failed or frozen, or is not understood.
        """
        beats, silent = -1, 0  # looks without a heartbeat: a clock would count pauses of this process
        try:
            while not (messages := self.channel.receive(LOOK)):
                found = self.memory.beats(self.rank.within)
                beats, silent = found, silent + 1 if found == beats else 0
                if silent * LOOK > silence:
                    self.process.kill()
                    raise RankLostError(f"rank {self.number} has been frozen for {silence:g} s while it was loading")
        except ChannelClosed:
            raise RankLostError(f"rank {self.number} has ended") from None
        try:
            report: RankReport = decode_report(messages[0])
        except ValueError as error:  # msgspec's are
            raise RankLostError(f"rank {self.number} sent what cannot be read ({error})") from error
        if isinstance(report, Failed):
            raise RankLostError(f"rank {self.number}: {report.message}")
        return report


class Ranks:
    """Rank 0's hold on the others.

    Args:
        config: of the engine.
        described: the model's config.
        on_lost: called once, by a thread of its own, with the reason.
    """

    def __init__(self, config: EngineConfig, kernels: Kernels, described: ModelConfig,
                 on_lost: Callable[[str], None] = lambda why: None) -> None:
        first = Rank.of(0, config)
        self.lost = ""
        self._on_lost = on_lost
        self._losing = threading.Lock()
        self._looked = 0.0  # monotonic seconds
        self._known: list[Known] = []  # tokens sampled since the last plan
        self._measures = kernels.name != "cpu" and first.stages == 1
        files = RankFiles.made(config, described)
        self._memory = RankMemory(files.of_stages[0], files.boxes, first)
        store = -1 if kernels.name == "cpu" else store_file()
        if store >= 0:
            os.ftruncate(store, 0)  # what the ranks of an earlier engine have left
        gpus = visible_gpus(first.size) if kernels.device.type == "cuda" else [""] * first.size
        self._others = [_Rank(first._replace(number=number), torch.get_num_threads(), files, gpus[number], store)
                        for number in range(1, first.size)]
        for other in self._others:
            other.channel.send(encode(Join(
                replace(config, model=os.path.abspath(config.model) if os.path.exists(config.model) else config.model),
                other.number, files.of_stages[other.rank.stage.number], files.boxes, store)))
        files.close()
        self.group = group_of(kernels, first, self._memory, None if store < 0 else store_of(store, first.size))
        if store >= 0:  # the next engine of this process makes a process group of its own
            weakref.finalize(self, torch.distributed.destroy_process_group).atexit = False

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
            rank.report(LOADING_SILENCE)
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="ranks", daemon=True).start()

    def measure(self, config: EngineConfig) -> None:
        """Has all ranks run the largest steps, where a device measures what they take, as this rank does next."""
        if self._measures:
            self._send(encode(Measure(config)))

    def allocate(self, limits: SchedulerLimits) -> None:
        """Has all ranks make their caches."""
        self._send(encode(Allocate(limits)))

    def learn(self, known: list[Known]) -> None:
        """Tokens that were sampled: the next plan takes them to all ranks."""
        self._known += known

    def run(self, plan: StepPlan) -> None:
        """Has all ranks compute their shares of a plan."""
        self._send(encode(Run(plan._replace(preempted=(), refused=(), stop=None), self._known)))
        self._known = []

    def collect(self) -> None:
        """Has the other ranks of the first stage compute the end of the oldest plan, where it is one of several."""
        if self.group.pipe.stage.total > 1:
            self._send(encode(Collect()), [rank for rank in self._others if rank.rank.stage.is_first])

    def load_adapter(self, command: LoadAdapter) -> None:
        """Has all ranks load an adapter beside their steps; `adapter_loads` tells what became of it."""
        self._send(encode(command))

    def adapter_loads(self) -> dict[int, str]:
        """Why a rank could not load the adapter, by number, "" where it could; waits for all ranks.

        Raises:
            RankLostError: one was lost meanwhile.
        """
        found: dict[int, str] = {}
        for rank in self._others:
            report = rank.report()
            assert isinstance(report, AdapterLoaded)
            found[rank.number] = report.objection
        return found

    def unload_adapter(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Has all ranks, or those of these numbers, forget an adapter, when the plans sent before are done."""
        told = self._others if ranks is None else [rank for rank in self._others if rank.number in ranks]
        self._send(encode(UnloadAdapter(number)), told)

    def check(self) -> None:
        """Raises RankLostError once a rank is lost."""
        if self.lost:
            raise RankLostError(self.lost)

    def spans(self, step: int) -> list[RankSpan]:
        """When the other ranks worked on a step, as far as they have told."""
        found = [(rank.number, self._memory.boxes.span(rank.number, step)) for rank in self._others]
        return [RankSpan(number, *span) for number, span in found if span is not None]

    @property
    def returned_at(self) -> int:
        """When the last stage's message arrived, in monotonic nanoseconds; 0 where ranks exchange otherwise."""
        return self._memory.boxes.arrived(0)

    def lose(self, why: str) -> None:
        """Give up: wait for no rank any more, and kill them."""
        with self._losing:
            if self.lost:
                return
            self.lost = why
        self._memory.boxes.end()
        for rank in self._others:
            rank.memory.end()
            rank.process.kill()
        self._memory.stage.end()
        self._on_lost(why)

    def _send(self, message: bytes, ranks: Sequence[_Rank] | None = None) -> None:
        """To some of the other ranks, or to all."""
        try:
            for rank in self._others if ranks is None else ranks:
                rank.channel.send(message)
        except ChannelClosed:
            self.lose(f"rank {rank.number} of {len(self._others) + 1} has closed its channel")
        self.check()

    def look(self) -> None:
        """Gives up if a rank has ended or is frozen; called every `LOOK` seconds."""
        now, size = time.monotonic(), len(self._others) + 1
        was_paused, self._looked = now - self._looked > 2 * LOOK, now
        for rank in self._others:
            beats = rank.memory.beats(rank.rank.within)
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


def visible_gpus(ranks: int) -> list[str]:
    """The GPUs of so many ranks, by the names that CUDA_VISIBLE_DEVICES has for them: the first ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:ranks] if visible else [str(number) for number in range(ranks)]


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
