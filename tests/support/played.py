"""Event logs of a real engine over a toy model, on a clock whose every tick is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepPlan, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import Work, work_of
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, Command, EngineInfo, Finish, Timing
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.event_log import Entry, decode
from slotwise.observe.recorder import Recorder
from slotwise.observe.ring import Ring
from support.toy import EOS, VOCAB, next_token, scheduler

LIMITS = SchedulerLimits(max_model_len=64, num_blocks=40, block_size=4, max_num_seqs=6, max_num_batched_tokens=16,
                         enable_prefix_caching=True, max_passes=2)
MS = 1_000_000  # nanoseconds
BEGINNING = list(range(1, 13))  # that half of the prompts share
PATIENCE = 0.03  # seconds that one in eight waits for a slot


def cost(work: Work) -> int:
    """Nanoseconds of a step."""
    return round(1.5 * MS + 60_000 * work.tokens + 40_000 * work.rows + 900 * work.context + 500 * work.pairs)


def name_of(number: int) -> str:
    return f"cmpl-r{number}-{number}"


class Clock:
    """Time passes with what is computed, and a little whenever somebody looks."""

    def __init__(self) -> None:
        self.ns = 5 * MS

    def __call__(self) -> int:
        self.ns += 500
        return self.ns


class Timed(FakeExecutor):
    """Steps take what they cost."""

    def __init__(self, clock: Clock, block_size: int) -> None:
        super().__init__(block_size, next_token)
        self._clock = clock

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        if plan.slots:
            self._clock.ns += cost(work_of(plan.starts, plan.counts, plan.padding))


class Play:
    """Clients that come, go and read in the middle of steps.

    Afterwards `entries` are the log and `waited` is what each client waited, in nanoseconds, by its own clock.
    """

    def __init__(self, seed: int, *, depth: int = 0, batching: Batching | None = None,
                 limits: SchedulerLimits = LIMITS) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        scheduling = Scheduling(batching or Batching(), max_num_seqs=limits.max_num_seqs,
                                max_num_batched_tokens=limits.max_num_batched_tokens)
        self.engine = Engine(scheduler(limits, scheduling.discipline()), Timed(self.clock, limits.block_size),
                             self.clock, (EOS,), depth=depth)
        self.recorder = Recorder(Ring(1 << 40), self.clock)
        self.recorder.started(EngineInfo("toy", "cpu", "float32", VOCAB, limits, scheduling, (EOS,), depth=depth))
        self.waited: dict[str, int] = {}
        self._received: dict[int, int] = {}
        self._living: dict[int, None] = {}  # as the service sees it, in order of arrival
        self._unsent: list[Command] = []  # on their way to the engine
        self._now = self.clock.ns  # of the API process

    @property
    def entries(self) -> list[Entry]:
        return list(map(decode, self.recorder.ring.lines()))

    def run(self, num_requests: int, arriving: Sequence[int] = (0, 0, 1, 1, 2), leaving: float = 0.04) -> Play:
        """Until all have ended.

        Args:
            arriving: how many arrive while a step is under way, one of these.
            leaving: how many clients leave, or find a stop string, for each step.
        """
        while len(self._received) < num_requests or self.engine.has_work or self._unsent:
            for command in self._unsent:
                self.engine.handle(command)
            self._unsent.clear()
            record = self.engine.step() if self.engine.has_work else self.engine.idle_record()
            for _ in range(min(self.random.choice(arriving), num_requests - len(self._received))):
                self.arrive()
            if self._living and self.random.random() < leaving:
                self._leave(self.random.choice(list(self._living)))
            if record is not None:
                self._told(record)
        return self

    def arrive(self, num_prompt: int = 0, max_tokens: int = 0) -> str:
        """A request of given or random size; returns its name."""
        draw, number = self.random, len(self._received)
        tokens = [draw.randrange(1, VOCAB) for _ in range(num_prompt or draw.randint(1, 24))]
        if draw.random() < 0.5:
            tokens = (BEGINNING + tokens)[: len(tokens)]
        params = SamplingSpec(max_tokens=max_tokens or draw.randint(1, 30), ignore_eos=True)
        received = self._tick()
        command = Add(number, RequestSpec(tokens, params, queue_timeout=PATIENCE if draw.random() < 0.125 else 0.0),
                      Timing(received_ns=received, tokenized_ns=self._tick()), name_of(number))
        self._received[number] = received
        self._living[number] = None
        self._send(command)
        return name_of(number)

    def _tick(self) -> int:
        """A moment of the API process, between the last and the engine's now."""
        self._now += self.random.randint(0, max(0, self.clock.ns - self._now) // 4)
        return self._now

    def _send(self, command: Command) -> None:
        self.recorder.commanded(command, self._tick())
        self._unsent.append(command)

    def _leave(self, number: int) -> None:
        reason = self.random.choice(("abort", "stop"))
        del self._living[number]
        self._send(Finish(number, reason))
        if reason == "stop":
            self._answer(number)
        else:
            self.waited[name_of(number)] = self._now - self._received[number]

    def _answer(self, number: int) -> None:
        last = self._now + self.random.randint(0, MS)
        self.recorder.sent(number, self._received[number], last, 1)
        self.waited[name_of(number)] = last - self._received[number]

    def _told(self, record: StepRecord) -> None:
        self.recorder.stepped(record)
        self._now = self.clock.ns
        for end in record.ended:
            if end.request_id in self._living:
                del self._living[end.request_id]
                self._answer(end.request_id)
