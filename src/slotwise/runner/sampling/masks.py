"""Masks of the tokens that the grammars of requests allow, for every position that a step samples.

    begin(plan)   thread: read the tokens of earlier steps ─► move each matcher there ─► fill its masks
    forward pass  |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|
    select(...)   the sampler takes its rows' masks, and waits for the thread if it is not done

A mask has one bit a token, bit i of word i // 32.  Behind a draft the mask is that of the text with the draft; behind
one that ends the output, or that the grammar does not allow, only the end may follow, and is dropped.  Afterwards the
matcher goes back to the tokens that are known, so nothing is undone when drafts are not accepted, or a step has failed
and is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slotwise.core.step import NewRequest, StepPlan
from slotwise.grammars import died, message_of
from slotwise.kernels.cpu.threads import roam
from slotwise.runner.sampling.grammars import Grammars

MOST_FORCED = 16  # rows with grammars: with more, steps have no time for drafts

Earlier = Callable[[], Iterable[tuple[StepPlan, Sequence[Sequence[int]]]]]
"""Steps whose results are not collected yet, each with the tokens that its rows sampled.  Waits for the device."""


class Selected(NamedTuple):
    """The masks of some rows of a draw."""

    rows: NDArray[np.int64]  # ascending
    bits: NDArray[np.int32]  # [rows, words]

    def of(self, rows: NDArray[np.int64]) -> Selected | None:
        """Those of some rows of the draw, None for none."""
        mine = np.isin(self.rows, rows)
        if mine.all():
            return self
        return Selected(self.rows[mine], self.bits[mine]) if mine.any() else None


class Masks:
    """The matcher of every slot whose request has a grammar.  One caller at a time.

    Args:
        grammars: holds the compiled grammars.
        vocab_size: logits of a row.
        forces: rows may have drafts: tokens that grammars force are told.
    """

    def __init__(self, grammars: Grammars, vocab_size: int, *, forces: bool = False) -> None:
        self._grammars = grammars
        self._forces = forces
        self._texts: dict[int, _Text] = {}  # by slot
        self._end = np.zeros(-(-vocab_size // 32), np.uint32)  # the mask of the end tokens
        for token in grammars.end_ids:
            self._end[token // 32] |= np.uint32(1 << token % 32)
        self._bits = np.zeros((0, -(-vocab_size // 32)), np.int32)
        self._places: dict[tuple[int, int], int] = {}  # rows of `_bits` by slot and position of the token
        self._filling: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "masks", initializer=roam)  # it starts with the first mask

    def join(self, join: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        self._texts.pop(join.slot, None)
        if join.params.grammar is not None:
            self._texts[join.slot] = _Text(join, self._grammars.matcher(join.request_id), self._grammars.bytes_of)

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._texts.pop(slot, None)

    def are_in(self, plan: StepPlan) -> bool:
        """Whether a row of the plan has a grammar."""
        return bool(self._texts) and not self._texts.keys().isdisjoint(plan.slots)

    def begin(self, plan: StepPlan, earlier: Earlier) -> None:
        """Begin to fill the masks of the plan's draws; `plan` has the logits alone that tokens are drawn from."""
        self._filling = self._thread.submit(self._fill, plan, earlier)

    def select(self, slots: Sequence[int], positions: Sequence[int]) -> Selected | None:
        """The masks of the rows that have a grammar; None when no row has.

        Args:
            positions: of the token to be drawn, prompt included.
        """
        if not self._texts:
            return None
        rows = [row for row, slot in enumerate(slots) if slot in self._texts]
        if not rows:
            return None
        self.finish()
        places = [self._places[slots[row], positions[row]] for row in rows]
        return Selected(np.array(rows, np.int64), self._bits[places])

    def finish(self) -> None:
        """Wait until the masks are filled."""
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.result()

    def record(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> None:
        """Record the tokens that a step sampled, by row."""
        if self.are_in(plan):
            for row, slot in enumerate(plan.slots):
                text = self._texts.get(slot)
                if text is not None and text.request_id == plan.request_ids[row] and tokens[row]:
                    text.record(_first_output(plan, row, text.num_prompt), tokens[row])

    def forced(self, plan: StepPlan, tokens: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """By row, the tokens that grammars force behind those sampled; () where none are told, or too many rows are."""
        if not self._forces or len(self._texts) > MOST_FORCED or not self.are_in(plan):
            return ()
        self.finish()
        texts = [self._texts.get(slot) if tokens[row] else None for row, slot in enumerate(plan.slots)]
        found = tuple([text.forced() if text is not None else () for text in texts])
        return found if any(found) else ()

    def objection(self, slot: int) -> str:
        """Why the last masks of the slot could not be computed; "" if they could."""
        text = self._texts.get(slot)
        return text.error if text is not None else ""

    def _fill(self, plan: StepPlan, earlier: Earlier) -> None:
        for step, tokens in earlier():
            self.record(step, tokens)
        rows = [row for row, slot in enumerate(plan.slots) if plan.num_logits[row] and slot in self._texts]
        self._reserve(sum(plan.num_logits[row] for row in rows))
        self._places.clear()
        for row in rows:
            slot = plan.slots[row]
            text, place = self._texts[slot], len(self._places)
            first = _first_output(plan, row, text.num_prompt)
            for index in range(plan.num_logits[row]):
                self._places[slot, text.num_prompt + first + index] = place + index
            bits = self._bits[place : len(self._places)]
            bits[1:] = self._end.view(np.int32)
            text.fill(first, plan.drafts[row] if plan.drafts else (), bits)

    def _reserve(self, num_rows: int) -> None:
        if len(self._bits) < num_rows:
            self._bits = np.zeros((2 * num_rows, self._bits.shape[1]), np.int32)


def _first_output(plan: StepPlan, row: int, num_prompt: int) -> int:
    """The number of outputs before the first token that the row draws."""
    return plan.starts[row] + plan.counts[row] - plan.num_logits[row] + 1 - num_prompt


class _Text:
    """The output of a request, and its matcher, which has consumed a beginning of it."""

    def __init__(self, join: NewRequest, matcher: Any, bytes_of: Callable[[Sequence[int]], bytes]) -> None:
        self.request_id = join.request_id
        self.num_prompt = join.num_prompt
        self.error = ""
        self._grammar = join.params.grammar
        self._matcher, self._bytes_of = matcher, bytes_of
        self._outputs = list(join.tokens[join.num_prompt :])
        self._num_consumed = 0
        self._num_held = 0  # of those that the matcher consumed, the first ones that are still outputs

    def record(self, first: int, tokens: Sequence[int]) -> None:
        """Tokens follow the first `first` outputs, and replace those of a step that failed."""
        if self._outputs[first:] != list(tokens):
            self._num_held = min(self._num_held, first)
        self._outputs[first:] = tokens

    def fill(self, first: int, drafts: Sequence[int], bits: NDArray[np.int32]) -> None:
        """Fill `bits [1 + drafts, words]` for the tokens behind `first` outputs, and behind each draft that may stand.

        All bits are 0, so that no token can be drawn, where the masks cannot be computed.
        """
        try:
            self._move_to(first)
            self._fill(drafts, bits)
        except Exception as error:
            bits.fill(0)
            self.error = self.error or f"{type(error).__name__}: {error}"

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow the outputs, as the tokenizer writes them."""
        try:
            self._move_to(len(self._outputs))
            return () if self._matcher.is_stopped() else tuple(self._matcher.compute_ff_tokens())
        except Exception:  # a draft less; the next mask tells what is wrong
            return ()

    def _move_to(self, num_outputs: int) -> None:
        if num_outputs > len(self._outputs):
            raise ValueError(f"a token is wanted after {num_outputs} outputs, of which {len(self._outputs)} are known")
        if (kept := min(num_outputs, self._num_held)) < self._num_consumed:
            self._matcher.rollback(self._num_consumed - kept)
            self._num_consumed = kept
        while self._num_consumed < num_outputs and not self._matcher.is_stopped():
            self._matcher.consume_token(self._outputs[self._num_consumed])
            self._num_consumed += 1
        self._num_held = self._num_consumed

    def _fill(self, drafts: Sequence[int], bits: NDArray[np.int32]) -> None:
        matcher, num_drafted = self._matcher, 0
        for row in bits:
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if num_drafted == len(drafts) or not matcher.validate_tokens([drafts[num_drafted]]):
                break
            matcher.consume_token(drafts[num_drafted])
            num_drafted += 1
        if matcher.is_error() or not bits[0].any():
            bits.fill(0)
            self.error = self._died(drafts[:num_drafted])
        elif num_drafted:
            matcher.rollback(num_drafted)

    def _died(self, drafts: Sequence[int]) -> str:
        """Why no token may follow the outputs that were consumed and some drafts, and what in the grammar did it."""
        if (grammar := self._grammar) is None:
            return ""
        output = self._bytes_of([*self._outputs[: self._num_consumed], *drafts])
        why = message_of(self._matcher) if self._matcher.is_error() else ""
        return f"{grammar.field}: {died(grammar.kind, grammar.text, output, why)}"
