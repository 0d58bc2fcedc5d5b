"""An executor that computes nothing: its clock advances by the pace of each step, and tokens are known or fillers.

Where a model's layers are divided into stages, each takes the same share of a step's time, and computes steps in order:

    stage 0    | 1 | 2 | 3 |
    stage 1        | 1 | 2 | 3 |       step 2 is handed in while step 1 is in stage 1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf

from slotwise.core.step import StepPlan, StepResult
from slotwise.core.step_time import work_of
from slotwise.simulate.decode_run import DecodeRun
from slotwise.simulate.drafts import Verifier
from slotwise.simulate.pace import Pace

FILLER = 7  # the token that every row samples, where its output is not known
IDLE = 0.001  # seconds that a plan without rows takes
_FILLERS = (FILLER,)


class VirtualMachine:
    """An executor that advances its clock by the pace of each step.

    Args:
        outputs: output tokens by request id, where they are known.
        verifier: finds which drafts are right.
        stages: that the layers are divided into.
        adapter_seconds: that each adapter among a step's rows takes.
    """

    def __init__(
        self, pace: Pace, outputs: Mapping[str, Sequence[int]] | None, verifier: Verifier, stages: int = 1,
        adapter_seconds: float = 0.0,
    ) -> None:
        self.now = 0.0  # seconds
        self._pace = pace
        self._free = [0.0] * stages  # when each stage has computed its last step, in seconds
        self._adapter_seconds = adapter_seconds
        self._adapters: dict[int, int] = {}  # by slot; 0: the base model
        self._outputs = outputs or {}
        self._verifier = verifier
        self._plans: deque[tuple[StepPlan, float]] = deque()  # and when its last stage has computed it
        self._num_at_join: dict[int, float] = {}  # by slot: tokens known when its request joined; inf: it is pooled
        self._known: dict[int, tuple[int, Sequence[int]]] = {}  # by slot: prompt tokens and output

    def clock(self) -> int:
        """Nanoseconds."""
        return round(self.now * 1e9)

    def submit(self, plan: StepPlan) -> None:
        for join in plan.new_requests:
            self._adapters[join.slot] = join.spec.adapter
            self._num_at_join[join.slot] = len(join.tokens) if join.spec.pooling is None else inf
            self._known[join.slot] = join.num_prompt, self._outputs.get(join.request_id, ())
        work = work_of(plan.starts, plan.counts, plan.padding, plan.drafts)
        seconds = self._pace.step(work) + self.of_adapters(plan.slots) if work.rows else IDLE
        self._plans.append((plan, self._passed(seconds)))

    def of_adapters(self, slots: Iterable[int]) -> float:
        """Returns the seconds that the adapters of a step's rows take."""
        if not self._adapter_seconds:
            return 0.0
        return self._adapter_seconds * len({self._adapters[slot] for slot in slots} - {0})

    def _passed(self, seconds: float) -> float:
        """Returns when a step that is handed in now has passed all stages."""
        at, share = self.now, seconds / len(self._free)
        for stage, free in enumerate(self._free):
            self._free[stage] = at = max(at, free) + share
        return at

    def collect(self) -> StepResult:
        plan, ended = self._plans.popleft()
        self.now = max(self.now, ended)
        at_join = self._num_at_join
        if plan.drafts:
            return self._verified(plan)
        if not self._outputs:
            return StepResult(plan.step, tuple([
                _FILLERS if start + count >= at_join[slot] else ()
                for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True)]))
        return StepResult(plan.step, tuple([
            (self._token(slot, start + count),) if start + count >= at_join[slot] else ()
            for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True)]))

    def _verified(self, plan: StepPlan) -> StepResult:
        """Returns the result of a step with drafts."""
        tokens, named = [], []
        for slot, start, count, drafts in zip(plan.slots, plan.starts, plan.counts, plan.drafts, strict=True):
            output = [self._token(slot, end) for end in range(start + count - len(drafts), start + count + 1)]
            names, yielded = self._verifier.verified(drafts, output)
            tokens.append(yielded if start + count >= self._num_at_join[slot] else ())
            named.append(names)
        if (proposing := self._verifier.proposing(plan)) is None:
            return StepResult(plan.step, tuple(tokens))
        self.now += proposing.seconds
        return StepResult(plan.step, tuple(tokens), drafts=tuple(named), proposing=proposing)

    def _token(self, slot: int, end: int) -> int:
        num_prompt, output = self._known[slot]
        index = end - num_prompt
        return output[index] if index < len(output) else FILLER

    def rows(self, run: DecodeRun) -> list[list[int]]:
        """Returns the tokens that each row of a run samples."""
        if not self._outputs:
            return [[FILLER] * run.length] * len(run.slots)
        found = []
        for slot, start in zip(run.slots, run.starts, strict=True):
            num_prompt, output = self._known[slot]
            first = start + 1 - num_prompt
            tokens = list(output[first : first + run.length])
            found.append(tokens + [FILLER] * (run.length - len(tokens)))
        return found

    def steps(self, rows: Sequence[Sequence[int]], number: int) -> list[tuple[tuple[int, ...], ...]]:
        """Returns the tokens of the first `number` steps of a run."""
        if not self._outputs:
            return [(_FILLERS,) * len(rows)] * number
        return [tuple([(token,) for token in step]) for step in islice(zip(*rows, strict=True), number)]
