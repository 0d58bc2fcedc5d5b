"""Speculation on a virtual clock: which drafts of a step are right, and what proposing them takes.

Drafts from texts are compared with the outputs that a recording has.  Those of a draft model are right as often as a
curve of acceptance says, and cost passes of that model, one after the other:

    position             1     2     3     4        of a row's drafts
    share right         0.8   0.7   0.7   0.6       where those before it are: the curve
    survives            0.8   0.56  0.39  0.24      so a row yields 1 + 0.8 + 0.56 + ... tokens on average

The proposers are the server's (`speculation/`): they learn the shares from what is right, and choose how many drafts a
step verifies by its predicted time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from slotwise.core.step import PROPOSED, Proposing, StepPlan
from slotwise.speculation.settings import DRAFT_MODEL, MAX_DRAFTS, Speculation

MODEL = "simulated"  # the draft model's name in the settings
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model.

    Raises:
        ValueError: no shares, too many, or such that are none.
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

    def __init__(self, model: DraftModel | None, seed: int = 0) -> None:
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
