"""What observers hear: an engine's introduction, and rehearsals of a real engine over a toy model."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, Command, EngineInfo, Observer, Timing
from slotwise.engine.scheduling import Scheduling
from support.toy import EOS, VOCAB, next_token, scheduler

MS = 1_000_000
LIMITS = SchedulerLimits(max_model_len=100, num_blocks=10, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)


def engine(max_num_seqs: int = 4, limits: SchedulerLimits = LIMITS, batching: Batching | None = None) -> EngineInfo:
    tokens = max(64, max_num_seqs)
    return EngineInfo("a model", "cpu", "float32", VOCAB, replace(limits, max_num_batched_tokens=tokens),
                      Scheduling(batching or Batching(), max_num_seqs=max_num_seqs,
                                 max_num_batched_tokens=tokens), (EOS,))


class Rehearsal:
    """An engine that is given random requests while it runs, each time somebody looks a little later.

    Nobody leaves early, and nothing fails.
    """

    def __init__(self, info: EngineInfo, observers: Sequence[Observer], *, depth: int = 0, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._observers = observers
        self._ns = 0
        self._sent: deque[Command] = deque()
        self.engine = Engine(
            scheduler(info.limits, info.scheduling.discipline()), FakeExecutor(info.limits.block_size, next_token),
            self.clock, (EOS,), depth=depth)
        self.records: list[StepRecord] = []
        self.num_outputs: dict[int, int] = {}
        for observer in observers:
            observer.started(info)

    def clock(self) -> int:
        self._ns += self._draw.randint(1, 9) * MS
        return self._ns

    def arrive(self, number: int) -> None:
        prompt = [3] * self._draw.choice((0, 8)) + [self._draw.randrange(1, VOCAB) for _ in range(
            self._draw.randint(1, 12))]
        params = SamplingSpec(max_tokens=self._draw.randint(1, 16), ignore_eos=True)
        command, now = Add(number, RequestSpec(prompt, params), Timing(received_ns=self.clock()),
                           f"cmpl-{number}-{number}"), self.clock()
        for observer in self._observers:
            observer.arrived(number, len(prompt), now)
            observer.commanded(command, now)
        self._sent.append(command)

    def play(self, num_requests: int) -> list[StepRecord]:
        """Until all have ended; what the engine told."""
        arrived = 0
        while arrived < num_requests or self._sent or self.engine.has_work:
            if arrived < num_requests and self._draw.random() < 0.4:
                self.arrive(arrived)
                arrived += 1
            while self._sent and self._draw.random() < 0.7:
                self.engine.handle(self._sent.popleft())
            if self.engine.has_work:
                self._step()
        return self.records

    def _step(self) -> None:
        record = self.engine.step()
        self.records.append(record)
        for observer in self._observers:
            observer.stepped(record)
        for end in record.ended:
            self.num_outputs[end.request_id] = end.num_output
