"""Decode runs: steps of the same decoding rows in which the scheduler has nothing to decide.

A simulator takes them without a plan each.  Every row computes one token, blocks suffice, nothing can join, and only
the last step may end requests:

    step        k        k + 1    k + 2             k + n - 1
    rows        a b c    a b c    a b c    ...      a b c
    blocks               c                          a           appended, and published when they are full
    ends                                              b

`DecodeRun.commit` leaves the state that as many calls of `Scheduler.schedule` and `commit` would, to the order of the
blocks in the pool: what a step changes is changed step by step, in the order of the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slotwise.core.host_cache import Copies
from slotwise.core.request import Request
from slotwise.core.request_table import RequestTable
from slotwise.core.step import Decision, NewBlocks, RowKind, Stop
from slotwise.core.step_time import Work

Ended = tuple[Request, str]  # and its finish reason


class Outputs(NamedTuple):
    """The tokens that a run's rows sample: of each row, and as columns of each step, like `StepResult.tokens`."""

    rows: Sequence[Sequence[int]]
    steps: Sequence[tuple[tuple[int, ...], ...]]


class Changes(NamedTuple):
    """What one step of a run changes beside the rows' tokens."""

    released_slots: tuple[int, ...]
    new_blocks: tuple[NewBlocks, ...]
    copies: Copies
    ended: Sequence[Ended]


class DecodeRun:
    """At most `length` steps of `requests`, a row each; of the steps planned before `until`.

    Args:
        requests: running ones, in the order of a plan's rows; each is to compute its last known token.
        refused: of each step's plan.
        stop: likewise.
    """

    def __init__(
        self, table: RequestTable, requests: Sequence[Request], refused: Sequence[Decision] = (),
        stop: Stop | None = None,
    ) -> None:
        self.requests = tuple(requests)
        self.request_ids = tuple([request.request_id for request in requests])
        self.slots = tuple([request.slot for request in requests])
        self.starts = tuple([request.num_scheduled for request in requests])
        self.counts, self.kinds = (1,) * len(requests), (RowKind.DECODE,) * len(requests)
        self.refused, self.stop = tuple(refused), stop
        self.until = table.waiting.next_moment if table.waiting else float("inf")  # seconds
        self._table = table
        self._context = sum(self.starts) + len(self.starts)
        self._longest = max(self.starts) + 1
        self.length = self._affordable(min(map(_left, requests)))

    def work(self, index: int) -> Work:
        """Returns the work of a step."""
        rows = len(self.starts)
        return Work(rows, rows, self._context + rows * index, 0.0, self._longest + index)

    def end_at_stops(self, rows: Sequence[Sequence[int]]) -> None:
        """Shorten the run to the first token that may end a row, given the tokens of each."""
        for request, tokens in zip(self.requests, rows, strict=True):
            if request.stop_ids:
                stops = (index for index, token in enumerate(tokens) if token in request.stop_ids)
                self.length = min(self.length, 1 + next(stops, self.length))

    def commit(self, number: int, outputs: Outputs, *, each: bool) -> Iterator[tuple[int, Changes]]:
        """Take the first `number` steps; yields the index of each and what it changes.  The caller ends the `ended`.

        Args:
            each: else only of the last.
        """
        kv, last = self._table.kv, number - 1
        extended, full = self._extended(number), self._full(number)
        for request, tokens in zip(self.requests, outputs.rows, strict=True):
            request.tokens += tokens[:last]
            request.num_scheduled += number
        for index in range(number) if each else sorted({last, *extended, *full}):
            new_blocks: list[NewBlocks] = []
            for row in extended.get(index, ()):
                new_blocks += kv.extend(self.requests[row], self.starts[row] + index + 1) or ()
            released, copies = self._table.pop_released_slots(), kv.host.pop_copies()
            for row in full.get(index, ()):
                self.requests[row].num_computed = self.starts[row] + index + 1
                kv.advance(self.requests[row])
            ended = self._last(number, outputs) if index == last else ()
            if each or index == last:
                yield index, Changes(released, tuple(new_blocks), copies, ended)

    def _last(self, number: int, outputs: Outputs) -> list[Ended]:
        """Append the tokens of the last step.  Returns the requests that these end."""
        ended = []
        for request, start, tokens in zip(self.requests, self.starts, outputs.rows, strict=True):
            request.num_computed = start + number
            request.pending = 1
            _, reason = request.append((tokens[number - 1],))
            if reason:
                ended.append((request, reason))
        return ended

    def _affordable(self, length: int) -> int:
        """Returns for how many of `length` steps there are enough blocks."""
        kv = self._table.kv
        available = kv.pool.num_available
        if len(self.requests) * len(self.requests[0].tables) * (length // kv.block_size + 1) <= available:
            return length
        extended = self._extended(length)
        for index in sorted(extended):
            available -= len(extended[index]) * len(self.requests[0].tables)
            if available < 0:
                return index
        return length

    def _extended(self, number: int) -> dict[int, list[int]]:
        """By step, the rows that need a block."""
        size = self._table.kv.block_size
        rows: defaultdict[int, list[int]] = defaultdict(list)
        for row, request in enumerate(self.requests):
            for index in range(request.capacity - self.starts[row], number, size):
                rows[index].append(row)
        return rows

    def _full(self, number: int) -> dict[int, list[int]]:
        """By step, the rows that fill a block."""
        size = self._table.kv.block_size
        rows: defaultdict[int, list[int]] = defaultdict(list)
        for row, request in enumerate(self.requests):
            for index in range(request.advance_at - self.starts[row] - 1, number, size):
                rows[index].append(row)
        return rows


def is_decoding(request: Request) -> bool:
    """Whether it computes its last known token next, which it has sampled since it joined."""
    return (len(request.tokens) - request.num_scheduled == 1 and request.num_scheduled >= request.num_at_join
            and not request.pending and not request.reason)


def _left(request: Request) -> int:
    """Returns the steps until a decoding request has its last token, if no token ends it before."""
    left = request.end - len(request.tokens)
    return min(left, request.expected_tokens - request.num_output) if request.expected_tokens else left
