"""Event logs of runs in which everything happens that a timeline can show; and what should be seen of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.record import NO_STEP, StepRecord, StepResult
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, Configure, EngineInfo, Finish
from slotwise.engine.scheduling import Scheduling
from slotwise.observe import event_log
from slotwise.observe.recorder import Recorder
from support.toy import EOS, Guesses, next_token

LIMITS = SchedulerLimits(
    max_model_len=256, num_blocks=22, block_size=8, max_num_seqs=6, max_num_batched_tokens=48,
    enable_prefix_caching=True)
STEP_NS = 4_000_000


@dataclass
class Sink:
    entries: list[event_log.Entry] = field(default_factory=list)

    def write(self, line: bytes) -> None:
        self.entries.append(event_log.decode(line))


class _Slow(FakeExecutor):
    """Every step takes its time."""

    def __init__(self, run: Run) -> None:
        super().__init__(LIMITS.block_size, next_token)
        self._timed = run

    def collect(self) -> StepResult:
        self._timed.now += self._timed.draw.randrange(STEP_NS // 4, STEP_NS)
        return super().collect()


class Run:
    """An engine whose clock is moved by its steps, and its log."""

    def __init__(self, seed: int, depth: int = 0, *, drafts: bool = False) -> None:
        self.now = 10**12
        self.draw = random.Random(seed)
        self.num_requests = 0
        self.sink = Sink()
        scheduler = Scheduler(LIMITS, Batching().discipline(LIMITS.max_num_seqs), FirstComeFirstServed(),
                              proposer=Guesses(seed) if drafts else None)
        self.engine = Engine(scheduler, _Slow(self), lambda: self.now, (EOS,), depth=depth)
        self.recorder = Recorder(clock=lambda: self.now)
        self.recorder.write_to(self.sink)
        scheduling = Scheduling(Batching(), max_num_seqs=LIMITS.max_num_seqs,
                                max_num_batched_tokens=LIMITS.max_num_batched_tokens)
        self.recorder.started(EngineInfo("toy", "none", "float32", 23, LIMITS, scheduling, (EOS,)))

    def tell(self, command: Add | Finish | Configure) -> None:
        self.recorder.commanded(command, self.now)
        self.engine.handle(command)

    def batch(self, kind: str) -> None:
        self.tell(Configure(Scheduling(Batching(kind), max_num_seqs=LIMITS.max_num_seqs,
                                       max_num_batched_tokens=LIMITS.max_num_batched_tokens)))

    def ask(self) -> None:
        prompt = [self.draw.randrange(1, 23) for _ in range(self.draw.choice((3, 9, 20, 70)))]
        shared = [7] * 24 if self.draw.random() < 0.3 else []
        params = SamplingSpec(max_tokens=self.draw.choice((2, 6, 15, 40)), ignore_eos=self.draw.random() < 0.6)
        self.tell(Add(self.num_requests, RequestSpec(shared + prompt, params, self.num_requests),
                      name=f"request-{self.num_requests}"))
        self.num_requests += 1

    def step(self) -> None:
        self.now += STEP_NS // 50
        if not self.engine.has_work:
            return
        self.recorder.stepped(self.engine.step())

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()


def everything(seed: int = 1, depth: int = 0, *, drafts: bool = False) -> list[event_log.Entry]:
    """Static batches, then continuous ones with too few blocks, aborts, and another discipline at the end."""
    run = Run(seed, depth, drafts=drafts)
    for kind in ("static", "continuous", "one_at_a_time"):
        run.batch(kind)
        for number in range(24 if kind == "continuous" else 9):
            run.ask()
            if number % 3 == 0:
                run.step()
            if number == 11:
                run.tell(Finish(run.num_requests - 4, "abort"))
        run.drain()
    return run.sink.entries


@dataclass(frozen=True)
class Cell:
    number: int
    kind: str  # of the page's kinds
    computed: int  # tokens, padding and those found in the cache not counted
    beside: int  # padding and those found in the cache


def cells(entries: Iterable[event_log.Entry]) -> list[dict[int, Cell]]:
    """Of each executed step, what each slot should show: told from the plans alone."""
    prompts: dict[int, int] = {}
    reached: dict[int, int] = {}
    ended: set[int] = set()
    steps = []
    for entry in entries:
        if isinstance(entry, event_log.RequestEntry):
            prompts[entry.number] = entry.num_prompt
        if not isinstance(entry, StepRecord):
            continue
        if entry.step != NO_STEP:
            cached = dict(entry.admitted)
            padding = entry.plan.padding or (0,) * len(entry.plan.request_ids)
            shown = {}
            for row, (number, slot) in enumerate(zip(entry.plan.request_ids, entry.plan.slots, strict=True)):
                start, count = entry.plan.starts[row], entry.plan.counts[row]
                if row in entry.plan.held:
                    kind = "held"
                elif number in ended:
                    kind = "void"
                elif start < reached.get(number, 0):
                    kind = "recompute"
                else:
                    kind = "prefill" if start < prompts[number] else "decode"
                shown[slot] = Cell(number, kind, count, padding[row] + cached.get(number, 0))
                if kind not in ("held", "void"):
                    reached[number] = max(reached.get(number, 0), entry.next_position(row))
            steps.append(shown)
        ended |= {end.request_id for end in entry.ended}
    return steps
