"""A draft model: a smaller model that proposes the drafts of a step, which the target verifies in the same step.

    pass 0    |■■■■ positions its cache lacks ■■■■| last token |─► d1       all rows that propose, as one flat batch
    pass 1                                        |     d1     |─► d2       rows that propose more
    ...
    verify                                        |last d1 d2 .|            the target: `verification.py`

Each draft is drawn with the parameters, the history and the random number of its position, as the target's token there
will be: at any temperature, where both models give the same distribution, they give the same token (Chen et al., arXiv
2302.01318, accept by a ratio instead).  Grammars mask drafts as they mask the target's tokens.

The draft model's keys and values lie in the same blocks as the target's, in layers of their own.  It computes a
position when a draft needs it, so its cache may lack what the target's has: a prompt, or what a row decoded without
drafts.  A row that lacks many positions is caught up over several steps, in which it proposes nothing.

    target   |■■■■■■■■■■■■■■■■■■■■■■■|          until the row's start
    draft    |■■■■■■■■■■■■|                     held: what it computes before it proposes again
    blocks   |complete|complete|   |

Positions behind a row's start were computed from drafts that were not accepted, and no longer count at its next row.
Blocks that the draft model has computed to their end are *complete*, as long as they keep their tokens: in the prefix
cache, where the next request finds them, and on the host.  A request that finds other blocks computes them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.kernels.interface import LayerCache
from slotwise.compute.kernels.reference import FAILED
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.runner.decode_graphs import DecodeGraphs
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.sampling.sampler import Sampling
from slotwise.compute.runner.slots import PrepareDraws, SlotListener
from slotwise.compute.runner.staging import event_of, rows_of
from slotwise.core.record import PROPOSED, Proposing, RowKind, StepPlan, StepResult


class DraftPositions:
    """Follows the plans, as `SlotTable` does, whose block tables it reads.

    Args:
        num_blocks: of the device.
        num_host_blocks: of the host.
    """

    def __init__(self, slots: SlotTable, num_blocks: int, num_host_blocks: int) -> None:
        self._slots = slots
        self._held = np.zeros(slots.num_slots, np.int64)  # leading positions in the cache
        self._num_complete = np.zeros(slots.num_slots, np.int64)  # of a slot's first blocks
        self._is_complete = np.zeros(num_blocks, np.bool_)
        self._is_complete_on_host = np.zeros(num_host_blocks, np.bool_)

    def apply(self, plan: StepPlan) -> None:
        """Apply copies, blocks and new requests.  Call once per plan, after `SlotTable.apply`."""
        for block, place in plan.saves:
            self._is_complete_on_host[place] = self._is_complete[block]
        joined = {request.slot for request in plan.new_requests}
        starts = dict(zip(plan.slots, plan.starts, strict=True))
        found = {slot: starts.get(slot, 0) // self._slots.block_size for slot in joined}
        for slot, _, blocks in plan.new_blocks:
            self._is_complete[list(blocks[found.get(slot, 0) :])] = False
        for place, block in plan.loads:
            self._is_complete[block] = self._is_complete_on_host[place]
        if plan.slots:
            slots = np.array(plan.slots, np.int64)
            self._held[slots] = np.minimum(self._held[slots], np.array(plan.starts, np.int64))
        for slot, num_found in found.items():
            complete = self._is_complete[self._slots.blocks(slot)[:num_found]]
            self._num_complete[slot] = number = num_found if complete.all() else int(complete.argmin())
            self._held[slot] = number * self._slots.block_size

    def held(self, slot: int) -> int:
        """Number of leading positions of the slot's request that are in the cache."""
        return int(self._held[slot])

    def known(self, slot: int, end: int) -> None:
        """The positions until `end` were computed, from tokens that are known."""
        self._held[slot] = end
        first, behind = int(self._num_complete[slot]), end // self._slots.block_size
        if behind > first:
            self._is_complete[self._slots.blocks(slot)[first:behind]] = True
            self._num_complete[slot] = behind

    def drafted(self, slot: int, end: int) -> None:
        """The positions until `end` were computed, the last ones from drafts, which may not be accepted."""
        self._held[slot] = end


CATCH_UP = 512  # positions that a step computes before its rows propose, in addition to the last one of each row
ALL_LOGITS = 64  # in smaller steps all positions have logits, so they replay a graph


class _Proposal(NamedTuple):
    """The drafts of a plan's rows, given and proposed, and the cost of proposing."""

    drafts: tuple[tuple[int, ...], ...]
    proposing: Proposing


class _Span(NamedTuple):
    """What a pass computes of a row of the plan."""

    row: int
    start: int
    end: int
    samples: bool


class DraftModelRunner(SlotListener):
    """Proposes drafts.  One caller at a time.

    Args:
        decoder: the draft model; on the target's kernels.
        caches: one per layer, of the target's blocks.
        slots: known tokens and block tables, the target's.
        sampler: the target's.
        vocab_size: the target's logits.
        positions: which positions the caches hold.
        announce: receives a plan with its proposed drafts, before the target computes it.
    """

    def __init__(
        self, decoder: Decoder, caches: Sequence[LayerCache], slots: SlotTable, sampler: Sampling, vocab_size: int,
        positions: DraftPositions, announce: Callable[[StepPlan], None] = lambda plan: None,
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._slots = slots
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._positions = positions
        self._announce = announce
        self._graphs = DecodeGraphs(decoder, caches, slots)
        self._proposals: dict[int, _Proposal] = {}  # by step, until its result is complete

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's slots and blocks.  Call once per plan, after `SlotTable.apply`."""
        self._positions.apply(plan)

    def propose(self, plan: StepPlan, prepare_draws: PrepareDraws) -> StepPlan:
        """The plan with the drafts that it leaves to the executor.  Waits for the device."""
        began = time.perf_counter()
        longest = self._decoder.config.max_position_embeddings
        wanted = {row: min(len(drafts), longest - plan.starts[row]) for row, drafts in enumerate(plan.drafts)
                  if drafts[:1] == (PROPOSED,)}
        drafts = [() if row in wanted else given for row, given in enumerate(plan.drafts)]
        spans, passes, num_tokens = self._caught_up(plan, [row for row, most in wanted.items() if most > 0]), 0, 0
        while spans:
            passes += 1
            num_tokens += sum(span.end - span.start for span in spans)
            for row, token in self._draw(plan, spans, drafts, prepare_draws):
                if token != FAILED:
                    drafts[row] += (token,)
            for row, _, end, _ in spans:
                done = self._positions.known if passes == 1 else self._positions.drafted
                done(plan.slots[row], end)
            spans = [_Span(span.row, span.end, span.end + 1, samples=True) for span in spans
                     if span.samples and passes == len(drafts[span.row]) < wanted[span.row]]
        named = plan.with_drafts(tuple(drafts))
        self._announce(named)
        proposing = Proposing(time.perf_counter() - began, passes, num_tokens)
        self._proposals[plan.step] = _Proposal(tuple(drafts), proposing)
        return named

    def complete(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result, with the drafts of the plan and what proposing them took."""
        proposal = self._proposals.pop(plan.step, None)
        for step in [step for step in self._proposals if step < plan.step]:  # steps that failed
            del self._proposals[step]
        return result if proposal is None else result._replace(drafts=proposal.drafts, proposing=proposal.proposing)

    def _caught_up(self, plan: StepPlan, rows: list[int]) -> list[_Span]:
        """What the first pass computes: missing positions of rows, fewest first, until CATCH_UP is spent."""
        spans, left = [], CATCH_UP
        lacking = sorted((plan.starts[row] - self._positions.held(plan.slots[row]), row) for row in rows)
        for number, row in lacking:
            start = plan.starts[row]
            if number <= left:
                spans.append(_Span(row, start - number, start + 1, samples=True))
            elif left:
                spans.append(_Span(row, start - number, start - number + left, samples=False))
            left -= min(number, left)
        return sorted(spans)

    def _draw(
        self, plan: StepPlan, spans: Sequence[_Span], drafts: Sequence[tuple[int, ...]],
        prepare_draws: PrepareDraws,
    ) -> list[tuple[int, int]]:
        """Run the model on `spans`; returns row and next token of each span that samples, and makes these known."""
        drawing = [span for span in spans if span.samples]
        if drawing:
            prepare_draws(_drawn_by(plan, [span.row for span in drawing], drafts))
        every = sum(span.end - span.start for span in spans) <= ALL_LOGITS
        logits, targets = self._logits(_computed_by(plan, spans, every=every))
        if not drawing:
            return []
        num_logits, at = 0, []
        for span in spans:
            num_logits += span.end - span.start if every else span.samples
            if span.samples:
                at.append(num_logits - 1)
        slots, ends = [plan.slots[span.row] for span in drawing], [span.end for span in drawing]
        drawn = self._sampler.sample(self._fitted(rows_of(logits, at)), slots, ends)
        self._slots.append(rows_of(targets, at), drawn.column)
        done = event_of(logits.device)
        done.record()
        done.synchronize()
        return list(zip([span.row for span in drawing], drawn.read().tokens, strict=True))

    def _logits(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        batch, targets = self._slots.gather(plan)
        if self._decoder.config.vocab_size < self._vocab_size:
            batch = replace(batch, token_ids=batch.token_ids.clamp(max=self._decoder.config.vocab_size - 1))
        self._decoder.reach(batch.max_context_len)
        logits = self._graphs.logits(batch)
        if logits is None:
            logits = self._decoder.logits(self._decoder.hidden(batch, self._caches))
        return logits, targets

    def _fitted(self, logits: Tensor) -> Tensor:
        """As many logits as the target has: vocabularies of one tokenizer differ in their padding."""
        lacking = self._vocab_size - logits.shape[1]
        if lacking > 0:
            return torch.nn.functional.pad(logits, (0, lacking), value=-torch.inf)
        return logits[:, : self._vocab_size].contiguous() if lacking else logits


def _computed_by(plan: StepPlan, spans: Sequence[_Span], *, every: bool) -> StepPlan:
    """The plan of a pass.  `every`: all positions have logits, not only the last one of each row that samples."""
    counts = tuple([span.end - span.start for span in spans])
    return _rows(plan, [span.row for span in spans])._replace(
        starts=tuple([span.start for span in spans]), counts=counts,
        num_logits=counts if every else tuple([int(span.samples) for span in spans]), drafts=())


def _drawn_by(plan: StepPlan, rows: Sequence[int], drafts: Sequence[tuple[int, ...]]) -> StepPlan:
    """The plan of the draws that follow the drafts of `rows`, as the target would verify them."""
    counts = tuple([1 + len(drafts[row]) for row in rows])
    return _rows(plan, rows)._replace(
        counts=counts, num_logits=counts, drafts=tuple([drafts[row] for row in rows]))


def _rows(plan: StepPlan, rows: Sequence[int]) -> StepPlan:
    """Some decode rows of the plan, without what it changes."""
    return plan._replace(
        request_ids=tuple([plan.request_ids[row] for row in rows]), slots=tuple([plan.slots[row] for row in rows]),
        starts=tuple([plan.starts[row] for row in rows]), kinds=(RowKind.DECODE,) * len(rows),
        padding=(), held=(), new_requests=(), freed_blocks=(), new_blocks=(), released_slots=())
