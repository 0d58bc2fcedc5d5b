"""Edits of a request's logits before a token is chosen: bans, bias, penalties, the end of reasoning.

The order is vLLM's where it matters: end tokens are banned before `min_tokens`, the bias is added, then the repetition
penalty (over prompt and output; Keskar et al., "CTRL", 2019) scales and the frequency and presence penalties (over the
output only; OpenAI's) are subtracted.  Tokens that are not allowed, and tokens that would complete a banned sequence of
output tokens, get minus infinity.  At last, reasoning that has used up its budget is ended:

    outputs     <think>  a  b  c           a  b  c            of 3 tokens
    next        </think>                   </think>           the prompt has begun the reasoning

The end token's logit then dwarfs all others; the mask of a grammar still applies.

On the host only the entries concerned are edited, so the cost follows the request, not the vocabulary (except where
only some tokens are allowed); on a device, where tokens may still be computed, each edit is an operation on a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slotwise.compute.runner.sampling.sampler import RequestParams, check_known, has_penalties
from slotwise.core.params import SamplingSpec, ThinkingBudget

CERTAIN = 1e9  # a logit: at any temperature the probability of all other tokens is 0 in float32


class ReasoningState:
    """Where the reasoning of one request begins and ends among its outputs, on the host.

    Args:
        outputs: those so far.
    """

    def __init__(self, budget: ThinkingBudget, outputs: Sequence[int]) -> None:
        self._budget = budget
        self._num_outputs = 0
        self._begin: int | None = 0 if budget.begin_id is None else None  # the output that is its first token
        self._end: int | None = None  # the output that ends it
        for token in outputs:
            self.record(token)

    def record(self, token: int) -> None:
        """Record `token` as the next output."""
        if self._begin is None and token == self._budget.begin_id:
            self._begin = self._num_outputs + 1
        if self._end is None and token == self._budget.end_id:
            self._end = self._num_outputs
        self._num_outputs += 1

    def forget_after(self, num_outputs: int) -> None:
        """Remove outputs of a step that failed and is run again."""
        check_known(num_outputs, self._num_outputs)
        self._num_outputs = num_outputs
        if self._begin is not None and self._begin > num_outputs:
            self._begin = None
        if self._end is not None and self._end >= num_outputs:
            self._end = None

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Edit `logits [vocab]` in place for the token that follows the outputs."""
        is_open = self._begin is not None and self._end is None
        if is_open and self._num_outputs - (self._begin or 0) >= self._budget.num_tokens:
            logits[self._budget.end_id] = CERTAIN


def end_reasoning(logits: Tensor, outputs: Tensor, budget: ThinkingBudget) -> None:
    """Edit `logits [vocab]` float32 in place for the token that follows `outputs [num_outputs]`, without waiting."""
    num_before = len(outputs) - budget.num_tokens  # where its first token stands if the budget is used up
    if num_before < (0 if budget.begin_id is None else 1):
        return
    ends = (outputs != budget.end_id).all()
    if budget.begin_id is not None:
        ends &= (outputs[:num_before] == budget.begin_id).any()
    at = slice(budget.end_id, budget.end_id + 1)
    logits[at] = logits[at].masked_fill(ends, CERTAIN)


class LogitEdits:
    """The edits of one request, on the host.

    Args:
        known: the request's tokens so far, prompt included.
    """

    def __init__(self, request: RequestParams, known: Sequence[int], vocab_size: int) -> None:
        self._request = request
        self._outputs = list(known[request.num_prompt :])
        self._penalties = (
            Penalties(request.params, known, request.num_prompt, vocab_size) if has_penalties(request.params) else None)
        budget = request.params.thinking
        self._reasoning = None if budget is None else ReasoningState(budget, known[request.num_prompt :])

    def apply(self, logits: NDArray[np.float32], num_outputs: int) -> None:
        """Edit `logits [vocab]` in place for the token that follows `num_outputs` outputs.

        Raises:
            ValueError: earlier outputs were neither known when the request joined nor recorded.
        """
        request = self._request
        if request.bans_stops(num_outputs):
            logits[request.stop_ids] = -np.inf
        logits[request.bias_ids] += request.bias
        if self._penalties is not None:
            self._penalties.forget_after(num_outputs)
            self._penalties.apply(logits)
        if len(request.allowed_ids):
            allowed = logits[request.allowed_ids]
            logits.fill(-np.inf)
            logits[request.allowed_ids] = allowed
        if request.bad_words:
            logits[self._completing(num_outputs)] = -np.inf
        if self._reasoning is not None:
            self._reasoning.forget_after(num_outputs)
            self._reasoning.apply(logits)

    def _completing(self, num_outputs: int) -> list[int]:
        """Tokens that would complete a banned sequence; forgets outputs of a step that failed and is run again."""
        check_known(num_outputs, len(self._outputs))
        del self._outputs[num_outputs:]
        return [word[-1] for word in self._request.bad_words
                if len(word) <= num_outputs + 1 and tuple(self._outputs[num_outputs + 1 - len(word) :]) == word[:-1]]

    def record(self, token: int) -> None:
        """Record `token` as the next output."""
        if self._request.bad_words:
            self._outputs.append(token)
        if self._penalties is not None:
            self._penalties.record(token)
        if self._reasoning is not None:
            self._reasoning.record(token)


class Penalties:
    """The distinct tokens of a request, and how often it produced each."""

    def __init__(self, params: SamplingSpec, known: Sequence[int], num_prompt: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._places: dict[int, int] = {}  # column of each distinct token
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int32)  # occurrences in the output
        self._in_prompt = np.zeros(64, dtype=np.bool_)
        self._outputs: list[int] = []
        prompt = self._places_of(known[:num_prompt])  # may grow the columns
        self._in_prompt[prompt] = True
        for token in known[num_prompt:]:
            self.record(token)

    def record(self, token: int) -> None:
        self._outputs.append(token)
        places = self._places_of((token,))
        self._counts[places] += 1

    def forget_after(self, num_outputs: int) -> None:
        """Remove outputs of a step that failed and is run again."""
        check_known(num_outputs, len(self._outputs))
        while len(self._outputs) > num_outputs:
            self._counts[self._places_of((self._outputs.pop(),))] -= 1

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Penalize `logits [vocab]` in place."""
        used = len(self._places)
        ids, counts = self._ids[:used], self._counts[:used]
        values = logits[ids]
        scaled = np.where(values > 0, values / self._repetition, values * self._repetition)
        values = np.where(self._in_prompt[:used] | (counts > 0), scaled, values)
        logits[ids] = values - self._frequency * counts.astype(np.float32) - self._presence * (counts > 0)

    def _places_of(self, tokens: Iterable[int]) -> list[int]:
        """Columns of tokens; new ones are added at the end."""
        places: list[int] = []
        for token in tokens:
            if 0 <= token < self._vocab_size:
                place = self._places.setdefault(token, len(self._places))
                if place == len(self._ids):
                    self._grow()
                self._ids[place] = token
                places.append(place)
        return places

    def _grow(self) -> None:
        room = len(self._ids)
        self._ids = np.concatenate([self._ids, np.empty(room, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int32)])
        self._in_prompt = np.concatenate([self._in_prompt, np.zeros(room, dtype=np.bool_)])


class DeviceEdits(NamedTuple):
    """The edits of one request, on a device."""

    request: RequestParams
    stop_ids: Tensor  # the request's, on the device, like all below
    bias_ids: Tensor
    bias: Tensor
    allowed_ids: Tensor
    bad_words: tuple[Tensor, ...]  # ids of each

    def apply(self, logits: Tensor, known: Tensor, num_outputs: int) -> None:
        """Edit `logits [vocab]` float32 in place for the token that follows `known`, which has `num_outputs` outputs.

        All are on the device, and nothing waits for it.
        """
        if self.request.bans_stops(num_outputs):
            logits.index_fill_(0, self.stop_ids, -torch.inf)
        logits.index_add_(0, self.bias_ids, self.bias)
        if has_penalties(self.request.params):
            num_prompt = self.request.num_prompt
            penalize(logits, known[:num_prompt], known[num_prompt:], self.request.params)
        if len(self.allowed_ids):
            allowed = logits.index_select(0, self.allowed_ids)
            logits.fill_(-torch.inf).index_copy_(0, self.allowed_ids, allowed)
        for word in self.bad_words:
            if len(word) <= num_outputs + 1:
                completes = (known[len(known) + 1 - len(word) :] == word[:-1]).all()
                last = logits.index_select(0, word[-1:])
                logits.index_copy_(0, word[-1:], last.masked_fill(completes, -torch.inf))
        if self.request.params.thinking is not None:
            end_reasoning(logits, known[self.request.num_prompt :], self.request.params.thinking)


def penalize(row: Tensor, prompt: Tensor, output: Tensor, params: SamplingSpec) -> None:
    """Apply the repetition, frequency and presence penalties to `row [vocab]` float32, in place.

    Args:
        prompt, output: token ids.
    """
    vocab = len(row)  # ids outside of it are counted at index `vocab`
    counts = row.new_zeros(vocab + 1).index_add_(0, output.clamp(max=vocab), torch.ones_like(output, dtype=row.dtype))
    is_known = (counts > 0).index_fill_(0, prompt.clamp(max=vocab), True)[:vocab]
    counts = counts[:vocab]
    scaled = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
    row.copy_(torch.where(is_known, scaled, row))
    row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
