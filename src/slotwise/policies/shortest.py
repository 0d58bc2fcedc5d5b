"""Shortest remaining work first, by how long answers of this kind have been; with ageing.

Nobody knows how long an answer will be.  But answers to the same tenant's prompts of the same length resemble each
other, and serving what is probably short first lowers the mean latency of a backlog (Shahout et al., 2024, and others,
train predictors for it; a running quantile needs no model and no training).

A request's rank is the work it has left, in tokens, plus the moment of its arrival times `ageing`.  So nobody who comes
more than (work / ageing) seconds after a request goes before it, where work is at most `max_model_len`.
"""

from __future__ import annotations

from slotwise.core.interfaces import Key
from slotwise.core.request import Request
from slotwise.policies.fcfs import FirstComeFirstServed
from slotwise.policies.lengths import Guesses

PROMPT_SHARE = 1 / 16  # of an output token's work that a prompt token is: prompts are computed many tokens at once


class Shortest(FirstComeFirstServed):
    """
    Args:
        ageing: tokens of work that a second of waiting makes up for.
        quantile: of the lengths of answers like it, that is taken for a request's own.
        oracle: the lengths that a benchmark drew are known beforehand, instead of guessed.
    """

    def __init__(self, ageing: float, quantile: float, *, oracle: bool = False) -> None:
        self._ageing = ageing
        self._guesses = Guesses(quantile)
        self._oracle = oracle

    def waiting_key(self, request: Request, now: float) -> Key:
        return (self._work(request) + request.arrived_at * self._ageing,)

    def victim_key(self, request: Request, now: float) -> Key:
        return (0, self._work(request))

    def _work(self, request: Request) -> float:
        """Tokens left to compute, in tokens of output."""
        prompt = (len(request.tokens) - request.num_computed) * PROMPT_SHARE
        return prompt + max(1.0, self._length(request) - request.num_output)

    def _length(self, request: Request) -> float:
        most = request.end - request.num_prompt
        if self._oracle and request.expected_tokens:
            return min(most, request.expected_tokens)
        guess = self._guesses.guess(request.slo.tenant, request.num_prompt, request.num_output)
        return most if guess is None else min(most, guess)

    def finished(self, request: Request, reason: str, now: float) -> None:
        """Learn how long it was; an answer that was cut off by somebody else tells nothing."""
        if reason in ("stop", "length"):
            self._guesses.learn(request.slo.tenant, request.num_prompt, request.num_output)
