"""What becomes of a step's results: tokens are appended, blocks freed, requests end, the step-time model learns.

    sampled tokens ─► accepted by the request ─► held with its batch, or out ─► Committed, Finished

A request that ended after its row was planned keeps nothing of it; a row that was preempted since then keeps its
tokens, and their positions are computed again.
"""

from __future__ import annotations

from itertools import repeat

from slotwise.core.drafting import Drafting
from slotwise.core.events import Committed
from slotwise.core.held_outputs import outputs_of
from slotwise.core.plan_builder import InFlight
from slotwise.core.request import Request
from slotwise.core.request_table import RequestTable
from slotwise.core.step import StepPlan, StepResult
from slotwise.core.step_time import StepTimeModel, work_of

Kept = dict[int, tuple[int, ...]]
"""By row: the tokens kept, where these are not all that was sampled."""
Ended = list[tuple[Request, str]]
"""Requests, and the reasons for which they end."""


class Commits:
    """Applies results to the requests of a table.

    Args:
        times: is trained where a commit is to.
    """

    def __init__(self, table: RequestTable, drafting: Drafting, times: StepTimeModel) -> None:
        self._table = table
        self._drafting = drafting
        self._times = times

    def apply(self, step: InFlight, result: StepResult, now: float, *, together: bool, learns: bool) -> None:
        """Apply the result of a step.

        Args:
            together: the requests of a batch leave together.
            learns: the step-time model is needed, whether drafts need it or not.
        """
        plan = step.plan
        kept, ended = self._append(step, result)
        for request, forced in zip(step.requests, result.forced, strict=False):
            request.forced = (len(request.tokens), forced)
        failed = dict(step.failed(result)) if result.failed else {}
        ended += [(request, "rejected" if objection else "error") for request, objection in failed.items()]
        done = result.executed(plan)
        self._drafting.committed(step.requests, done.drafts, result.proposing)
        if learns or self._drafting.needs_step_times:
            self._learn(done, result, now)
        self._table.policy.served(step.requests, done.counts, result.tokens)
        outputs = outputs_of(plan, result, kept)
        if together or self._table.held_outputs or plan.held:  # a pooled row holds no output
            outputs, ended = self._table.hold(outputs, ended, plan, together=together)
        self._table.events.append(Committed(
            now, plan.step, tuple(outputs.request_ids), tuple(outputs.tokens), tuple(outputs.logprobs)))
        for request, reason in ended:
            self.end(request, reason, now, failed.get(request, ""))

    def end(self, request: Request, reason: str, now: float, message: str = "") -> None:
        """Finish an unfinished request."""
        self._table.end(request, reason, now, message)
        self._drafting.finished(request)

    def _append(self, step: InFlight, result: StepResult) -> tuple[Kept, Ended]:
        """Append each row's tokens to its request, and advance what is computed."""
        plan, kept, ended = step.plan, Kept(), Ended()
        num_drafts = map(len, plan.drafts) if plan.drafts else repeat(0)
        rows = zip(step.requests, step.epochs, plan.counts, num_drafts, result.tokens, strict=False)
        for row, (request, epoch, count, drafted, tokens) in enumerate(rows):
            if request.reason:  # finished or held since it was planned
                kept[row] = ()
                continue
            accepted, reason = request.append(tokens, drafted) if tokens else ((), "")
            if not tokens and request.pooling is not None and row not in result.failed:
                reason = request.pool(plan.starts[row] + count)
            if request.epoch == epoch:
                computed = len(accepted) if drafted else count
                request.num_computed += computed
                if request.num_computed >= request.advance_at:
                    self._table.kv.advance(request)
                if computed < count:
                    self._take_back(request, count - computed)
            if not accepted or accepted != tokens:
                kept[row] = accepted
            if reason:
                ended.append((request, reason))
        return kept, ended

    def _take_back(self, request: Request, number: int) -> None:
        """Take back `number` drafts of a row that were not accepted, and free the blocks behind the computed tokens."""
        request.num_scheduled -= number
        self._table.kv.truncate(request)

    def _learn(self, done: StepPlan, result: StepResult, now: float) -> None:
        """Train the model with the step as it was executed."""
        proposing = result.proposing.seconds if result.proposing else 0.0
        self._times.step(work_of(done.starts, done.counts, done.padding, done.drafts), done.now + proposing, now)
