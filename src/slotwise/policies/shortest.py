"""Shortest remaining work first, by predicted output length, with ageing.

Output lengths are unknown.  But outputs for the same tenant's prompts of similar length resemble each other, and
serving probably short requests first lowers the mean latency of a backlog (Shahout et al., 2024, and others, train
predictors for it; a running quantile needs no model and no training).

A request's rank is its remaining work, in tokens, plus its arrival time in seconds times `ageing`.  So no request that
arrives more than (work / ageing) seconds later goes before it, where work is at most `max_model_len`.
"""

from __future__ import annotations

from slotwise.core.interfaces import Key
from slotwise.core.request import Request
from slotwise.policies.fcfs import FirstComeFirstServed
from slotwise.policies.lengths import Guesses

PROMPT_SHARE = 1 / 16  # work of a prompt token, in output tokens: prefill computes many tokens at once


class Shortest(FirstComeFirstServed):
    """
    Args:
        ageing: tokens of work that a second of waiting makes up for.
        quantile: of the output lengths of similar requests, used as the prediction.
        oracle: use output lengths fixed by a benchmark instead of predictions.
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
        """Returns the remaining work, in output tokens."""
        prompt = (len(request.tokens) - request.num_computed) * PROMPT_SHARE
        return prompt + max(1.0, self._length(request) - request.num_output)

    def _length(self, request: Request) -> float:
        most = request.end - request.num_prompt
        if self._oracle and request.expected_tokens:
            return min(most, request.expected_tokens)
        guess = self._guesses.guess(request.slo.tenant, request.num_prompt, request.num_output)
        return most if guess is None else min(most, guess)

    def finished(self, request: Request, reason: str, now: float) -> None:
        """Learn its output length, unless the output was cut off from outside."""
        if reason in ("stop", "length") and request.pooling is None:
            self._guesses.learn(request.slo.tenant, request.num_prompt, request.num_output)
