"""From logits to tokens on an asynchronous device: everything is enqueued, nothing waits.

The same guarantees as those of `cpu.py`.  Parameters are on the host and sent with the step; penalties read a
request's tokens from the token table, where the last of them may not be written yet when a step is enqueued.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slotwise.core.params import SamplingParams
from slotwise.core.step import NewRequest, TokenLogprobs
from slotwise.kernels.sampling import FAILED, Draw
from slotwise.runner.input_batch import SlotTable
from slotwise.runner.sampling.interface import GREEDY_BELOW, Sampled
from slotwise.runner.sampling.logits import has_penalties
from slotwise.runner.staging import sender, to_host

_64_BITS = 2**64 - 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SlotState:
    """The sampling state of a slot's request."""

    slot: int
    num_prompt: int
    params: SamplingParams
    stop_ids: Tensor  # on the device, like the next two
    bias_ids: Tensor
    bias: Tensor

    def is_banned(self, position: int) -> bool:
        """Whether stop tokens are banned at `position`."""
        return len(self.stop_ids) > 0 and position - self.num_prompt < self.params.min_tokens

    def is_edited(self, position: int) -> bool:
        """Whether logits are edited before the token at `position` is drawn."""
        return self.is_banned(position) or len(self.bias_ids) > 0 or has_penalties(self.params)


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities of some rows, on the host once the device is done."""

    rows: list[int]
    wanted: list[int]  # the number of most probable tokens, by row
    chosen: Tensor  # [rows] float32
    ranks: Tensor  # [rows] int64
    top_ids: Tensor  # [rows, most wanted] int64
    top: Tensor  # [rows, most wanted] float32

    def read(self, tokens: list[int]) -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        columns = (self.chosen.tolist(), self.ranks.tolist(), self.top_ids.tolist(), self.top.tolist())
        for row, k, chosen, rank, top_ids, top in zip(self.rows, self.wanted, *columns, strict=True):
            if tokens[row] != FAILED:
                found[row] = TokenLogprobs(chosen, rank, tuple(top_ids[:k]), tuple(top[:k]))
        return found


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Sampled tokens, being copied to the host."""

    column: Tensor
    tokens: Tensor  # [rows] int64, on the host once the device is done
    logprobs: _Logprobs | None

    def read(self) -> Sampled:
        tokens = self.tokens.tolist()
        logprobs = self.logprobs.read(tokens) if self.logprobs else []
        return Sampled(tokens, logprobs, tuple([row for row, token in enumerate(tokens) if token == FAILED]))


class DeviceSampler:
    """The sampling state of every slot.  One caller at a time.

    Args:
        slots: the token table of all requests.
        vocab_size: logits per row.
        draw: see `kernels.sampling`.
        device: of the logits.
    """

    def __init__(self, slots: SlotTable, vocab_size: int, draw: Draw, device: torch.device) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._draw = draw
        self._states: list[_SlotState | None] = [None] * slots.num_slots
        self._controls = np.zeros((slots.num_slots, 4), np.float32)
        self._seeds = np.zeros(slots.num_slots, np.uint64)
        self._send = sender(device)

    def join(self, join: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        params = join.params
        ends = [token for token in join.stop_ids if 0 <= token < self._vocab_size] if params.min_tokens else []
        biased = [token for token in params.logit_bias if 0 <= token < self._vocab_size]
        bias = np.array([params.logit_bias[token] for token in biased], np.float32)
        stop_ids, bias_ids, bits = self._send(
            [np.array(ends, np.int64), np.array(biased, np.int64)], [bias.view(np.int32)])
        self._states[join.slot] = _SlotState(
            join.slot, join.num_prompt, params, stop_ids, bias_ids, bits.view(torch.float32))
        temperature = 0.0 if params.temperature < GREEDY_BELOW else params.temperature
        top_k = min(max(params.top_k, 0), self._vocab_size)
        self._controls[join.slot] = (temperature, top_k, params.top_p, params.min_p)
        self._seeds[join.slot] = join.seed & _64_BITS

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._states[slot] = None

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> _Drawn:
        """Enqueue the choice of every row's next token.  A row that fails by its request's own edits fails alone.

        Args:
            logits: `[rows, vocab]`; left as they are.
            slots: slot of each row, each at most once.
            positions: position of the new token in its request, prompt included.
        """
        states = [self._states[slot] for slot in slots]
        places = list(slots)
        num_outputs = np.array(positions, np.int64) - np.array([state.num_prompt for state in states], np.int64)
        seeds, indices, controls = self._send(
            [self._seeds[places].view(np.int64), num_outputs], [self._controls[places].view(np.int32)])
        if any(state.is_edited(position) for state, position in zip(states, positions, strict=True)):
            logits = self._edited(logits, states, positions)
        column = self._draw(logits, controls.view(torch.float32), seeds, indices)
        return _Drawn(column, to_host(column), self._described(logits, states, column))

    def _edited(self, logits: Tensor, states: list[_SlotState], positions: Sequence[int]) -> Tensor:
        """A float32 copy, with every request's edits."""
        work = logits.to(torch.float32, copy=True)
        for row, state, position in zip(work, states, positions, strict=True):
            if state.is_edited(position):
                try:
                    self._edit(row, state, position)
                except Exception:  # only this row fails
                    logger.exception("the edits of a request failed")
                    row.fill_(torch.nan)
        return work

    def _edit(self, row: Tensor, state: _SlotState, position: int) -> None:
        """Edit `row [vocab]` in place as `logits.py` does."""
        if state.is_banned(position):
            row.index_fill_(0, state.stop_ids, -torch.inf)
        row.index_add_(0, state.bias_ids, state.bias)
        if has_penalties(state.params):
            prompt = self._slots.known(state.slot, 0, state.num_prompt)
            penalise(row, prompt, self._slots.known(state.slot, state.num_prompt, position), state.params)

    def _described(self, logits: Tensor, states: list[_SlotState], tokens: Tensor) -> _Logprobs | None:
        """Log-probabilities of the rows that request them, being copied to the host."""
        asked = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        if not asked:
            return None
        wanted = [min(states[row].params.logprobs, self._vocab_size) for row in asked]
        (rows,) = self._send([np.array(asked, np.int64)], ())
        scores = logits.index_select(0, rows).float()
        logprobs = scores.log_softmax(-1)
        place = tokens.index_select(0, rows).clamp(min=0)[:, None]
        ranks = 1 + (scores > scores.gather(1, place)).sum(-1)
        top_ids = largest(scores, max(1, *wanted))
        return _Logprobs(
            asked, wanted, to_host(logprobs.gather(1, place)[:, 0]), to_host(ranks), to_host(top_ids),
            to_host(logprobs.gather(1, top_ids)))


def largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest of `scores [rows, vocab]` float32, `[rows, count]` int64: largest first, ties by index.

    One integer encodes value and index: the bits of floats, made two's complement, order like the floats.
    """
    bits = scores.view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (order << 32) - torch.arange(scores.shape[1], device=scores.device)
    return -keys.topk(count, dim=-1).values & 0xFFFFFFFF


def penalise(row: Tensor, prompt: Tensor, output: Tensor, params: SamplingParams) -> None:
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
