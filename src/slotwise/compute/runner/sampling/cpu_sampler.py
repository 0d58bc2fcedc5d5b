"""From logits to tokens, on the CPU.

Plain greedy rows are one argmax.  Other rows are copied to float32, edited (`logit_edits.py`), filtered and drawn
(`compute/kernels/cpu/sampling_filters.py`) and, where requested, described by log-probabilities.  The same row gives
the same token in every batch, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slotwise.compute.kernels.cpu import sampling_filters as kernels
from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.reference import FAILED
from slotwise.compute.runner.sampling.grammar_masks import Masks
from slotwise.compute.runner.sampling.logit_edits import LogitEdits
from slotwise.compute.runner.sampling.sampler import (
    NO_LOGPROBS,
    Logprobs,
    RequestParams,
    SampledTokens,
    Sampling,
    SlotParams,
    sampled,
)
from slotwise.core.record import NewRequest

logger = logging.getLogger(__name__)


class Sampler(Sampling):
    """The sampling state of every slot.  One caller at a time.

    Args:
        num_slots: slots are numbered below this.
        vocab_size: logits per row.
        launcher: runs the kernels.
        masks: of the requests with a grammar.
    """

    def __init__(self, num_slots: int, vocab_size: int, launcher: KernelLauncher | None = None,
                 masks: Masks | None = None) -> None:
        self._vocab_size = vocab_size
        self._params = SlotParams(num_slots, vocab_size)
        self._edits: dict[int, LogitEdits] = {}  # by slot, of requests that have any
        self._not_greedy: set[int] = set()  # slots of requests of which some tokens take more than an argmax
        self._every = np.arange(num_slots)
        self._masks = masks
        self._launcher = launcher or KernelLauncher(torch.get_num_threads())
        self._work = torch.empty(0, vocab_size, dtype=torch.float32)

    def join(self, request: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        if request.spec.pooling is not None:
            return  # nothing is drawn
        params = self._params.join(request)
        self._edits.pop(request.slot, None)
        (self._not_greedy.add if params.greedy_from else self._not_greedy.discard)(request.slot)
        if params.is_edited(num_outputs=0):
            self._edits[request.slot] = LogitEdits(params, request.tokens, self._vocab_size)

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._params.leave(slot)
        self._edits.pop(slot, None)
        self._not_greedy.discard(slot)

    def draws_in_order(self, slot: int) -> bool:
        """See `Sampling`."""
        return self._params.draws_in_order(slot)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> SampledTokens:
        """Choose and record the next token of every row; see `Sampling`.

        Args:
            logits: `[rows, vocab]` bfloat16 or float32 on the CPU.
        """
        masked = self._masks.select(slots, positions) if self._masks is not None else None
        if masked is None and len(slots) <= len(self._every) and self._not_greedy.isdisjoint(slots):
            return sampled(self._greedy(logits, self._every[: len(slots)]).tolist(), None)
        requests, num_outputs = self._params.rows(slots, positions)
        special = [row for row, request in enumerate(requests) if num_outputs[row] < request.greedy_from]
        tokens = np.empty(len(slots), dtype=np.int64)
        logprobs = None
        if len(special) < len(slots):
            is_plain = np.ones(len(slots), np.bool_)
            is_plain[special] = False
            if masked is not None and (mine := masked.of(np.flatnonzero(is_plain))) is not None:
                tokens[mine.rows] = self._greedy(logits, mine.rows, mine.bits)
                is_plain[mine.rows] = False
            plain = np.flatnonzero(is_plain)
            tokens[plain] = self._greedy(logits, plain)
        if special:
            some = [requests[row] for row in special]
            indices = [num_outputs[row] for row in special]
            work = self._edited(logits, special, some, indices)
            if masked is not None and (mine := masked.of(np.array(special))) is not None:
                places = np.searchsorted(special, mine.rows)
                self._run(kernels.MASK, work.data_ptr(), work.shape[1], places.ctypes.data, len(places), 0,
                          mine.bits.ctypes.data)
            tokens[special] = drawn = self._draw(work, [request.slot for request in some], indices)
            logprobs = self._describe(work, special, some, drawn)
            self._record(some, drawn)
        return sampled(tokens.tolist(), logprobs)

    def _greedy(
        self, logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32] | None = None,
    ) -> NDArray[np.int64]:
        """The most probable token of every row.  Args: masks: `[rows, words]`, of the tokens that are allowed."""
        logits = logits.contiguous()
        tokens = np.empty(len(rows), dtype=np.int64)
        given = logits.data_ptr(), logits.shape[1], rows.ctypes.data, len(rows), tokens.ctypes.data
        if masks is None:
            parts = self._launcher.threads if len(rows) < self._launcher.threads else 1
            self._launcher.give(*given, parts, self._launcher.scratch(4 * len(rows) * parts))
            self._launcher.together(kernels.GREEDY[logits.dtype])
        else:
            self._run(kernels.MASKED_GREEDY[logits.dtype], *given, masks.ctypes.data)
        return tokens

    def _edited(
        self, logits: Tensor, rows: list[int], requests: list[RequestParams], num_outputs: list[int]
    ) -> Tensor:
        """Float32 copies of rows, with their requests' edits: `[len(rows), vocab]`, until the next call."""
        work = self._widened(logits, np.array(rows, dtype=np.int64))
        if not self._edits:
            return work
        for target, request, outputs in zip(work.numpy(), requests, num_outputs, strict=True):
            edits = self._edits.get(request.slot)
            if edits is not None:
                try:
                    edits.apply(target, outputs)
                except Exception:  # only this row fails
                    logger.exception("the edits of a request failed")
                    target.fill(np.nan)
        return work

    def _widened(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Float32 copies of rows: `[len(rows), vocab]`, until the next call."""
        if len(self._work) < len(rows):
            self._work = torch.empty(len(rows), self._vocab_size, dtype=torch.float32)
        logits, work = logits.contiguous(), self._work[: len(rows)]
        self._run(
            kernels.WIDEN[logits.dtype],
            logits.data_ptr(), logits.shape[1], rows.ctypes.data, len(rows), work.data_ptr(),
        )
        return work

    def _record(self, requests: list[RequestParams], tokens: NDArray[np.int64]) -> None:
        """Record the tokens as outputs, FAILED too: a step in flight counts on it."""
        for request, token in zip(requests, tokens.tolist(), strict=True) if self._edits else ():
            edits = self._edits.get(request.slot)
            if edits is not None:
                edits.record(token)

    def _draw(self, work: Tensor, slots: list[int], num_outputs: list[int]) -> NDArray[np.int64]:
        controls, seeds = self._params.controls[slots], self._params.seeds[slots]
        indices, tokens = np.array(num_outputs, dtype=np.uint64), np.empty(len(slots), dtype=np.int64)
        self._run(
            kernels.DRAW,
            work.data_ptr(), work.shape[1], 0, len(slots), tokens.ctypes.data, self._scratch(),
            controls.ctypes.data, seeds.ctypes.data, indices.ctypes.data,
        )
        return tokens

    def _describe(
        self, work: Tensor, rows: list[int], requests: list[RequestParams], drawn: NDArray[np.int64]
    ) -> Logprobs | None:
        """Log-probabilities of the rows that request them and did not fail; None if no row requests any."""
        wanted = [request.num_logprobs for request in requests]
        width = max(wanted)
        if width == NO_LOGPROBS:
            return None
        sound = [i for i, k in enumerate(wanted) if k != NO_LOGPROBS and drawn[i] != FAILED]
        places = np.array(sound, np.int64)
        columns = self._log_probabilities(work, places, drawn[places], width)
        return Logprobs([rows[i] for i in sound], [wanted[i] for i in sound], *columns)

    @torch.inference_mode()
    def describe(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """Log-probabilities of given tokens; see `Sampling`."""
        every, width = np.arange(len(logits)), min(num_top, self._vocab_size)
        work = self._widened(logits, every)
        sound = every[self._greedy(work, every) != FAILED]
        columns = self._log_probabilities(work, sound, tokens.numpy()[sound], width)
        return Logprobs(sound.tolist(), [width] * len(sound), *columns)

    def _log_probabilities(
        self, work: Tensor, places: NDArray[np.int64], tokens: NDArray[np.int64], width: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Columns of `Logprobs` for the rows `places` of `work`, all of them sound."""
        size = len(places)
        ranks, chosen = np.empty(size, np.int64), np.empty(size, np.float32)
        top_ids, top = np.empty((size, width), np.int32), np.empty((size, width), np.float32)
        self._run(
            kernels.LOG_PROBABILITIES,
            work.data_ptr(), work.shape[1], places.ctypes.data, size, tokens.ctypes.data, self._scratch(),
            chosen.ctypes.data, ranks.ctypes.data, top_ids.ctypes.data, top.ctypes.data, width,
        )
        return chosen, ranks, top_ids, top

    def _run(self, code: CompiledKernel, logits_at: int, vocab: int, rows_at: int, num_rows: int, *more: int) -> None:
        self._launcher.give(logits_at, vocab, rows_at, num_rows, *more)
        if num_rows == 1:
            self._launcher.alone(code)
        else:
            self._launcher.together(code)

    def _scratch(self) -> int:
        """Address of all threads' scratch memory for candidates."""
        return self._launcher.scratch(kernels.SCRATCH_BYTES // 4 * self._vocab_size * self._launcher.threads)
