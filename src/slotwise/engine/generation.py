"""The API process' generations: each delivers a request's tokens to its consumer, and ends exactly once.

    live       ─► ended by a step's record
    live       ─► leaving: finished in this process ─► confirmed by a step's record

A slow consumer receives several steps' tokens in one chunk, so its cost falls as its process becomes busier.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from slotwise.core.record import Logprobs, StepRecord, TokenLogprobs, Tokens
from slotwise.engine.messages import StepOutputs

AT_THE_END = 1 << 62  # as `Generation.interval`: one chunk, at the end


class Chunk(NamedTuple):
    """The tokens since the last chunk; the final chunk has a `finish_reason`, and a `message` if that needs one."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: str | None = None
    message: str = ""


class Generation:
    """One request's tokens as an asynchronous iterator of chunks, for one consumer."""

    __slots__ = (
        "_delivered", "_drafted", "_end", "_finish", "_kept", "_logprobs", "_loop", "_tokens", "_waiter",
        "first_token_ns", "interval", "moved_ns", "name", "num_cached", "num_prompt", "pooled",
        "prompt_logprobs", "request_id")

    def __init__(self, request_id: int, name: str, finish: Callable[[Generation, str], None]) -> None:
        self.request_id = request_id
        self.name = name
        self.interval = 1  # tokens to wait for before the consumer is woken
        self.num_cached = -1  # prompt tokens found in the cache at its first admission; -1: not admitted yet
        self.num_prompt = 0  # tokens of its prompt, where its drafts are counted; 0: they are not
        self.moved_ns = time.monotonic_ns()  # time of its last change: arrival, admission, preemption or end
        self.first_token_ns = 0  # time of its first tokens; 0: it has none
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens from the second on
        self.pooled = b""  # the vector of a pooled request that has ended: float32, little-endian
        self._drafted: list[tuple[int, int, int]] = []
        self._finish = finish
        self._loop = asyncio.get_running_loop()
        self._tokens: list[int] = []
        self._kept = 0  # of these, the last one, while it is not known whether it ends the output
        self._logprobs: list[TokenLogprobs] = []
        self._end: tuple[str, str] | None = None  # reason and message
        self._delivered = False  # the consumer has seen the end
        self._waiter: asyncio.Future[None] | None = None

    def verified(self, num_output: int, num_drafts: int, num_right: int) -> None:
        """Notes that drafts were verified after `num_output` output tokens; the first `num_right` were right."""
        self._drafted.append((num_output, num_drafts, num_right))

    def drafted(self, num_output: int) -> tuple[int, int]:
        """Returns how many drafts were right and wrong, within the first `num_output` tokens of output."""
        before = [(num_right if begin + num_right <= num_output else num_output - begin, num_drafts - num_right)
                  for begin, num_drafts, num_right in self._drafted if begin < num_output]
        return sum(right for right, _ in before), sum(wrong for _, wrong in before)

    def finish(self, reason: str) -> None:
        """Ends the generation from the API process, once; later tokens of the engine are ignored."""
        if self._end is None:
            self._finish(self, reason)

    @property
    def ended(self) -> bool:
        return self._end is not None

    @property
    def end_reason(self) -> str:
        """Why it has ended; empty before."""
        return self._end[0] if self._end is not None else ""

    @property
    def num_unread(self) -> int:
        """Tokens received and not yet consumed."""
        return len(self._tokens)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Chunk:
        if self._delivered:
            raise StopAsyncIteration
        while self._end is None and len(self._tokens) - self._kept < self.interval:
            self._waiter = self._loop.create_future()
            await self._waiter
        count = len(self._tokens) - (self._kept if self._end is None else 0)
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        if self._end is None:
            return Chunk(tokens, logprobs)
        self._delivered = True
        return Chunk(tokens, logprobs, *self._end)

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], *, is_part: bool = False) -> None:
        """Adds tokens.

        Args:
            is_part: the record of their step follows, and may tell that the last of them ends the output.
        """
        if tokens and not self.first_token_ns:
            self.first_token_ns = time.monotonic_ns()
        self._tokens += tokens
        if logprobs:
            self._logprobs += logprobs
        self._kept = int(is_part)
        if len(self._tokens) - self._kept >= self.interval:
            self._wake()

    def push_prompt(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds entries of the prompt's tokens from position `start + 1` on; known ones, computed again, are ignored."""
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]

    def end(self, reason: str, message: str = "") -> None:
        if self._end is None:
            self._end = (reason, message)
            self.moved_ns = time.monotonic_ns()
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


Live = Mapping[int, Generation]
"""Unfinished generations, by request."""


def deliver(live: Live, record: StepRecord, num_parts: int) -> None:
    """Gives each row's tokens, log-probabilities of its prompt and pooled vector to its generation.

    Args:
        num_parts: that were sent before it, with all of its tokens: it releases the last one of each row.
    """
    plan, result = record.plan, record.result
    if num_parts:
        for request_id in plan.request_ids:
            if (generation := live.get(request_id)) is not None:
                generation.push((), ())
    else:
        _push_tokens(live, plan.request_ids, record.tokens, record.logprobs, is_part=False)
    _push_rest(live, plan.request_ids, plan.starts, result.prompt_logprobs, result.pooled)
    if plan.drafts:
        _count_drafts(live, record)


def deliver_part(live: Live, outputs: StepOutputs) -> None:
    """Gives the outputs of a part of a step to the generations."""
    _push_tokens(live, outputs.request_ids, outputs.token_ids, outputs.logprobs, is_part=True)
    _push_rest(live, outputs.request_ids, outputs.starts, outputs.prompt_logprobs, outputs.pooled)


def _push_tokens(live: Live, request_ids: Sequence[int], tokens: Sequence[Tokens], logprobs: Sequence[Logprobs], *,
                 is_part: bool) -> None:
    for request_id, row, row_logprobs in zip(request_ids, tokens, logprobs or ((),) * len(tokens), strict=False):
        if row and (generation := live.get(request_id)) is not None:
            generation.push(row, row_logprobs, is_part=is_part)


def _push_rest(live: Live, request_ids: Sequence[int], starts: Sequence[int], prompt_logprobs: Sequence[Logprobs],
               pooled: Sequence[bytes]) -> None:
    for request_id, start, logprobs in zip(request_ids, starts, prompt_logprobs, strict=False):
        if logprobs and (generation := live.get(request_id)) is not None:
            generation.push_prompt(start, logprobs)
    for request_id, vector in zip(request_ids, pooled, strict=False):
        if vector and (generation := live.get(request_id)) is not None:
            generation.pooled = vector


def _count_drafts(live: Live, record: StepRecord) -> None:
    plan = record.plan
    for request_id, start, drafts, tokens in zip(
            plan.request_ids, plan.starts, plan.drafts, record.result.tokens, strict=True):
        generation = live.get(request_id) if drafts and tokens else None
        if generation is not None and generation.num_prompt:
            generation.verified(start + 1 - generation.num_prompt, len(drafts), len(tokens) - 1)


class LiveGenerations:
    """Unfinished generations by request, and the requests finished in this process that the engine still has."""

    def __init__(self) -> None:
        self._live: dict[int, Generation] = {}
        self._leaving: dict[int, tuple[str, str]] = {}  # -> name and reason
        self._names: set[str] = set()  # of both; unnamed requests have none
        self._idle = asyncio.Event()  # none is unfinished
        self._idle.set()

    @property
    def num_live(self) -> int:
        """Unfinished generations."""
        return len(self._live)

    def __len__(self) -> int:
        """Requests that the engine has."""
        return len(self._live) + len(self._leaving)

    def has_name(self, name: str) -> bool:
        return name in self._names

    def add(self, generation: Generation) -> None:
        self._live[generation.request_id] = generation
        if generation.name:
            self._names.add(generation.name)
        self._idle.clear()

    def finish(self, generation: Generation, reason: str) -> None:
        """Ends an unfinished generation before the engine does."""
        self._forget(generation.request_id)
        self._leaving[generation.request_id] = (generation.name, reason)
        generation.end(reason)

    def deliver(self, outputs: StepOutputs) -> None:
        """Gives the outputs of a part of a step to the generations."""
        deliver_part(self._live, outputs)

    def stepped(self, record: StepRecord, num_parts: int) -> None:
        """Gives the outputs of a step to the generations, and ends those that it ends.

        Args:
            num_parts: of its outputs, that were delivered before.
        """
        live = self._live
        deliver(live, record, num_parts)
        for request_id, num_cached in record.admitted:
            if (generation := live.get(request_id)) is not None:
                generation.moved_ns = record.started_ns
                if generation.num_cached < 0:
                    generation.num_cached = num_cached
        for request_id, _, _ in record.preempted:
            if (generation := live.get(request_id)) is not None:
                generation.moved_ns = record.started_ns
        for row in record.ended:
            if (generation := live.get(row.request_id)) is not None:
                self._forget(row.request_id)
                self._names.discard(generation.name)
                generation.end(row.reason, row.message)
            elif (left := self._leaving.pop(row.request_id, None)) is not None:
                self._names.discard(left[0])

    async def end_within(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for the unfinished generations, then aborts them."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for generation in list(self._live.values()):
                generation.finish("abort")

    def lost(self, message: str) -> dict[int, str]:
        """Ends all with an error, for the engine is lost.  Returns the requests that it had, and why each ended."""
        lost = dict.fromkeys(self._live, "error") | {number: reason for number, (_, reason) in self._leaving.items()}
        for generation in self._live.values():
            generation.end("error", message)
        self._live.clear()
        self._leaving.clear()
        self._names.clear()
        self._idle.set()
        return lost

    def _forget(self, request_id: int) -> None:
        del self._live[request_id]
        if not self._live:
            self._idle.set()
