"""The ranks of a model that several processes of this host compute: rank 0 starts, drives and watches the others.

    rank 0    scheduler ─► plan n, tokens of n - 1 ─► its share ─┐
    rank 1                 └──────── socket ────────► its share ─┴─ sums, by `kernels.group`, or
                                                                   hidden states in turn, by its `Pipe`

A rank that ends, or gives no heartbeat for `SILENCE`, ends all: waiting for it is given up, the other ranks are killed,
and every later step fails.  The engine process then ends, and its supervisor starts all ranks again.

Ranks are connected through shared memory on a CPU, else by torch.distributed:

    rank      0        1   |   2        3        two stages of two ranks: 0 and 1 sum, 0 hands on to 2, 2 returns to 0
    stage     0            |   1

Every rank loads its part of each adapter, or none does:

    rank 0    LoadAdapter ─► loads its part, waits for the others ─► all could: done, else those that could forget it
    rank 1         └───────► loads its part between its steps ─► AdapterLoaded
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slotwise.compose.rank_messages import (
    Allocate,
    Collect,
    Failed,
    Join,
    Known,
    Measure,
    RankReport,
    RunShare,
    decode_report,
    encode,
)
from slotwise.compute.kernels.cpu.shared_group import (
    CHUNK,
    PipeMemory,
    SharedGroup,
    SharedMemory,
    SharedPipe,
    pipe_size,
    shared_file,
    size_of,
)
from slotwise.compute.kernels.cpu.threads import places
from slotwise.compute.kernels.group import Group, NoPipe, Pipe, PipelineStage, SingleRank, TorchGroup, TorchPipe
from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.select import launcher_of
from slotwise.compute.model.lora_weights import LoraWeights
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.core.record import RankSpan, StepPlan, StepResult
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.config import EngineConfig
from slotwise.engine.executor import Executor
from slotwise.engine.ipc import BlockingChannel, ChannelClosed, pair
from slotwise.engine.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from slotwise.errors import CheckpointError, OneLineError
from slotwise.platform import child, spawn

WIDE = 4  # bytes of a logit, and of an element of the residual stream


class Rank(NamedTuple):
    """The place of a process among all ranks."""

    number: int
    width: int  # ranks of a stage
    stages: int
    splits_experts: bool

    @classmethod
    def of(cls, number: int, config: EngineConfig) -> Rank:
        return cls(number, config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)

    @property
    def size(self) -> int:
        return self.width * self.stages

    @property
    def stage(self) -> PipelineStage:
        return PipelineStage(self.number // self.width, self.stages)

    @property
    def within(self) -> int:
        """Its number within its stage."""
        return self.number % self.width

    @property
    def before(self) -> int:
        """The rank that hands hidden states to this one."""
        return (self.number - self.width) % self.size

    @property
    def after(self) -> int:
        return (self.number + self.width) % self.size


class RankFiles(NamedTuple):
    """Descriptors of the memory that ranks share."""

    of_stages: list[int]
    boxes: int

    @classmethod
    def made(cls, config: EngineConfig, described: ModelConfig) -> RankFiles:
        """Files for the largest exchange of any step; memory is taken as it is used."""
        width, stages = config.tensor_parallel_size, config.pipeline_parallel_size
        logits = WIDE * -(-described.vocab_size // width)
        longest = min(config.max_model_len or described.longest, described.longest)
        tokens = config.step_tokens + config.max_num_seqs * longest  # whole prompts of a static batch
        message = tokens * described.hidden_size * WIDE
        return cls([shared_file(size_of(width, max(CHUNK, logits))) for _ in range(stages)],
                   shared_file(pipe_size(width * stages, message if stages > 1 else 0)))

    def close(self) -> None:
        for descriptor in (*self.of_stages, self.boxes):
            os.close(descriptor)


class RankMemory:
    """The memory of a rank's stage and that between stages, mapped in this process."""

    def __init__(self, stage: int, boxes: int, rank: Rank) -> None:
        self.stage = SharedMemory(stage, rank.width)
        self.boxes = PipeMemory(boxes, rank.size)


@cache
def store_file() -> int:
    """Descriptor of the file of this process's stores.

    It is never closed: a store opens it by its number, and does so a last time when its last process group is freed,
    which may be long after the engine was dropped.  Another file of that number would be written to.
    """
    return shared_file(0)


def store_of(descriptor: int, size: int) -> Any:
    """The store of torch.distributed through which ranks find each other, in a file that no other process can open.

    A TCPStore would listen on every address of the machine, and do what any client asks.
    """
    return torch.distributed.FileStore(f"/proc/self/fd/{descriptor}", size)  # type: ignore[attr-defined]


def group_of(kernels: Kernels, rank: Rank, memory: RankMemory, store: Any) -> Group:
    """This process' view of its stage and the others; `store` is None where they exchange through `memory`."""
    group = _of_memory(kernels, rank, memory) if store is None else _of_torch(kernels, rank, store)
    group.splits_experts = rank.splits_experts
    return group


def _of_memory(kernels: Kernels, rank: Rank, memory: RankMemory) -> Group:
    launcher = launcher_of(kernels)
    pipe: Pipe = NoPipe()
    if rank.stages > 1:
        pipe = SharedPipe(launcher, memory.boxes, rank.stage, rank.number, rank.after)
    return SingleRank(pipe) if rank.width == 1 else SharedGroup(launcher, memory.stage, rank.within, pipe)


def _of_torch(kernels: Kernels, rank: Rank, store: Any) -> Group:
    """Every rank makes all process groups, in the same order."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend, distributed = "nccl" if kernels.device.type == "cuda" else "gloo", torch.distributed
    distributed.init_process_group(backend, store=store, rank=rank.number, world_size=rank.size)
    if rank.stages == 1:
        return TorchGroup()
    ranks = [rank._replace(number=number) for number in range(rank.size)]
    edges = {one.number: distributed.new_group([one.number, one.after]) for one in ranks}
    stages = [distributed.new_group([*range(first, first + rank.width)]) for first in range(0, rank.size, rank.width)]
    pipe = TorchPipe(rank.stage, rank.before, rank.after, (edges[rank.before], edges[rank.number]), kernels.device)
    return SingleRank(pipe) if rank.width == 1 else TorchGroup(stages[rank.stage.number], pipe)


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
                child.python("slotwise.compose.rank_process", str(theirs.fileno())), env=environment,
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
        self._send(encode(RunShare(plan._replace(preempted=(), refused=(), stop=None), self._known)))
        self._known = []

    def collect(self) -> None:
        """Has the other ranks of the first stage compute the end of the oldest plan, where it is one of several."""
        if self.group.pipe.stage.total > 1:
            self._send(encode(Collect()), [rank for rank in self._others if rank.rank.stage.is_first])

    def load_adapter(self, command: LoadAdapter) -> None:
        """Has all ranks load an adapter during their steps; `adapter_loads` tells what became of it."""
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
        """Give up: stop waiting for ranks, and kill them."""
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


class LeadingExecutor:
    """Runs plans on all ranks: `runner` on this one.

    Args:
        slots: of this rank, that learn what is sampled as those of the other ranks do; None: `runner` sees to it.
    """

    def __init__(self, runner: Executor, ranks: Ranks, slots: SlotTable | None) -> None:
        self.ranks = ranks
        self._runner = runner
        self._slots = slots
        self._in_flight: deque[tuple[StepPlan, RankSpan]] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Raises RankLostError once a rank is lost."""
        if not plan.has_proposed:  # else the draft model announces the plan, with its drafts
            self.ranks.run(plan)
        began = time.monotonic_ns()
        self._runner.submit(plan)
        self._in_flight.append((plan, RankSpan(0, began, time.monotonic_ns())))

    def collect(self) -> StepResult:
        plan, first = self._in_flight.popleft()
        began = time.monotonic_ns()
        try:
            self.ranks.collect()
            result = self._runner.collect()
        except Exception as error:  # the ranks may have stopped at different places
            self.ranks.lose(f"a step failed on rank 0: {type(error).__name__}: {error}")
            raise
        self.ranks.check()
        last = RankSpan(0, max(began, self.ranks.returned_at), time.monotonic_ns())
        self._learn(known_after(plan, result, [later for later, _ in self._in_flight]))
        if not plan.slots:
            return result
        others = [span for span in self.ranks.spans(plan.step) if span.started_ns >= first.started_ns]
        return result._replace(ranks=(first, last, *others))

    def _learn(self, known: list[Known]) -> None:
        self.ranks.learn(known)
        if self._slots is not None:
            for one in known:
                self._slots.learn(one.slot, one.start, one.tokens)


def known_after(plan: StepPlan, result: StepResult, later: Iterable[StepPlan]) -> list[Known]:
    """What a plan has sampled, but for slots that `later` plans, submitted already, have given to other requests."""
    left = {slot for one in later for slot in one.released_slots}
    drafts = plan.drafts or ((),) * plan.num_rows
    rows = zip(plan.slots, plan.starts, plan.counts, drafts, result.tokens, strict=True)
    return [Known(slot, start + count - len(drafted), tokens)
            for slot, start, count, drafted, tokens in rows if tokens and slot not in left]


class RankAdapters:
    """Rank 0's hold on the adapters of all ranks; an `engine.executor.AdapterStore`.

    Args:
        own: those of rank 0.
    """

    def __init__(self, own: LoraWeights, ranks: Ranks) -> None:
        self.num_places = own.num_places
        self._own = own
        self._ranks = ranks

    def load(self, number: int, folder: Path) -> None:
        """Loads an adapter on every rank.  One thread loads at a time.

        Raises:
            CheckpointError: a rank cannot, and none has it now.
            RankLostError: a rank was lost.
        """
        self._ranks.load_adapter(LoadAdapter(number, os.path.abspath(folder)))
        failure: Exception | None = None
        try:
            self._own.load(number, folder)
        except Exception as error:  # the others' answers are read in any case
            failure = error
        loads = self._ranks.adapter_loads()
        objections = [f"rank {rank}: {why}" for rank, why in loads.items() if why]
        if failure is None and not objections:
            return
        self._ranks.unload_adapter(number, [rank for rank, why in loads.items() if not why])
        if failure is not None:
            raise failure
        self._own.unload(number)
        raise CheckpointError(objections[0])

    def unload(self, number: int) -> None:
        """Forgets an adapter, of which no request is left, on every rank."""
        self._own.unload(number)
        self._ranks.unload_adapter(number)
