"""A toy model and a driver for tests of the core: requests whose right answer is known without any engine."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from slotwise.core import record
from slotwise.core.disciplines.disciplines import Chunked
from slotwise.core.interfaces import Discipline, DraftRow, Due, Policy, Proposal, Proposer
from slotwise.core.params import PoolingSpec, SamplingSpec
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.record import NO_OUTCOME, PROPOSED, Outcome, StepPlan
from slotwise.core.request import NO_SLO, Request, RequestSpec
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SLO, SchedulerLimits
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import UNSUBMITTED, Add

VOCAB = 23
EOS = 0


def next_token(context: Sequence[int]) -> int:
    """Depends on every token before it, so one wrong token anywhere changes all that follow."""
    return zlib.crc32(bytes(context)) % VOCAB


def named(name: str, spec: RequestSpec) -> Add:
    """A request for a client, which gives it its id."""
    return Add(UNSUBMITTED, spec, name=name)


def alone(request: Request, limits: SchedulerLimits) -> list[int]:
    """The output this request must have, computed without a scheduler."""
    if request.spec.pooling is not None:
        return []
    tokens = list(request.tokens[: request.num_prompt])
    end = limits.longest(request.num_prompt, request.spec.params.max_tokens)
    while len(tokens) < end:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_ids and len(tokens) - request.num_prompt >= request.spec.params.min_tokens:
            break
    return tokens[request.num_prompt:]


@contextlib.contextmanager
def in_seed(seed: int) -> Iterator[None]:
    """A failure says which seed it needs."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"with the seed {seed}")
        raise


def scheduler(
    limits: SchedulerLimits, discipline: Discipline | None = None, policy: Policy | None = None,
    times: StepTimeModel | None = None, proposer: Proposer | None = None,
) -> Scheduler:
    return Scheduler(limits, discipline or Chunked(), policy or FirstComeFirstServed(), times, proposer)


def request(
    name: str, prompt: Sequence[int], max_tokens: int | None = 8, salt: str = "", slo: SLO = NO_SLO,
    pooling: PoolingSpec | None = None, **params: object,
) -> Request:
    asked = SamplingSpec(max_tokens=max_tokens, **params)
    return Request(name, RequestSpec(prompt, asked, salt=salt, slo=slo, pooling=pooling), (EOS,))


class Proposing:
    """A proposer that gives each row what `guess` finds, until the step's tokens are spent."""

    def guess(self, request: Request, most: int) -> list[int]:
        raise NotImplementedError

    def due(self, requests: Sequence[Request]) -> Due:
        return Due(range(len(requests)), "")

    def propose(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> Proposal:
        drafts = []
        for request, limit in rows:
            drafts.append(tuple(self.guess(request, min(limit, most))))
            most -= len(drafts[-1])
        return Proposal(drafts, "no_match")

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return 0.0

    def waits(self, request: Request) -> bool:
        return True

    def committed(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], proposing: record.Proposing | None = None,
    ) -> None:
        assert not drafts or len(requests) == len(drafts)

    def finished(self, request: Request) -> None:
        assert request.ended


class Guesses(Proposing):
    """A proposer that is right more often than not, and otherwise wrong; the history decides, as with a real one."""

    def __init__(self, seed: int, longest: int = 4) -> None:
        self._seed = seed
        self._longest = longest

    def guess(self, request: Request, most: int) -> list[int]:
        known, draw = list(request.tokens), Random(zlib.crc32(bytes(request.tokens), self._seed))
        for _ in range(min(most, draw.randint(0, self._longest))):
            known.append(next_token(known) if draw.random() < 0.8 else draw.randrange(VOCAB))
        return known[len(request.tokens):]

    def waits(self, request: Request) -> bool:
        return Random(zlib.crc32(bytes(request.tokens), self._seed)).random() < 0.5


class Placeholders(Guesses):
    """A proposer that leaves the drafts to the executor, which proposes up to as many of what `Guesses` would."""

    def propose(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> Proposal:
        drafts, reason = super().propose(rows, num_decoding, work, most)
        return Proposal([(PROPOSED,) * len(row) for row in drafts], reason)

    def named(self, known: Sequence[int], most: int) -> Sequence[int]:
        """Of the executor: often fewer than `most`."""
        draw, tokens = Random(zlib.crc32(bytes(known), self._seed + 1)), list(known)
        for _ in range(draw.randint(0, most)):
            tokens.append(next_token(tokens) if draw.random() < 0.8 else draw.randrange(VOCAB))
        return tokens[len(known):]


class Driver:
    """A scheduler and a fake executor, stepped by hand; remembers what was published and how everyone ended."""

    def __init__(
        self, limits: SchedulerLimits, discipline: Discipline | None = None, policy: Policy | None = None,
        times: StepTimeModel | None = None, proposer: Proposer | None = None,
    ) -> None:
        self.limits = limits
        self.discipline = discipline or Chunked()
        self.scheduler = scheduler(limits, self.discipline, policy, times, proposer)
        self.executor = FakeExecutor(
            limits.block_size, next_token, *([proposer.named] if isinstance(proposer, Placeholders) else []),
            windows=limits.windows)
        self.plans: list[StepPlan] = []
        self.flying: list[StepPlan] = []
        self.output: dict[str, list[int]] = {}
        self.pooled: dict[str, float] = {}
        self.ended: dict[str, str] = {}
        self.admitted: list[str] = []
        self.preempted: list[str] = []
        self.now = 0.0

    def add(self, new: Request) -> None:
        self.scheduler.add(new, self.now)
        self._fold()

    def finish(self, name: str, reason: str = "abort") -> None:
        self.scheduler.finish(name, reason, self.now)
        self._fold()

    def configure(
        self, discipline: Discipline, max_num_seqs: int, spare_tokens: int, policy: Policy | None = None,
    ) -> None:
        """Another discipline, other limits and perhaps another policy, from the next plan on."""
        self.limits = replace(
            self.limits, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + spare_tokens)
        self.discipline = discipline
        self.scheduler.configure(self.limits, discipline, policy or self.scheduler.policy, self.now)
        self._fold()

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        self._check_budget(plan)
        assert len(plan.slots) == len(set(plan.slots))
        assert not plan.new_requests or len(plan.slots) <= self.limits.max_num_seqs
        self.executor.submit(plan)
        self.plans.append(plan)
        self.flying.append(plan)
        self.admitted += [admission.request_id for admission in plan.admitted]
        self.preempted += [preemption.request_id for preemption in plan.preempted]
        self._fold()
        return plan

    def _check_budget(self, plan: StepPlan) -> None:
        """The last of those prompts that are not cut may exceed it, and so may rows held past a change.

        With a model that computes whole prompts, one prompt alone may.
        """
        budget = self.discipline.budget(self.limits)
        counts = [count for row, count in enumerate(plan.counts) if row not in plan.held]
        if not isinstance(self.discipline, Chunked) or (self.limits.whole_prompts and len(counts) == 1):
            counts = counts[:-1]
        assert sum(counts) <= budget, "over the token budget"

    def commit(self) -> None:
        self.now += 1.0
        plan, result = self.flying.pop(0), self.executor.collect()
        for name, vector in zip(plan.request_ids, result.pooled, strict=False):
            if vector:
                (self.pooled[name],) = struct.unpack("<f", vector)
        outcome = self.scheduler.commit(plan, result, self.now)
        self.scheduler.check()
        self._fold(plan, outcome, result.tokens if outcome.tokens is None else outcome.tokens)

    def run(self, most_steps: int = 10_000) -> None:
        """Plan and commit until everyone has ended.  Raises AssertionError if they do not: a livelock."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return
            if not self.flying:
                self.plan()
            self.commit()
        raise AssertionError(f"no end after {most_steps} steps: {list(self.scheduler.requests())}")

    def _fold(self, plan: StepPlan | None = None, outcome: Outcome = NO_OUTCOME, tokens: tuple = ()) -> None:
        if plan is not None:
            for name, published in zip(plan.request_ids, tokens, strict=True):
                if published:
                    assert name not in self.ended, f"{name} got tokens after its end"
                    self.output.setdefault(name, []).extend(published)
        for end in (*outcome.ended, *self.scheduler.pop_ended()):
            self._end(end.request_id, end.reason)

    def _end(self, name: str, reason: str) -> None:
        assert name not in self.ended, f"{name} ended twice"
        self.ended[name] = reason
