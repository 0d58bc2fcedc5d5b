"""An engine process without a model: the real scheduler and loop over the fake executor.

usage: python engine_process.py FD SECONDS_PER_STEP

The token after x is x + 1, round and round through the vocabulary.  A step whose prompt begins with BREAKING fails; a
prompt that begins with DYING ends the process.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence

from slotwise.batching.continuous import Continuous
from slotwise.core.limits import SchedulerLimits
from slotwise.core.plan import StepPlan, StepResult, TokenLogprobs
from slotwise.core.scheduler import Scheduler
from slotwise.engine.channel import BlockingChannel, ChannelClosed
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.loop import Engine
from slotwise.engine.messages import EngineInfo, Finish, Loading, decode_command, encode
from slotwise.policies.fcfs import FirstComeFirstServed

VOCAB = 400
EOS = 1
BREAKING, DYING = 398, 399
LIMITS = SchedulerLimits(max_model_len=512, num_blocks=1024, block_size=16, max_num_seqs=64,
                         max_num_batched_tokens=1024)


def next_token(context: Sequence[int]) -> int:
    if context[0] == BREAKING:
        raise ArithmeticError("a step that cannot be computed")
    if context[0] == DYING and len(context) > 4:
        os._exit(3)
    return (context[-1] + 1) % VOCAB


class Executor(FakeExecutor):
    """With log-probabilities for those who ask, and with a step that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(LIMITS.block_size, next_token)
        self._seconds = seconds
        self._asked: dict[int, int | None] = {}

    def submit(self, plan: StepPlan) -> None:
        self._asked |= {join.slot: join.params.logprobs for join in plan.joins}
        try:
            super().submit(plan)
        except ArithmeticError as error:
            self._results.append(error)
            return
        wanted = [self._asked[slot] for slot in plan.slots]
        if any(k is not None for k in wanted):
            result = self._results[-1]
            logprobs = tuple(tuple(_logprobs(token, k) for token in tokens if k is not None)
                             for tokens, k in zip(result.tokens, wanted, strict=True))
            self._results[-1] = result._replace(logprobs=logprobs)

    def collect(self) -> StepResult:
        time.sleep(self._seconds)
        result = super().collect()
        if isinstance(result, Exception):
            raise result
        return result


def _logprobs(token: int, k: int) -> TokenLogprobs:
    ids = tuple((token + i) % VOCAB for i in range(k))
    return TokenLogprobs(-0.25, 1, ids, tuple(-0.25 - i if i < 3 else float("-inf") for i in range(k)))


def main(descriptor: int, seconds: float) -> None:
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    engine = Engine(Scheduler(LIMITS, Continuous(), FirstComeFirstServed()), Executor(seconds), time.monotonic_ns,
                    (EOS,))
    channel.send(encode(Loading("weights", 1, 2)))
    channel.send(encode(EngineInfo("toy", "cpu", "float32", VOCAB, LIMITS, (EOS,))))
    while True:
        for message in channel.receive(0 if engine.has_work else None):
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
