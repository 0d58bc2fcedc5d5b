"""From logits to tokens, on the CPU.

A request's tokens depend on its own logits, parameters, seed and history alone, bit for bit: never on its batch-mates,
its row or its slot, nor on preemption and recomputation.  The random number of output i is a pure function of
(seed, i), so nothing need be kept or restored.

Plain greedy rows are one argmax.  The others are copied to float32, edited (`logits.py`), drawn
(`kernels/cpu/sampling.py`) and, where requested, described by log-probabilities.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slotwise.core.step import NewRequest, TokenLogprobs
from slotwise.kernels.cpu import sampling as kernels
from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.launcher import KernelLauncher
from slotwise.runner.sampling.interface import GREEDY_BELOW, Sampled
from slotwise.runner.sampling.logits import LogitEdits, has_penalties

_64_BITS = 2**64 - 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SlotState:
    """The sampling state of a slot's request."""

    num_prompt: int
    greedy_from: int  # outputs after which plain argmax is enough
    edits: LogitEdits | None
    num_logprobs: int | None


class Sampler:
    """The sampling state of every slot.  One caller at a time.

    Args:
        num_slots: slots are numbered below this.
        vocab_size: logits per row.
        launcher: runs the kernels.
    """

    def __init__(self, num_slots: int, vocab_size: int, launcher: KernelLauncher | None = None) -> None:
        self._vocab_size = vocab_size
        self._states: list[_SlotState | None] = [None] * num_slots
        self._controls = np.zeros((num_slots, 4), dtype=np.float32)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._launcher = launcher or KernelLauncher(torch.get_num_threads())
        self._work = torch.empty(0, vocab_size, dtype=torch.float32)

    def join(self, join: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        params = join.params
        greedy = params.temperature < GREEDY_BELOW
        bans_ends = params.min_tokens > 0 and bool(join.stop_ids)
        edits = None
        if bans_ends or params.logit_bias or has_penalties(params):
            edits = LogitEdits(join, self._vocab_size)
        plain = greedy and params.logprobs is None and not params.logit_bias and not has_penalties(params)
        greedy_from = (params.min_tokens if bans_ends else 0) if plain else sys.maxsize
        self._states[join.slot] = _SlotState(join.num_prompt, greedy_from, edits, params.logprobs)
        top_k = min(max(params.top_k, 0), self._vocab_size)
        self._controls[join.slot] = (0.0 if greedy else params.temperature, top_k, params.top_p, params.min_p)
        self._seeds[join.slot] = join.seed & _64_BITS

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._states[slot] = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
        """Choose and record the next token of every row.  A row that fails by its request's own edits fails alone.

        Args:
            logits: `[rows, vocab]` bfloat16 or float32 on the CPU; left as they are.
            slots: slot of each row, each at most once.
            positions: position of the new token in its request, prompt included.
        """
        states = [self._states[slot] for slot in slots]
        num_outputs = [position - state.num_prompt for position, state in zip(positions, states, strict=True)]
        special = [row for row, state in enumerate(states) if num_outputs[row] < state.greedy_from]
        tokens = np.empty(len(slots), dtype=np.int64)
        logprobs: list[TokenLogprobs | None] = []
        if len(special) < len(slots):
            is_plain = np.ones(len(slots), np.bool_)
            is_plain[special] = False
            plain = np.flatnonzero(is_plain)
            tokens[plain] = self._greedy(logits, plain)
        if special:
            work = self._edited(logits, special, states, num_outputs)
            tokens[special] = drawn = self._draw(work, [slots[r] for r in special], [num_outputs[r] for r in special])
            logprobs = self._describe(work, special, states, drawn)
            for row, token in zip(special, drawn.tolist(), strict=True):
                if states[row].edits is not None:
                    states[row].edits.record(token)  # FAILED too: a step in flight counts on it
        return Sampled(tokens.tolist(), logprobs, tuple(np.flatnonzero(tokens == kernels.FAILED).tolist()))

    def _greedy(self, logits: Tensor, rows: np.ndarray) -> np.ndarray:
        logits = logits.contiguous()
        tokens = np.empty(len(rows), dtype=np.int64)
        self._run(
            kernels.GREEDY[logits.dtype],
            logits.data_ptr(), logits.shape[1], rows.ctypes.data, len(rows), tokens.ctypes.data,
        )
        return tokens

    def _edited(self, logits: Tensor, rows: list[int], states: list[_SlotState], num_outputs: list[int]) -> Tensor:
        """Float32 copies of rows, with their requests' edits: `[len(rows), vocab]`, until the next call."""
        if len(self._work) < len(rows):
            self._work = torch.empty(len(rows), self._vocab_size, dtype=torch.float32)
        logits, work, which = logits.contiguous(), self._work[: len(rows)], np.array(rows, dtype=np.int64)
        self._run(
            kernels.WIDEN[logits.dtype],
            logits.data_ptr(), logits.shape[1], which.ctypes.data, len(rows), work.data_ptr(),
        )
        for target, row in zip(work.numpy(), rows, strict=True):
            edits = states[row].edits
            if edits is not None:
                try:
                    edits.apply(target, num_outputs[row])
                except Exception:  # only this row fails
                    logger.exception("the edits of a request failed")
                    target.fill(np.nan)
        return work

    def _draw(self, work: Tensor, slots: list[int], num_outputs: list[int]) -> np.ndarray:
        controls, seeds, indices = self._controls[slots], self._seeds[slots], np.array(num_outputs, dtype=np.uint64)
        tokens = np.empty(len(slots), dtype=np.int64)
        self._run(
            kernels.DRAW,
            work.data_ptr(), work.shape[1], 0, len(slots), tokens.ctypes.data, self._scratch(),
            controls.ctypes.data, seeds.ctypes.data, indices.ctypes.data,
        )
        return tokens

    def _describe(
        self, work: Tensor, rows: list[int], states: list[_SlotState], drawn: np.ndarray
    ) -> list[TokenLogprobs | None]:
        """Log-probabilities by row of the batch, [] when no row has any."""
        asked = [i for i, row in enumerate(rows) if states[row].num_logprobs is not None]
        if not asked:
            return []
        found: list[TokenLogprobs | None] = [None] * len(states)
        sound = np.array([i for i in asked if drawn[i] != kernels.FAILED], dtype=np.int64)
        width = max(min(states[rows[i]].num_logprobs, self._vocab_size) for i in asked)
        tokens, ranks = drawn[sound], np.empty(len(sound), dtype=np.int64)
        chosen, top = np.empty(len(sound), dtype=np.float32), np.empty((len(sound), width), dtype=np.float32)
        top_ids = np.empty((len(sound), width), dtype=np.int32)
        self._run(
            kernels.LOG_PROBABILITIES,
            work.data_ptr(), work.shape[1], sound.ctypes.data, len(sound), tokens.ctypes.data, self._scratch(),
            chosen.ctypes.data, ranks.ctypes.data, top_ids.ctypes.data, top.ctypes.data, width,
        )
        for j, i in enumerate(sound.tolist()):
            k = states[rows[i]].num_logprobs
            found[rows[i]] = TokenLogprobs(
                float(chosen[j]), int(ranks[j]), tuple(top_ids[j, :k].tolist()), tuple(top[j, :k].tolist())
            )
        return found

    def _run(self, code: Compiled, logits_at: int, vocab: int, rows_at: int, num_rows: int, *more: int) -> None:
        self._launcher.give(logits_at, vocab, rows_at, num_rows, *more)
        if num_rows == 1:
            self._launcher.alone(code)
        else:
            self._launcher.together(code)

    def _scratch(self) -> int:
        """Address of all threads' scratch memory for candidates."""
        return self._launcher.scratch(kernels.SCRATCH_BYTES // 4 * self._vocab_size * self._launcher.threads)
