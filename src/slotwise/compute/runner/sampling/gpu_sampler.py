"""From logits to tokens on an asynchronous device: everything is enqueued, nothing waits.

Parameters are on the host and sent with the step; penalties read a request's tokens from the token table, where the
last of them may not be written yet when a step is enqueued.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.kernels.reference import Draw, Mask, allowed_only
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.sampling.grammar_masks import Masks
from slotwise.compute.runner.sampling.logit_edits import DeviceEdits
from slotwise.compute.runner.sampling.sampler import (
    NO_LOGPROBS,
    Logprobs,
    RequestParams,
    SampledTokens,
    Sampling,
    SlotParams,
    sampled,
)
from slotwise.compute.runner.staging import sender, to_host
from slotwise.core.record import NewRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Sampled tokens, being copied to the host."""

    column: Tensor
    tokens: Tensor  # [rows] int64, on the host once the device is done
    logprobs: Logprobs | None

    def read(self) -> SampledTokens:
        return sampled(self.tokens.tolist(), self.logprobs)


class DeviceSampler(Sampling):
    """The sampling state of every slot.  One caller at a time.

    Args:
        slots: the token table of all requests.
        vocab_size: logits per row.
        draw: as `draw` of `compute/kernels/reference.py`.
        device: of the logits.
        masks: of the requests with a grammar.
        mask: applies them.
    """

    def __init__(self, slots: SlotTable, vocab_size: int, draw: Draw, device: torch.device,
                 masks: Masks | None = None, mask: Mask = allowed_only) -> None:
        self._slots = slots
        self._masks = masks
        self._draw, self._mask = draw, mask
        self._params = SlotParams(slots.num_slots, vocab_size)
        self._edits: dict[int, DeviceEdits] = {}  # by slot, of requests that have any
        self._send = sender(device)

    def join(self, request: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        params = self._params.join(request)
        self._edits.pop(request.slot, None)
        if params.is_edited(num_outputs=0):
            words = np.array([token for word in params.bad_words for token in word], np.int64)
            stop_ids, bias_ids, allowed_ids, bad, bias = self._send(
                [params.stop_ids, params.bias_ids, params.allowed_ids, words], [params.bias.view(np.int32)])
            self._edits[request.slot] = DeviceEdits(params, stop_ids, bias_ids, bias.view(torch.float32), allowed_ids,
                                                 bad.split([*map(len, params.bad_words)]) if len(bad) else ())

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._params.leave(slot)
        self._edits.pop(slot, None)

    def draws_in_order(self, slot: int) -> bool:
        """See `Sampling`."""
        return self._params.draws_in_order(slot)

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> _Drawn:
        """Enqueue the choice of every row's next token; see `Sampling`."""
        requests, num_outputs = self._params.rows(slots, positions)
        places = list(slots)
        seeds, indices, controls = self._send(
            [self._params.seeds[places].view(np.int64), np.array(num_outputs, np.int64)],
            [self._params.controls[places].view(np.int32)])
        if any(request.is_edited(outputs) for request, outputs in zip(requests, num_outputs, strict=True)):
            logits = self._edited(logits, requests, num_outputs)
        masked = self._masks.select(slots, positions) if self._masks is not None else None
        if masked is not None:
            (rows,), (bits,) = self._send([masked.rows], ()), self._send((), [masked.bits])
            logits = self._mask(logits, rows, bits)
        column = self._draw(logits, controls.view(torch.float32), seeds, indices)
        return _Drawn(column, to_host(column), self._described(logits, requests, column))

    def _edited(self, logits: Tensor, requests: list[RequestParams], num_outputs: list[int]) -> Tensor:
        """A float32 copy, with every request's edits."""
        work = logits.to(torch.float32, copy=True)
        for row, request, outputs in zip(work, requests, num_outputs, strict=True):
            if request.is_edited(outputs):
                try:
                    known = self._slots.known(request.slot, 0, request.num_prompt + outputs)
                    self._edits[request.slot].apply(row, known, outputs)
                except Exception:  # only this row fails
                    logger.exception("the edits of a request failed")
                    row.fill_(torch.nan)
        return work

    def _described(self, logits: Tensor, requests: list[RequestParams], tokens: Tensor) -> Logprobs | None:
        """Log-probabilities of the rows that request them, being copied to the host."""
        asked = [row for row, request in enumerate(requests) if request.num_logprobs != NO_LOGPROBS]
        if not asked:
            return None
        wanted = [requests[row].num_logprobs for row in asked]
        (rows,) = self._send([np.array(asked, np.int64)], ())
        return logprobs_of(asked, wanted, logits.index_select(0, rows), tokens.index_select(0, rows).clamp(min=0))

    def describe(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """Log-probabilities of given tokens, NaN for unsound rows; see `Sampling`."""
        rows = range(len(logits))
        return logprobs_of(rows, [min(num_top, logits.shape[1])] * len(rows), logits, tokens)


def logprobs_of(rows: Sequence[int], wanted: Sequence[int], logits: Tensor, tokens: Tensor) -> Logprobs:
    """Log-probabilities of `tokens`, one in each row of `logits`, being copied to the host."""
    scores, place = logits.float(), tokens[:, None]
    logprobs = scores.log_softmax(-1)
    ranks = 1 + (scores > scores.gather(1, place)).sum(-1)
    top_ids = largest(scores, max(1, *wanted))
    return Logprobs(
        rows, wanted, to_host(logprobs.gather(1, place)[:, 0]), to_host(ranks), to_host(top_ids),
        to_host(logprobs.gather(1, top_ids)))


def largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest of `scores [rows, vocab]` float32, `[rows, count]` int64: largest first, ties by index.

    One integer encodes value and index: the bits of floats, made two's complement, order like the floats.
    """
    bits = scores.view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (order << 32) - torch.arange(scores.shape[1], device=scores.device)
    return -keys.topk(count, dim=-1).values & 0xFFFFFFFF
