"""Delivers one request's tokens to its consumer.

A slow consumer receives several steps' tokens in one chunk, so its cost falls as its process becomes busier.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slotwise.core.step import TokenLogprobs

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
        """Notes that drafts were verified behind `num_output` tokens of output, of which the first `num_right` hold."""
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
