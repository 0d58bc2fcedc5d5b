"""Real steps before an engine is ready: a check that it computes, and the first data of its step-time model.

Both run on a throwaway scheduler over the real executor, and leave all slots and blocks free.

`check_steps` stops the start where a kernel computes wrongly, weights overflow or a device fails.  `warmup` fits the
initial step-time model: a new engine has measured no step, and after a burst at its start no small one, so it could not
predict the time of a single row.  Rooflines ignore kernel launches and caches that hold half of the weights; a few
small, fast steps are cheaper than a model of those.  Its first stage is the largest, and the model does not learn from
it: its steps are the first to touch their memory, a cost that no later step has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from slotwise.core.disciplines.disciplines import Chunked
from slotwise.core.interfaces import DraftRow, Due, Proposal, Proposer
from slotwise.core.params import MEAN, PoolingSpec, SamplingSpec
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.record import Proposing
from slotwise.core.request import Request, RequestSpec
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import StepTimeModel, Work, work_of
from slotwise.engine.engine import Clock, Engine
from slotwise.engine.executor import Executor
from slotwise.engine.messages import Add, Finish
from slotwise.errors import OneLineError

ANY_TOKEN = 0
PROMPT = 16  # tokens of the prompt that `check_steps` computes, at most
KINDS = (  # the two paths through a sampler; the second token comes from a decode step
    SamplingSpec(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingSpec(temperature=1.0, max_tokens=1, logprobs=1, ignore_eos=True))
VECTOR = SamplingSpec(max_tokens=None)  # of a request for one
OVERFLOW = ("its logits are NaN or infinite: a kernel computes wrongly, or the model's numbers are too large for its "
            "type; try --dtype float32")

COLD = (16, 64, 2)  # decode rows, tokens of a prompt next to them in the last step, steps before it
STAGES = ((1, 16, 4), (4, 64, 4), (12, 0, 4), (1, 0, 16))  # as `COLD`; the first step of a row count captures a graph
DRAFTS = ((1, 7), (1, 15), (1, 3), (4, 3), (8, 3))  # decode rows, and drafts of each, in steps of speculative decoding
DRAFT_STEPS = 3  # of each of these; the first may capture a graph, and the model does not learn from it
SECONDS = 1.0  # after which no further step starts
OUTPUT = 160  # tokens that a row may grow by: more than all steps yield


class FirstStepError(OneLineError, RuntimeError):
    """The engine cannot compute; the message says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the first step failed: {why}")


def check_steps(executor: Executor, limits: SchedulerLimits, clock: Clock) -> None:
    """Runs a prompt and decode steps, greedy and sampled, on an executor that serves no request yet.

    Raises:
        FirstStepError: a step failed, or its logits were not finite.
    """
    longest = min(limits.block_size + 1, limits.max_model_len)
    if longest < 2:  # then no request can run
        return
    prompt = max(1, min(PROMPT, longest - 2))
    engine = _engine(executor, clock, SchedulerLimits(
        max_model_len=longest, num_blocks=len(limits.windows), block_size=limits.block_size, max_num_seqs=1,
        max_num_batched_tokens=prompt, windows=limits.windows, max_chunk=prompt,
        whole_prompts=limits.whole_prompts))
    for number, params in enumerate((VECTOR,) if limits.whole_prompts else KINDS):
        engine.handle(Add(number, _spec(limits, prompt, params)))
        num_tokens = 0
        while engine.has_work:
            try:
                record = engine.step()
            except Exception as error:
                raise FirstStepError(f"{type(error).__name__}: {error}") from error
            if record.outcome.failure or record.result.failed:
                raise FirstStepError(record.outcome.failure or OVERFLOW)
            num_tokens += sum(map(len, record.tokens)) + len(record.result.pooled)
        if not num_tokens:
            raise FirstStepError("it yielded no token")
        engine.step()  # its plan releases the slot


def warmup(
    executor: Executor, limits: SchedulerLimits, clock: Clock, seconds: float = SECONDS, *, drafts: bool = False,
) -> StepTimeModel:
    """Returns a model of this executor's step times.

    Stops at a step that fails: the first served step meets the same failure and reports it.

    Args:
        drafts: rows will have drafts.
    """
    times, ends = StepTimeModel(), clock() + round(seconds * 1e9)
    rows = _Rows(executor, limits, clock)
    if rows.play(COLD, StepTimeModel(), lambda: clock() < ends):
        for stage in STAGES:
            if not rows.play(stage, times, lambda: clock() < ends):
                break
        ends += round(seconds / 2 * 1e9)
        for num_rows, num_drafts in DRAFTS if drafts else ():
            rows.drafts.number = num_drafts
            if not (rows.play((num_rows, 0, 1), StepTimeModel(), lambda: clock() < ends)
                    and rows.play((num_rows, 0, DRAFT_STEPS - 1), times, lambda: clock() < ends)):
                break
    rows.leave()
    return times


def _spec(limits: SchedulerLimits, num_tokens: int, params: SamplingSpec) -> RequestSpec:
    """A request that samples or, of a model that computes whole prompts, one for a vector."""
    prompt = (ANY_TOKEN,) * num_tokens
    return RequestSpec(prompt, VECTOR, pooling=PoolingSpec(MEAN)) if limits.whole_prompts else RequestSpec(
        prompt, params)


def _engine(executor: Executor, clock: Clock, limits: SchedulerLimits, proposer: Proposer | None = None) -> Engine:
    return Engine(Scheduler(limits, Chunked(), FirstComeFirstServed(), proposer=proposer), executor, clock)


class _Drafts:
    """Proposes `number` drafts for each row, right or wrong."""

    def __init__(self) -> None:
        self.number = 0

    def due(self, requests: Sequence[Request]) -> Due:
        return Due(range(len(requests)), "")

    def propose(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> Proposal:
        number = min(self.number, most // len(rows))
        return Proposal([(ANY_TOKEN,) * min(row.limit, number) for row in rows], "")

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return 0.0

    def waits(self, request: Request) -> bool:
        return False

    def committed(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], proposing: Proposing | None = None,
    ) -> None:
        """Nothing is learned."""

    def finished(self, request: Request) -> None:
        """Nothing is kept."""


class _Rows:
    """Runs decode rows and prompts on an engine of their own."""

    def __init__(self, executor: Executor, limits: SchedulerLimits, clock: Clock) -> None:
        self.drafts = _Drafts()
        self._engine = _engine(executor, clock, replace(
            limits, enable_prefix_caching=False, max_step_ms=None, max_stall_ms=None, tiers=(), stages=1), self.drafts)
        self._limits = limits
        self._decoding: list[int] = []  # ids of the decode rows
        self._num_added = 0

    def play(self, stage: tuple[int, int, int], times: StepTimeModel, goes_on: Callable[[], bool]) -> bool:
        """Runs one stage, from which `times` learns; returns whether all its steps ran."""
        rows, prompt, steps = stage
        rows = min(rows, max(1, self._limits.max_num_seqs - 1))
        if self._limits.whole_prompts:
            return all(self._prompts(rows, max(prompt, PROMPT), times, goes_on) for _ in range(steps))
        while len(self._decoding) > rows:
            self._engine.handle(Finish(self._decoding.pop(), "abort"))
        while len(self._decoding) < rows:
            self._decoding.append(self._add(1, OUTPUT))
        if not all(self._step(times, goes_on) for _ in range(steps)):
            return False
        if not prompt or rows == self._limits.max_num_seqs:
            return True
        self._add(prompt, 1)
        return self._step(times, goes_on)

    def _prompts(self, rows: int, prompt: int, times: StepTimeModel, goes_on: Callable[[], bool]) -> bool:
        """Runs a step of prompts that are computed whole; returns whether it ran."""
        for _ in range(rows):
            self._add(prompt, 1)
        return self._step(times, goes_on)

    def leave(self) -> None:
        for number in range(self._num_added):
            self._engine.handle(Finish(number, "abort"))
        self._engine.step()  # its plan releases the slots

    def _add(self, num_tokens: int, max_tokens: int) -> int:
        longest = self._limits.max_model_len - 1
        request_id = self._num_added
        self._num_added += 1
        params = SamplingSpec(temperature=0.0, max_tokens=min(max_tokens, longest), ignore_eos=True)
        self._engine.handle(Add(request_id, _spec(self._limits, min(num_tokens, longest), params)))
        return request_id

    def _step(self, times: StepTimeModel, goes_on: Callable[[], bool]) -> bool:
        """Runs one step, from which `times` learns; returns whether it ran."""
        if not goes_on():
            return False
        record = self._engine.step()
        if record.outcome.failure or not record.plan.counts:
            return False
        work = work_of(record.plan.starts, record.plan.counts, drafts=record.plan.drafts)
        times.step(work, record.started_ns * 1e-9, record.ended_ns * 1e-9)
        return True
