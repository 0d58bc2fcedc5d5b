"""An executor that computes nothing: its clock advances by the pace of each step, and tokens are known or fillers.

Where a model's layers are divided into stages, each takes the same share of a step's time, and computes steps in order:

    stage 0    | 1 | 2 | 3 |
    stage 1        | 1 | 2 | 3 |       step 2 is handed in while step 1 is in stage 1

Drafts from texts are compared with the outputs that a recording has.  Those of a draft model are right as often as a
curve of acceptance says, and cost passes of that model, one after the other:

    position             1     2     3     4        of a row's drafts
    share right         0.8   0.7   0.7   0.6       where those before it are: the curve
    survives            0.8   0.56  0.39  0.24      so a row yields 1 + 0.8 + 0.56 + ... tokens on average

The proposers are the server's (`core/speculation/`): they learn the shares from what is right, and choose how many
drafts a step verifies by its predicted time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from slotwise.core.record import PROPOSED, Proposing, StepPlan, StepResult
from slotwise.core.speculation.speculation_settings import DRAFT_MODEL, MAX_DRAFTS, Speculation
from slotwise.core.step_time import work_of
from slotwise.measure.simulate.decode_run import DecodeRun
from slotwise.measure.simulate.pace import Pace

FILLER = 7  # the token that every row samples, where its output is not known
IDLE = 0.001  # seconds that a plan without rows takes
_FILLERS = (FILLER,)
MODEL = "simulated"  # the draft model's name in the settings


class VirtualMachine:
    """An executor that advances its clock by the pace of each step.

    Args:
        outputs: output tokens by request id, where they are known.
        verifier: finds which drafts are right.
        stages: that the layers are divided into.
        adapter_seconds: that each adapter among a step's rows takes.
    """

    def __init__(
        self, pace: Pace, outputs: Mapping[int, Sequence[int]] | None, verifier: Verifier, stages: int = 1,
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
        seconds = self._pace.step(work, self.now) + self.of_adapters(plan.slots) if work.rows else IDLE
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


Tokens = tuple[int, ...]


# -- drafts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SimulatedDraftModel:
    """A draft model.

    Raises:
        ValueError: no shares, too many, or one out of range.
    """

    shares: tuple[float, ...]  # of right drafts by position, where those before are right
    seconds: float = 0.0  # of a pass, which proposes a draft for each row

    def __post_init__(self) -> None:
        if not 1 <= len(self.shares) <= MAX_DRAFTS or not all(0 <= share <= 1 for share in self.shares):
            raise ValueError(f"an acceptance curve has 1 to {MAX_DRAFTS} shares, each from 0 to 1")
        if not 0 <= self.seconds < float("inf"):
            raise ValueError("a pass of the draft model takes 0 seconds or more")

    @property
    def speculation(self) -> Speculation:
        """The settings with which a server has as many drafts."""
        return Speculation(DRAFT_MODEL, len(self.shares), model=MODEL)


class Verifier:
    """Names the drafts that a draft model would propose, and finds which of a row's are right."""

    def __init__(self, model: SimulatedDraftModel | None, seed: int = 0) -> None:
        self._model = model
        self._random = random.Random(seed)

    def verified(self, drafts: Tokens, output: Sequence[int]) -> tuple[Tokens, Tokens]:
        """Returns the drafts of a row by name, and the tokens that it yields.

        Args:
            output: what the row would sample without drafts: one token more than there are drafts.
        """
        if PROPOSED in drafts:
            drafts = self._proposed(output[: len(drafts)])
        right = 0
        while right < len(drafts) and drafts[right] == output[right]:
            right += 1
        return drafts, tuple(output[: right + 1])

    def _proposed(self, output: Sequence[int]) -> Tokens:
        """Returns drafts for `output` of which the first ones are right, as the curve says."""
        shares = self._model.shares if self._model is not None else ()
        named = list(output)
        for position in range(len(named)):
            if position >= len(shares) or self._random.random() >= shares[position]:
                named[position] = output[position] + 1
                break
        return tuple(named)

    def proposing(self, plan: StepPlan) -> Proposing | None:
        """Returns what the draft model takes in a step; None: it proposes nothing."""
        counts = [len(drafts) for drafts in plan.drafts if PROPOSED in drafts]
        if not counts or self._model is None:
            return None
        return Proposing(max(counts) * self._model.seconds, max(counts), sum(counts))
