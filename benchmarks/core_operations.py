"""A million random operations on the scheduler, over an executor whose cache shows every wrong block.

    python -m benchmarks.core_operations [--operations N] [--seed N]

Operations arrive in *lives* of 500, each with its own limits, discipline, policy, cache groups and proposer of drafts:
requests are added and aborted, steps planned, committed and failed, blocks found on disk and read, or late, time jumps,
settings change.  Checked throughout:

 1. Requests, slots and blocks are conserved, after every plan, commit and failure, on the device and on the host.
 2. A row reads its own request's keys and values, and no other (`engine.executor.FakeExecutor`).
 3. A step keeps its token budget; a row with drafts is in no other step before its commit, nor, where a model has
    stages, is any row that samples.
 4. Every request ends once, with the tokens that it would have alone and without drafts.
 5. A life comes to an end, and afterwards every block is free.
 6. The same seed gives the same plans; every tenth life is lived twice.

A violation ends the run with the seed of its life.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from math import inf
from random import Random

from benchmarks.commands import parser_of
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.disciplines.disciplines import Chunked
from slotwise.core.interfaces import DraftRow, Due, Proposal
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.record import PrefixOnDisk, Proposing, ReceivedBlocks, RequestEnd, StepPlan, Tokens
from slotwise.core.request import Request, RequestSpec
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import ERROR, EVICTION_POLICIES, RECOMPUTE, SLO, SchedulerLimits, Tier
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.engine.executor import FakeExecutor

VOCABULARY, END = 23, 0
OPERATIONS = 500  # of a life
MOST_STEPS = 5000  # until a life has ended
TWICE = 10  # one life in so many is lived twice
BATCHINGS = (
    Batching(), Batching(), Batching(), Batching(prefill="inline"), Batching(prefill="alone"), Batching("orca"),
    Batching("static"), Batching("dynamic", max_wait_ms=2000), Batching("one_at_a_time"))
ORDERINGS = (
    Ordering(), Ordering("priority", ageing=5.0), Ordering("shortest"), Ordering("fair"), Ordering("program"),
    Ordering("deadline", ageing=30.0, default_ttft_ms=20_000.0),
    Ordering("deadline", default_ttft_ms=30_000.0, shed_late=True))
TIERS = (Tier("gold", slots=1, weight=2.0), Tier("bulk"))
BEGINNINGS = ([], [3] * 12, [3] * 6 + [7] * 6, list(range(1, 17)))


class LawBroken(AssertionError):
    """A law of the core does not hold."""


def require(law: str, *, holds: bool) -> None:
    if not holds:
        raise LawBroken(law)


def next_token(context: Sequence[int]) -> int:
    return zlib.crc32(bytes(context)) % VOCABULARY


def alone(request: Request, limits: SchedulerLimits) -> list[int]:
    """Returns the output of a request that runs alone, without a scheduler."""
    tokens, end = list(request.tokens), limits.longest(request.num_prompt, request.spec.params.max_tokens)
    while len(tokens) < end:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_ids and len(tokens) - request.num_prompt >= request.spec.params.min_tokens:
            break
    return tokens[request.num_prompt :]


class Guesses:
    """A proposer that is right in a share of its tokens."""

    def __init__(self, seed: int, share: float) -> None:
        self._seed = seed
        self._share = share

    def due(self, requests: Sequence[Request]) -> Due:
        return Due(range(len(requests)), "")

    def propose(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> Proposal:
        drafts: list[tuple[int, ...]] = []
        for row in rows:
            drafts.append(self._draft(row.request, min(row.limit, most)))
            most -= len(drafts[-1])
        return Proposal(drafts, "")

    def _draft(self, request: Request, most: int) -> tuple[int, ...]:
        known, draw = list(request.tokens), Random(zlib.crc32(bytes(request.tokens), self._seed))
        for _ in range(min(most, draw.randint(0, 5))):
            known.append(next_token(known) if draw.random() < self._share else draw.randrange(VOCABULARY))
        return tuple(known[len(request.tokens) :])

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return 0.0

    def waits(self, request: Request) -> bool:
        return Random(zlib.crc32(bytes(request.tokens), self._seed)).random() < 0.5

    def committed(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], proposing: Proposing | None = None,
    ) -> None:
        """It learns nothing."""

    def finished(self, request: Request) -> None:
        """It keeps nothing."""


def drawn_limits(draw: Random) -> SchedulerLimits:
    slots, block_size, windows = draw.randint(2, 6), draw.randint(1, 5), draw.choice(((0,), (0,), (0, 6)))
    return SchedulerLimits(
        max_model_len=draw.randint(20, 48), num_blocks=draw.randint(25, 70) * len(windows) // block_size,
        block_size=block_size, max_num_seqs=slots, max_num_batched_tokens=slots + draw.randint(0, 20),
        enable_prefix_caching=draw.random() < 0.8, watermark_blocks=draw.randint(0, 2), max_passes=draw.randint(0, 4),
        on_pressure=draw.choice((RECOMPUTE, RECOMPUTE, RECOMPUTE, ERROR)), num_host_blocks=draw.choice((0, 3, 40)),
        stages=draw.choice((1, 1, 2, 3)), windows=windows, max_chunk=4,
        eviction_policy=draw.choice(EVICTION_POLICIES),
        tenant_cache_share=draw.choice((0.0, 0.5, 1.0)))


class Life:
    """One scheduler from its first operation to the end of its last request."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self._draw = draw = Random(seed)
        self._seen = seen
        self._limits = limits = drawn_limits(draw)
        self._discipline = draw.choice(BATCHINGS).discipline(limits.max_num_seqs)
        times = StepTimeModel()
        proposer = Guesses(draw.getrandbits(32), draw.random()) if draw.random() < 0.7 else None
        self._scheduler = Scheduler(
            limits, self._discipline, draw.choice(ORDERINGS).policy((), times), times, proposer)
        self._executor = FakeExecutor(limits.block_size, next_token, windows=limits.windows)
        self._has_disk = not any(limits.windows) and draw.random() < 0.6
        self._looked_up: list[PrefixOnDisk] = []  # prefixes that the disk is about to find
        self._in_flight: list[StepPlan] = []
        self._expected: dict[str, list[int]] = {}
        self._output: dict[str, list[int]] = {}
        self._ended: dict[str, str] = {}
        self._now = 0.0
        self.digest = blake2b(digest_size=16)  # of all plans

    def live(self) -> None:
        operations = (self._add, self._step, self._abort, self._fail, self._jump, self._configure, self._read)
        for _ in range(OPERATIONS):
            self._draw.choices(operations, (16, 74, 5, 1, 3, 1, 20 if self._has_disk else 0))[0]()
        for _ in range(MOST_STEPS):
            if not self._scheduler.has_work:
                break
            if not self._in_flight:
                self._schedule()
            self._commit()
        require("a life comes to an end", holds=not self._scheduler.has_work)
        require("every block is free at the end", holds=self._scheduler.num_free_blocks == self._limits.num_blocks)
        require("every request ends", holds=self._ended.keys() == self._expected.keys())
        for name, reason in self._ended.items():
            got, wanted = self._output.get(name, []), self._expected[name]
            whole = reason in ("stop", "length")
            require("the tokens are those of a request alone", holds=got == (wanted if whole else wanted[: len(got)]))

    # -- operations ----------------------------------------------------------------------------------------------

    def _add(self) -> None:
        draw, name = self._draw, len(self._expected)
        prompt = draw.choice(BEGINNINGS) + [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
        slo = SLO(draw.choice("abc"), draw.choice(("", "gold", "bulk")), draw.randint(-2, 2),
                  draw.choice((None, 3.0, 60.0)), draw.choice((None, None, None, 1.0)))
        params = SamplingSpec(max_tokens=draw.randint(1, 20), min_tokens=draw.choice((0, 0, 1)))
        spec = RequestSpec(prompt, params, salt=draw.choice(("", "", "other")), slo=slo,
                           session=draw.choice(("", "x", "y")), retain=draw.choice((0.0, 0.0, 30.0)))
        request = Request(name, spec, (END,))
        request.deadline = self._now + draw.choice((inf, inf, inf, inf, 20.0, 0.0))
        self._expected[name] = alone(request, self._limits)
        self._scheduler.add(request, self._now)
        on_disk = draw.randint(0, len(prompt) // self._limits.block_size)
        if self._has_disk and on_disk:
            self._looked_up.append(PrefixOnDisk(name, on_disk, draw.choice((4.0, 40.0))))
        self._fold()

    def _step(self) -> None:
        if len(self._in_flight) <= self._limits.max_in_flight and (not self._in_flight or self._draw.random() < 0.5):
            self._schedule()
        else:
            self._commit()

    def _schedule(self) -> None:
        plan = self._scheduler.schedule(self._now)
        self._scheduler.check()
        counts = [count for row, count in enumerate(plan.counts) if row not in plan.held]
        if not isinstance(self._discipline, Chunked):
            counts = counts[:-1]  # a prompt that is not cut may exceed the budget
        require("a step keeps its token budget", holds=sum(counts) <= self._discipline.budget(self._limits))
        for before in self._in_flight:
            samples = before.num_logits if self._limits.stages > 1 else map(len, before.drafts)
            apart = {name for name, some in zip(before.request_ids, samples, strict=False) if some}
            apart -= {before.request_ids[row] for row in before.held}
            require("a row whose tokens are not known is in one step", holds=apart.isdisjoint(plan.request_ids))
        self.digest.update(repr(plan).encode())
        self._seen["rows with drafts"] += sum(map(bool, plan.drafts))
        self._seen["blocks taken back"] += sum(freed.num_blocks for freed in plan.freed_blocks)
        self._seen["blocks loaded from the host"] += len(plan.loads)
        self._executor.submit(plan)
        self._in_flight.append(plan)
        self._seen["preemptions"] += len(plan.preempted)
        self._seen["cached tokens"] += sum(admission.num_cached for admission in plan.admitted)
        self._fold()

    def _commit(self) -> None:
        self._now += 1.0
        plan, result = self._in_flight.pop(0), self._executor.collect()
        for drafts, tokens in zip(plan.drafts, result.tokens, strict=False):
            self._seen["drafts"] += len(drafts)
            self._seen["drafts accepted"] += max(0, len(tokens) - 1)
        outcome = self._scheduler.commit(plan, result, self._now)
        self._scheduler.check()
        self._publish(plan, result.tokens if outcome.tokens is None else outcome.tokens)
        self._fold(outcome.ended)
        self._seen["steps"] += 1

    def _fail(self) -> None:
        """The forward pass in flight fails; its requests run again, or end, as they do in an engine."""
        for _ in self._in_flight:
            self._executor.collect()
        self._in_flight.clear()
        for name in self._scheduler.rollback():
            if self._draw.random() < 0.5:
                self._scheduler.finish(name, "error", self._now)
        self._scheduler.check()
        self._seen["failed steps"] += 1
        self._fold()

    def _abort(self) -> None:
        self._scheduler.finish(self._draw.randrange(len(self._expected) + 1), "abort", self._now)
        self._fold()

    def _read(self) -> None:
        """The disk finds the beginnings of new prompts, and has read blocks of those that wait for them."""
        draw, scheduler, size = self._draw, self._scheduler, self._limits.block_size
        for found in self._looked_up:
            scheduler.found_on_disk(found, self._now)
        self._looked_up.clear()
        for request in list(scheduler.transfers.receiving()):
            num_read = draw.randint(scheduler.transfers.first_missing(request), request.num_on_disk)
            self._executor.write(request.tokens[: num_read * size], request.blocks)
            is_last = num_read == request.num_on_disk or draw.random() < 0.1  # the rest cannot be read
            scheduler.received(ReceivedBlocks(request.request_id, num_read, is_last), self._now)
            self._seen["blocks read from disk"] += num_read
        scheduler.check()

    def _jump(self) -> None:
        self._now += self._draw.choice((0.0, 0.5, 10.0))

    def _configure(self) -> None:
        draw = self._draw
        slots = draw.randint(2, max(2, self._limits.max_num_seqs))
        self._limits = replace(
            self._limits, tiers=draw.choice(((), TIERS)), max_step_ms=draw.choice((None, 900.0, 4000.0)),
            eviction_policy=draw.choice(EVICTION_POLICIES), max_stall_ms=draw.choice((None, 700.0)), max_num_seqs=slots,
            max_num_batched_tokens=slots + draw.randint(0, 20))
        self._discipline = draw.choice(BATCHINGS).discipline(slots)
        policy = draw.choice(ORDERINGS).policy(self._limits.tiers, self._scheduler.times)
        self._scheduler.configure(self._limits, self._discipline, policy, self._now)

    def _publish(self, plan: StepPlan, tokens: Sequence[Tokens]) -> None:
        for name, published in zip(plan.request_ids, tokens, strict=True):
            require("an ended request gets no tokens", holds=name not in self._ended or not published)
            self._output.setdefault(name, []).extend(published)

    def _fold(self, ended: Sequence[RequestEnd] = ()) -> None:
        for end in (*ended, *self._scheduler.pop_ended()):
            require("a request ends once", holds=end.request_id not in self._ended)
            self._ended[end.request_id] = end.reason
            self._seen[f"ended: {end.reason}"] += 1


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000, help="in lives of 500")
    parser.add_argument("--seed", type=int, default=1, help="of the first life; the next ones follow")
    asked = parser.parse_args()
    seen: Counter[str] = Counter()
    lives = range(asked.seed, asked.seed + max(1, asked.operations // OPERATIONS))
    for seed in tqdm(lives, desc="    lives", mininterval=2.0):
        try:
            life = Life(seed, seen)
            life.live()
            if seed % TWICE == 0:
                again = Life(seed, Counter())
                again.live()
                require("the same seed gives the same plans", holds=again.digest.digest() == life.digest.digest())
        except Exception:
            print(f"life {seed}", file=sys.stderr)
            raise
    table = Table(title=f"{len(lives) * OPERATIONS:,} operations in {len(lives):,} lives, no law broken")
    table.add_column("seen")
    table.add_column("times", justify="right")
    for name, count in sorted(seen.items()):
        table.add_row(name, f"{count:,}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
