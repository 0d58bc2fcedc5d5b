"""An engine process without a model: the real scheduler and loop over an executor that counts.

usage: python engine_process.py FD SECONDS_PER_STEP

The token after x is x + 1, round and round through the vocabulary.  A step whose prompt begins with BREAKING fails; a
prompt that begins with DYING ends the process.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque

from slotwise.batching.settings import Batching
from slotwise.core.limits import SchedulerLimits
from slotwise.core.plan import Join, StepPlan, StepResult, TokenLogprobs
from slotwise.core.scheduler import Scheduler
from slotwise.engine.channel import BlockingChannel, ChannelClosed
from slotwise.engine.loop import Engine
from slotwise.engine.messages import EngineInfo, Finish, Loading, decode_command, encode
from slotwise.engine.scheduling import Scheduling
from slotwise.policies.fcfs import FirstComeFirstServed

VOCAB = 400
EOS = 1
BREAKING, DYING = 398, 399
LIMITS = SchedulerLimits(max_model_len=512, num_blocks=2048, block_size=16, max_num_seqs=64,
                         max_num_batched_tokens=1024)
SCHEDULING = Scheduling(Batching(), LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens)


class Row:
    """A slot: the token it was last known to have, and what its request is."""

    def __init__(self, join: Join) -> None:
        self.kind, self.last, self.logprobs = join.tokens[0], join.tokens[-1], join.params.logprobs
        self.num_sampled = 0

    def sample(self) -> int:
        if self.kind == BREAKING:
            raise ArithmeticError("a step that cannot be computed")
        if self.kind == DYING and self.num_sampled == 3:
            os._exit(3)
        self.num_sampled += 1
        self.last = (self.last + 1) % VOCAB
        return self.last


class Executor:
    """Cheap, so that many streams are limited by the server; `seconds` is what a step seems to take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rows: dict[int, Row] = {}
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._rows |= {join.slot: Row(join) for join in plan.joins}
        self._plans.append(plan)

    def collect(self) -> StepResult:
        time.sleep(self._seconds)
        plan = self._plans.popleft()
        rows = [self._rows[slot] for slot in plan.slots]
        tokens = tuple((row.sample(),) if samples else () for row, samples in zip(rows, plan.samples, strict=True))
        if all(row.logprobs is None for row in rows):
            return StepResult(plan.step, tokens)
        return StepResult(plan.step, tokens, tuple(
            tuple(_logprobs(token, row.logprobs) for token in sampled if row.logprobs is not None)
            for row, sampled in zip(rows, tokens, strict=True)))


def _logprobs(token: int, k: int) -> TokenLogprobs:
    ids = tuple((token + i) % VOCAB for i in range(k))
    return TokenLogprobs(-0.25, 1, ids, tuple(-0.25 - i if i < 3 else float("-inf") for i in range(k)))


def main(descriptor: int, seconds: float) -> None:
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    scheduler = Scheduler(LIMITS, SCHEDULING.discipline(), FirstComeFirstServed())
    engine = Engine(scheduler, Executor(seconds), time.monotonic_ns, (EOS,))
    channel.send(encode(Loading("weights", 1, 2)))
    channel.send(encode(EngineInfo("toy", "cpu", "float32", VOCAB, LIMITS, SCHEDULING, (EOS,))))
    while True:
        for message in channel.receive(engine.wait() if engine.has_work else None):
            command = decode_command(message)
            if isinstance(command, Finish):
                print("finish", command.request_id, command.reason, flush=True)
            engine.handle(command)
        record = engine.step() if engine.has_work else engine.idle_record()
        if record is not None:
            channel.send(encode(record))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), float(sys.argv[2]))
    except ChannelClosed:
        print("closed", flush=True)
