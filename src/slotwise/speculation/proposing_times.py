"""What proposing costs: the seconds of a draft model's passes, learned from every step that it proposes for.

    seconds ≈ a · passes + b · tokens        a: reading its weights; b: computing a token of a row, or one it lacked

The fit is that of `core/step_time.py`: least squares of relative errors, older steps counting less.
"""

from __future__ import annotations

from slotwise.core.least_squares import non_negative
from slotwise.core.step import Proposing

FADE = 0.98  # decay at the next step: half is forgotten after 34
RIDGE = (1e-4, 1e-3)  # regularisation of each term towards 0, relative to its weight


class ProposingTimes:
    """Predicts the seconds of proposing."""

    def __init__(self) -> None:
        self._products = [[0.0, 0.0], [0.0, 0.0]]
        self._totals = [0.0, 0.0]
        self._coefficients = [0.0, 0.0]

    @property
    def is_trained(self) -> bool:
        return any(self._coefficients)

    def seconds(self, passes: int, tokens: int) -> float:
        """Returns the predicted seconds; 0 while untrained."""
        return self._coefficients[0] * passes + self._coefficients[1] * tokens

    def learn(self, proposing: Proposing) -> None:
        """Learn from a step."""
        seconds, *numbers = proposing
        if seconds <= 0 or not proposing.passes:
            return
        terms = [number / seconds for number in numbers]
        self._totals = [known * FADE + term for known, term in zip(self._totals, terms, strict=True)]
        self._products = [
            [known * FADE + term * other for known, other in zip(row, terms, strict=True)]
            for row, term in zip(self._products, terms, strict=True)]
        self._coefficients = non_negative(self._products, self._totals, RIDGE)
