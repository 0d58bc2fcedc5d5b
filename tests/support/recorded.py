"""Runs of a real engine over a toy model that leave a log behind: arrivals, aborts, changes, failures, at random."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.interfaces import Proposer
from slotwise.core.params import POOLING_TYPES, PoolingSpec, SamplingSpec
from slotwise.core.record import StepResult
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.speculation.proposer import proposer_of
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.core.step_time import StepTimeModel
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, Command, Configure, EngineInfo, Finish
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.event_log import Entry, decode
from slotwise.observe.recorder import Recorder
from support.toy import EOS, VOCAB, next_token, scheduler

MS = 1_000_000
TIGHT = SchedulerLimits(  # somebody has to yield again and again
    max_model_len=48, num_blocks=16, block_size=4, max_num_seqs=5, max_num_batched_tokens=12,
    enable_prefix_caching=True, watermark_blocks=1, max_passes=2)


class Shelf:
    """In place of a file."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def write(self, line: bytes) -> None:
        self.entries.append(decode(line))


class Whimsical(FakeExecutor):
    """Breaks a step now and then, and now and then cannot sample a row."""

    def __init__(self, block_size: int, whims: random.Random) -> None:
        super().__init__(block_size, next_token)
        self._whims = whims

    def collect(self) -> StepResult:
        result = super().collect()
        if self._whims.random() < 0.01:
            raise ArithmeticError(f"step {result.step}: broke")
        if result.tokens and (result.tokens[0] or any(result.pooled[:1])) and self._whims.random() < 0.02:
            return result._replace(tokens=((), *result.tokens[1:]), failed=(0,))
        return result


class Recorded:
    """An engine, what is sent to it, and the log of that; a clock that jumps a few milliseconds whenever it is read."""

    def __init__(self, seed: int, batching: Batching, *, depth: int = 0, limits: SchedulerLimits = TIGHT,
                 proposer: Proposer | None = None, speculation: Speculation | None = None) -> None:
        self.whims = random.Random(seed)
        self.file = Shelf()
        self.recorder = Recorder(clock=self.clock)
        self._now = 1000 * MS
        self._limits = limits
        self._depth = depth
        self._proposer = proposer
        self._speculation = speculation
        self._sent: deque[Command] = deque()
        self._scheduling = Scheduling(batching, max_num_seqs=limits.max_num_seqs,
                                      max_num_batched_tokens=limits.max_num_batched_tokens)
        self.start()
        self.recorder.write_to(self.file)

    def clock(self) -> int:
        self._now += self.whims.randint(1, 3 * MS)
        return self._now

    def start(self) -> None:
        """An engine, the first or the next."""
        self._sent.clear()
        executor = Whimsical(self._limits.block_size, self.whims)
        times = StepTimeModel()
        proposer = self._proposer or proposer_of(self._speculation, times)
        self._engine = Engine(
            scheduler(self._limits, self._scheduling.discipline(), times=times, proposer=proposer), executor,
            self.clock, (EOS,), depth=self._depth)
        self.recorder.started(EngineInfo(
            "toy", "cpu", "float32", VOCAB, self._limits, self._scheduling, (EOS,), depth=self._depth,
            speculation=self._speculation))

    def send(self, command: Command) -> None:
        self.recorder.commanded(command, self.clock())
        self._sent.append(command)

    def ask(self, number: int) -> None:
        """A random request; some share their beginning, some can never run, some do not wait for long."""
        whims = self.whims
        prompt = [3] * whims.choice((0, 8)) + [whims.randrange(1, VOCAB) for _ in range(whims.randint(1, 14))]
        params: dict[str, Any] = {"max_tokens": whims.randint(1, 20), "ignore_eos": whims.random() < 0.7}
        self.send(Add(number, RequestSpec(
            prompt * whims.choice((1, 1, 1, 1, 4)), SamplingSpec(**params), whims.getrandbits(64),
            salt=whims.choice(("", "other")), prediction=self._prediction(whims),
            pooling=PoolingSpec(whims.choice(POOLING_TYPES)) if whims.random() < 0.1 else None,
            forced_length=whims.choice((0, 0, 5)), queue_timeout=whims.choice((0.0, 0.0, 0.05))), name=f"r{number}"))

    def _prediction(self, whims: random.Random) -> tuple[int, ...]:
        if self._speculation is None or whims.random() < 0.5:
            return ()
        return tuple([whims.randrange(1, VOCAB) for _ in range(whims.randint(1, 20))])

    def turn(self) -> None:
        """What the engine does between two looks at its channel."""
        for _ in range(self.whims.randint(0, len(self._sent))):
            self._engine.handle(self._sent.popleft())
        record = self._engine.step() if self._engine.has_work else self._engine.idle_record()
        if record is not None:
            self.recorder.stepped(record)

    def play(self, num_requests: int) -> list[Entry]:
        """`num_requests` at random times, a tenth of them aborted, and other limits now and then; until all is done."""
        whims, asked = self.whims, 0
        while asked < num_requests or self._sent or self._engine.has_work:
            if asked < num_requests and whims.random() < 0.5:
                self.ask(asked)
                asked += 1
            if asked and whims.random() < 0.04:
                self.send(Finish(whims.randrange(asked), whims.choice(("abort", "stop"))))
            if whims.random() < 0.02:
                slots = whims.randint(2, self._limits.max_num_seqs)
                self._scheduling = Scheduling(self._scheduling.batching, max_num_seqs=slots,
                                              max_num_batched_tokens=whims.randint(slots, 12))
                self.send(Configure(self._scheduling))
            self.turn()
        return self.file.entries
