"""A toy engine process, forked by `server_process`: the real scheduler and loop over an executor that counts, no model.

The token after x is x + 1, round and round through the vocabulary.  A step whose prompt begins with BREAKING fails; a
prompt that begins with DYING ends the process, one that begins with BABBLING makes it talk nonsense, one that begins
with FALLING is more than the engine can take; one that begins with COPYING is answered with what stands between this
token and the next of its kind.  It does not start while there is a file BROKEN.
`changed` are limits of the scheduler that differ from what stands here, and `num_labels` of a head of labels.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from slotwise.compose.engine_process import serve
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import CLASSIFY, LABELS
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.record import NewRequest, RowKind, StepPlan, StepResult, TokenLogprobs
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SchedulerLimits, Tier
from slotwise.engine.engine import Engine
from slotwise.engine.ipc import BlockingChannel, ChannelClosed, HeartbeatSender, encode
from slotwise.engine.messages import Add, Command, EngineFailed, EngineInfo, Finish, Loading
from slotwise.engine.scheduling import Scheduling

VOCAB = 400
EOS = 1
COPYING = 300  # the first id that is not the tokenizer's
WIDTH = 4  # numbers of a vector
FALLING, BABBLING, BREAKING, DYING = 396, 397, 398, 399
LIMITS = SchedulerLimits(max_model_len=512, num_blocks=2048, block_size=16, max_num_seqs=64,
                         max_num_batched_tokens=1024)


class Row:
    """A slot: the token it was last known to have, and what its request is."""

    def __init__(self, join: NewRequest) -> None:
        self.kind, self.last, self.logprobs = join.tokens[0], join.tokens[-1], join.spec.params.logprobs
        self.prompt, self.num_top = join.tokens[: join.num_prompt], join.spec.params.prompt_logprobs
        self.num_sampled, self.num_told = 0, len(join.tokens)
        self.pooling = join.spec.pooling

    def samples(self, plan: StepPlan, row: int) -> bool:
        """Whether row `row` of `plan` reaches the end of the known tokens."""
        return self.pooling is None and (
            plan.kinds[row] == RowKind.DECODE or plan.starts[row] + plan.counts[row] == self.num_told)

    def pooled(self, end: int, num_labels: int) -> bytes:
        """What a pooled prompt that ends here gives: a vector of its first tokens, then zeros; for the token that is
        `distance` after the next one the probability 2 ** -(distance + 1); for a label a hundredth of one of the
        last tokens, or its sigmoid.
        """
        if self.pooling is None or end < self.num_told:
            return b""
        if self.kind == BREAKING:
            raise ArithmeticError("a step that cannot be computed")
        if self.pooling.task == LABELS:
            distances = [(token - self.last - 1) % VOCAB for token in self.pooling.label_ids]
            numbers = [-(distance + 1) * math.log(2) for distance in (*distances, 0)]
        elif self.pooling.task == CLASSIFY:
            numbers = [token / 100 for token in self.prompt[-num_labels:]]
            numbers = [1 / (1 + math.exp(-number)) for number in numbers] if self.pooling.activation else numbers
        else:
            numbers = [*self.prompt, *[0.0] * WIDTH][: self.pooling.dimensions or WIDTH]
        return struct.pack(f"<{len(numbers)}f", *numbers)

    def described(self, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's tokens from `start + 1` to `end`: each is the most probable one."""
        if self.num_top is None:
            return ()
        return tuple([_top(-position / 100, self.prompt[position], self.num_top)
                      for position in range(start + 1, min(end + 1, len(self.prompt)))])

    def sample(self) -> int:
        if self.kind == BREAKING:
            raise ArithmeticError("a step that cannot be computed")
        if self.kind == DYING and self.num_sampled == 3:
            os._exit(3)
        self.num_sampled += 1
        self.last = (self.last + 1) % VOCAB if self.kind != COPYING else self._copied()
        return self.last

    def _copied(self) -> int:
        token = self.prompt[self.num_sampled]
        return EOS if token == COPYING else token


class Executor:
    """Cheap, so that many streams are limited by the server; `seconds` is what a step seems to take."""

    def __init__(self, seconds: float, channel: BlockingChannel, num_labels: int) -> None:
        self._seconds = seconds
        self._num_labels = num_labels
        self._channel = channel
        self._rows: dict[int, Row] = {}
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        if any(join.tokens[0] == FALLING for join in plan.new_requests):
            raise MemoryError("more than the engine can take")
        self._rows |= {join.slot: Row(join) for join in plan.new_requests}
        self._plans.append(plan)

    def collect(self) -> StepResult:
        time.sleep(self._seconds)
        plan = self._plans.popleft()
        rows = [self._rows[slot] for slot in plan.slots]
        if any(row.kind == BABBLING for row in rows):
            self._channel.send(b"\xc1\xc1")
        tokens = tuple((row.sample(),) if row.samples(plan, i) else () for i, row in enumerate(rows))
        logprobs, prompts = (), ()
        if any(row.logprobs is not None for row in rows):
            logprobs = tuple(
                tuple(_logprobs(token, row.logprobs) for token in sampled if row.logprobs is not None)
                for row, sampled in zip(rows, tokens, strict=True))
        if any(row.num_top is not None for row in rows):
            prompts = tuple(row.described(start, start + count)
                            for row, start, count in zip(rows, plan.starts, plan.counts, strict=True))
        pooled = tuple(row.pooled(start + count, self._num_labels)
                       for row, start, count in zip(rows, plan.starts, plan.counts, strict=True))
        return StepResult(plan.step, tokens, logprobs, prompt_logprobs=prompts, pooled=pooled if any(pooled) else ())


def _logprobs(token: int, k: int) -> TokenLogprobs:
    ids = tuple((token + i) % VOCAB for i in range(k))
    return TokenLogprobs(-0.25, 1, ids, tuple(-0.25 - i if i < 3 else float("-inf") for i in range(k)))


def _top(logprob: float, token: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(logprob, 1, tuple((token + i) % VOCAB for i in range(k)), (logprob,) * k)


class Noting(Engine):
    """Prints the names of requests that were ended from outside."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.names: dict[int, str] = {}

    def handle(self, command: Command) -> None:
        if isinstance(command, Add):
            self.names[command.request_id] = command.name
        if isinstance(command, Finish):
            print("finish", self.names[command.request_id], command.reason, flush=True)
        super().handle(command)


def main(seconds: float, broken: Path, changed: dict[str, Any], descriptor: int) -> None:
    print("start", os.getpid(), flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    num_labels = changed.pop("num_labels", 1)
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    heartbeat_sender = HeartbeatSender(channel)
    heartbeat_sender.start()
    limits = replace(LIMITS, **changed | {"tiers": tuple([Tier(**one) for one in changed.pop("tiers", [])])})
    scheduling = Scheduling(Batching(), max_num_seqs=limits.max_num_seqs,
                            max_num_batched_tokens=limits.max_num_batched_tokens, tiers=limits.tiers)
    scheduler = Scheduler(limits, scheduling.discipline(), FirstComeFirstServed())
    engine = Noting(scheduler, Executor(seconds, channel, num_labels), time.monotonic_ns, (EOS,), scheduling=scheduling)
    channel.send(encode(Loading("weights", 1, 2)))
    if broken.is_file():
        channel.send(encode(EngineFailed("the model is not there")))
        return
    channel.send(encode(EngineInfo("toy", "cpu", "float32", VOCAB, limits, scheduling, (EOS,), hidden_size=WIDTH)))
    serve(engine, channel, heartbeat_sender)


def run(seconds: float, broken: Path, changed: dict[str, Any], descriptor: int) -> None:
    """Returns when the channel is closed; it is an open socket."""
    try:
        main(seconds, broken, changed, descriptor)
    except ChannelClosed:
        print("closed", flush=True)
