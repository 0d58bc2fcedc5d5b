"""What the samplers share: the parameters of every slot's request, the results, and the interface.

A request's tokens depend on its own logits, parameters, seed and history alone: never on other requests of the batch,
its row or its slot, nor on preemption and recomputation.  The random number of output i is a pure function of (seed,
i), so nothing needs to be kept or restored.  Ranks other than rank 0 sample nothing (`SilentSampler`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slotwise.compute.kernels.reference import FAILED
from slotwise.compute.runner.slots import SlotListener
from slotwise.core.params import SamplingSpec
from slotwise.core.record import NewRequest, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperature; the same threshold as vLLM's
NO_LOGPROBS = -1
_64_BITS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RequestParams:
    """The sampling parameters of one request.  Tokens outside the vocabulary have no logit and are left out."""

    slot: int
    num_prompt: int
    params: SamplingSpec
    stop_ids: NDArray[np.int64]  # banned before `params.min_tokens` outputs
    bias_ids: NDArray[np.int64]
    bias: NDArray[np.float32]
    allowed_ids: NDArray[np.int64]  # all others are banned; empty: no ban
    bad_words: tuple[tuple[int, ...], ...]  # the last token of each is banned after the others
    num_logprobs: int  # of the most probable tokens; NO_LOGPROBS: not even the sampled token's
    greedy_from: int  # outputs after which plain argmax is enough

    @classmethod
    def of(cls, request: NewRequest, vocab_size: int) -> RequestParams:
        """The parameters of a request that joins."""
        params = request.spec.params
        stop_ids = _within(request.stop_ids if params.min_tokens else (), vocab_size)
        bias_ids = _within(params.logit_bias, vocab_size)
        bias = np.array([params.logit_bias[token] for token in bias_ids.tolist()], np.float32)
        allowed_ids = _within(params.allowed_token_ids, vocab_size)
        bad_words = tuple([word for word in params.bad_words_token_ids if max(word) < vocab_size])
        num_logprobs = NO_LOGPROBS if params.logprobs is None else min(params.logprobs, vocab_size)
        is_plain = is_greedy(params) and params.logprobs is None and not len(bias) and not (
            has_penalties(params) or has_masks(params))
        greedy_from = (params.min_tokens if len(stop_ids) else 0) if is_plain else sys.maxsize
        return cls(request.slot, request.num_prompt, params, stop_ids, bias_ids, bias, allowed_ids, bad_words,
                   num_logprobs, greedy_from)

    def bans_stops(self, num_outputs: int) -> bool:
        """Whether stop tokens are banned after `num_outputs` outputs."""
        return num_outputs < self.params.min_tokens and len(self.stop_ids) > 0

    def is_edited(self, num_outputs: int) -> bool:
        """Whether logits are edited before the token after `num_outputs` outputs is drawn."""
        return self.bans_stops(num_outputs) or len(self.bias_ids) > 0 or (
            has_penalties(self.params) or has_masks(self.params))

    @property
    def follows_outputs(self) -> bool:
        """Whether the logits of a token are edited by the outputs before it."""
        return has_penalties(self.params) or bool(self.bad_words) or self.params.thinking is not None


class SlotParams:
    """The sampling parameters of every slot, as columns where kernels read them.

    Args:
        num_slots: slots are numbered below this.
        vocab_size: logits per row.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.controls = np.zeros((num_slots, 4), np.float32)  # temperature (0: greedy), top_k (0: all), top_p, min_p
        self.seeds = np.zeros(num_slots, np.uint64)
        self._requests: dict[int, RequestParams] = {}  # by slot

    def join(self, request: NewRequest) -> RequestParams:
        """Set the slot's request, new or resumed after preemption; returns its parameters."""
        params, slot = request.spec.params, request.slot
        temperature = 0.0 if is_greedy(params) else params.temperature
        top_k = min(max(params.top_k, 0), self.vocab_size)
        self.controls[slot] = (temperature, top_k, params.top_p, params.min_p)
        self.seeds[slot] = request.spec.seed & _64_BITS
        self._requests[slot] = RequestParams.of(request, self.vocab_size)
        return self._requests[slot]

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._requests.pop(slot, None)

    def draws_in_order(self, slot: int) -> bool:
        """See `Sampling`."""
        return self._requests[slot].follows_outputs

    def rows(self, slots: Sequence[int], positions: Sequence[int]) -> tuple[list[RequestParams], list[int]]:
        """The requests of a step's rows, and each one's outputs before `positions`, prompt included."""
        requests = [self._requests[slot] for slot in slots]
        return requests, [place - request.num_prompt for place, request in zip(positions, requests, strict=True)]


class SampledTokens(NamedTuple):
    """One token per row."""

    tokens: list[int]  # FAILED in rows that failed
    logprobs: list[TokenLogprobs | None]  # [] when no row requests any, else by row
    failed: tuple[int, ...]  # rows with NaN, +inf or nothing but -inf, or whose edits failed; the others are sound

    @property
    def column(self) -> Tensor:
        return torch.from_numpy(np.array(self.tokens, np.int64))  # three times as fast as from the list itself

    def read(self) -> SampledTokens:
        return self


class Logprobs(NamedTuple):
    """Log-probabilities of some rows; tensors of a device are on the host once it is done."""

    rows: Sequence[int]
    wanted: Sequence[int]  # the number of most probable tokens, by row
    chosen: Tensor | NDArray[np.float32]  # [rows]
    ranks: Tensor | NDArray[np.int64]  # [rows]
    top_ids: Tensor | NDArray[np.int32]  # [rows, most wanted]
    top: Tensor | NDArray[np.float32]  # [rows, most wanted]


    def read(self, num_rows: int) -> list[TokenLogprobs | None]:
        """The entries by row; None for rows without one."""
        found: list[TokenLogprobs | None] = [None] * num_rows
        rows, wanted, *columns = self
        for row, k, chosen, rank, top_ids, top in zip(rows, wanted, *(c.tolist() for c in columns), strict=True):
            found[row] = TokenLogprobs(chosen, rank, tuple(top_ids[:k]), tuple(top[:k]))
        return found


def sampled(tokens: list[int], logprobs: Logprobs | None) -> SampledTokens:
    """The result of a step that drew `tokens`, by row."""
    entries = [] if logprobs is None else logprobs.read(len(tokens))
    found = [None if token == FAILED else entry for token, entry in zip(tokens, entries, strict=False)]
    failed = tuple([row for row, token in enumerate(tokens) if token == FAILED])
    return SampledTokens(tokens, found, failed)


class PendingTokens(Protocol):
    """Sampled tokens, being copied from the device."""

    @property
    def column(self) -> Tensor:
        """The tokens on the device, `[rows]` int64, FAILED in rows that failed."""
        ...

    def read(self) -> SampledTokens:
        """The tokens on the host.  Call when the device is done with the step."""
        ...


class Sampling(SlotListener):
    """The sampling state of every slot."""

    def draws_in_order(self, slot: int) -> bool:
        """Whether a token of the slot's request can be drawn only once all before it are known."""
        raise NotImplementedError

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> PendingTokens:
        """Choose the next token of every row of `logits [rows, vocab]`, which are left as they are.

        A row that fails by its request's own edits fails alone.

        Args:
            slots: slot of each row; of those that draw in order, each at most once.
            positions: position of the new token in its request, prompt included.
        """
        raise NotImplementedError

    def describe(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """Log-probabilities of given tokens, and of the `num_top` most probable ones, at every row of `logits`.

        Rows without a sound distribution have none.

        Args:
            logits: `[rows, vocab]`; left as they are.
            tokens: `[rows]` int64, ids of the vocabulary, where the logits are.
        """
        raise NotImplementedError


def is_greedy(params: SamplingSpec) -> bool:
    """Whether the most probable token is taken."""
    return params.temperature < GREEDY_BELOW or params.top_p == 0


def check_known(num_outputs: int, num_known: int) -> None:
    """Raises ValueError if a token is wanted behind outputs that its state does not know."""
    if num_outputs > num_known:
        raise ValueError(f"a token is wanted after {num_outputs} outputs, of which {num_known} are known")


def has_penalties(params: SamplingSpec) -> bool:
    """Whether earlier tokens change the logits."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def has_masks(params: SamplingSpec) -> bool:
    """Whether some tokens are never chosen, or only after others."""
    return bool(params.allowed_token_ids or params.bad_words_token_ids or params.thinking)


def _within(tokens: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    """The ids of the vocabulary among `tokens`."""
    return np.array([token for token in tokens if 0 <= token < vocab_size], np.int64)


class _ZeroTokens(NamedTuple):
    """Token 0 for every row, on the device of the logits."""

    column: Tensor

    def read(self) -> SampledTokens:
        return SampledTokens([0] * len(self.column), [], ())


class SilentSampler(Sampling):
    """Draws token 0 for every row, which the tokens of rank 0 replace before they are read."""

    def draws_in_order(self, slot: int) -> bool:
        return False

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> _ZeroTokens:
        return _ZeroTokens(torch.zeros(len(slots), dtype=torch.int64, device=logits.device))

    def describe(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        nothing = np.zeros((0, 0), np.int32)
        return Logprobs((), (), np.zeros(0, np.float32), np.zeros(0, np.int64), nothing, nothing.astype(np.float32))
