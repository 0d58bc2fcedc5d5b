"""Grammars of requests, compiled by llguidance, and their masks of allowed tokens for each position that is sampled.

A thread of low priority compiles, next to the engine's steps:

    compile(request, grammar) ─► cache: content ─► matcher      found: compiled at once
                                     ▲ thread, in order         not found: the request waits, others run
    pop_compiled() ◄─────────────────┘
    matcher(request) ─► a copy for its slot, as often as it is admitted, until release(request)

Grammars that cannot be used are cached, too: finding that out takes seconds.  A grammar is skipped when all of its
requests have ended before its turn.  A second thread fills the masks during the forward pass:

    prepare_draws   thread: read the tokens of earlier steps ─► move each matcher there ─► fill its masks
    forward pass    |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|
    select(...)     the sampler pops its rows' masks, and waits for the thread if it is not done

A mask has one bit per token, bit i of word i // 32.  After a draft the mask is that of the text with the draft; after a
draft that ends the output, or that the grammar does not allow, only the end may follow, and is dropped.  Afterwards the
matcher goes back to the tokens that are known, so nothing needs to be undone when drafts are not accepted, or when a
step has failed and runs again.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slotwise import grammar_compiler
from slotwise.compute.kernels.cpu.threads import roam
from slotwise.compute.runner.sampling.sampler import check_known
from slotwise.compute.runner.slots import Earlier, NumDrawn, SlotListener
from slotwise.core.params import Grammar
from slotwise.core.record import CompiledGrammar, NewRequest, StepPlan, StepResult
from slotwise.grammar_compiler import died, message_of

MAX_CACHED = 32  # grammars: one of the largest that the limits allow has taken 19 MB
MAX_OBJECTIONS = 128  # grammars that cannot be used
NICENESS = 10  # of the thread: steps go first

Content = tuple[str, str]
"""Kind and text of a grammar: what makes two of them equal."""


class Grammars:
    """Compiles and keeps the grammars of unfinished requests; see `engine.executor.GrammarCompiler`.

    Args:
        tokenizer: from `grammar_compiler.tokenizer_of`; None: no grammar compiles.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: OrderedDict[Content, Any] = OrderedDict()  # matchers, the latest use last
        self._objections: OrderedDict[Content, str] = OrderedDict()  # why others cannot be used, the latest last
        self._held: dict[int, tuple[Grammar, Any]] = {}  # by request: its grammar, and the matcher once compiled
        self._waiting: dict[Content, list[int]] = {}  # requests whose grammars the thread has
        self._ready: list[CompiledGrammar] = []
        self._wanted: queue.SimpleQueue[Content] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Content, Any, str]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def end_ids(self) -> list[int]:
        """The model's end tokens."""
        return list(self._tokenizer.eos_tokens) if self._tokenizer is not None else []

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for `pop_compiled`."""
        return bool(self._waiting or self._ready)

    @property
    def has_compiled(self) -> bool:
        """Whether `pop_compiled` returns any."""
        return bool(self._ready) or not self._done.empty()

    def compile(self, request_id: int, grammar: Grammar) -> None:
        """Compile the grammar of a request, unless it is known."""
        if self._tokenizer is None:
            self._ready.append(CompiledGrammar(request_id,
                                               f"{grammar.field}: not available with this model's tokenizer"))
            return
        content = (grammar.kind, grammar.text)
        if (objection := self._objections.get(content)) is not None:
            self._ready.append(CompiledGrammar(request_id, f"{grammar.field}: {objection}"))
            return
        matcher = self._cache.get(content)
        self._held[request_id] = (grammar, matcher)
        if matcher is not None:
            self._cache.move_to_end(content)
            self._ready.append(CompiledGrammar(request_id))
        elif content in self._waiting:
            self._waiting[content].append(request_id)
        else:
            self._waiting[content] = [request_id]
            self._wanted.put(content)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(self._tokenizer,), name="grammars", daemon=True)
                self._thread.start()

    def pop_compiled(self) -> list[CompiledGrammar]:
        """The grammars compiled since the last call."""
        compiled, self._ready = self._ready, []
        while not self._done.empty():
            content, matcher, objection = self._done.get()
            if matcher is not None:
                _add(self._cache, content, matcher, MAX_CACHED)
            elif objection:
                _add(self._objections, content, objection, MAX_OBJECTIONS)
            elif self._is_wanted(content):  # by a request that came later
                self._wanted.put(content)
                continue
            for request_id in self._waiting.pop(content):
                if (held := self._held.get(request_id)) is not None:  # else it has ended
                    self._held[request_id] = (held[0], matcher)
                    compiled.append(CompiledGrammar(request_id, objection and f"{held[0].field}: {objection}"))
        return compiled

    def release(self, request_id: int) -> None:
        """The request has ended."""
        self._held.pop(request_id, None)

    def matcher(self, request_id: int) -> Any:
        """A matcher of the request's grammar at its beginning, for one caller."""
        return self._held[request_id][1].deep_copy()

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens, special ones by their names."""
        return bytes(self._tokenizer.decode_bytes(list(tokens)))

    def tokens_of(self, text: bytes) -> list[int]:
        """The tokens of a text, as the tokenizer writes them."""
        return list(self._tokenizer.tokenize_bytes(text))

    def _run(self, tokenizer: Any) -> None:
        roam()
        if sys.platform == "linux":  # elsewhere it would be the whole process's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            content = self._wanted.get()
            result = grammar_compiler.compiled(tokenizer, *content) if self._is_wanted(content) else (None, "")
            self._done.put((content, *result))

    def _is_wanted(self, content: Content) -> bool:
        """Whether a request that has not ended waits for it."""
        return any(request_id in self._held for request_id in tuple(self._waiting.get(content, ())))


def _add(cache: OrderedDict[Content, Any], content: Content, value: Any, most: int) -> None:
    cache[content] = value
    if len(cache) > most:
        cache.popitem(last=False)


MAX_FORCED = 256  # bytes of a forced text that are tokenized after each step: about as many as a row may have drafts
MOST_FORCED = 16  # rows with grammars: with more, steps have no time for drafts

class RowMasks(NamedTuple):
    """The masks of some rows of a draw."""

    rows: NDArray[np.int64]  # ascending
    bits: NDArray[np.int32]  # [rows, words]

    def of(self, rows: NDArray[np.int64]) -> RowMasks | None:
        """Those of some rows of the draw, None for none."""
        mine = np.isin(self.rows, rows)
        if mine.all():
            return self
        return RowMasks(self.rows[mine], self.bits[mine]) if mine.any() else None


class Masks(SlotListener):
    """The matcher of every slot whose request has a grammar.  One caller at a time.

    Args:
        grammars: holds the compiled grammars.
        vocab_size: logits of a row.
        forces: rows may have drafts, so results name the tokens that grammars force.
    """

    def __init__(self, grammars: Grammars, vocab_size: int, *, forces: bool = False) -> None:
        self._grammars = grammars
        self._forces = forces
        self._texts: dict[int, _ConstrainedOutput] = {}  # by slot
        self._end = np.zeros(-(-vocab_size // 32), np.uint32)  # the mask of the end tokens
        for token in grammars.end_ids:
            self._end[token // 32] |= np.uint32(1 << token % 32)
        self._bits = np.zeros((0, -(-vocab_size // 32)), np.int32)
        self._places: dict[tuple[int, int], int] = {}  # rows of `_bits` by slot and position of the token
        self._filling: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "masks", initializer=roam)  # it starts with the first mask

    def join(self, request: NewRequest) -> None:
        """Set the slot's request, new or resumed after preemption."""
        self._texts.pop(request.slot, None)
        if request.spec.params.grammar is not None:
            matcher = self._grammars.matcher(request.request_id)
            self._texts[request.slot] = _ConstrainedOutput(request, matcher, self._grammars)

    def leave(self, slot: int) -> None:
        """Clear the slot."""
        self._texts.pop(slot, None)

    def are_in(self, plan: StepPlan) -> bool:
        """Whether a row of the plan has a grammar."""
        return bool(self._texts) and not self._texts.keys().isdisjoint(plan.slots)

    def prepare_draws(self, plan: StepPlan, num_drawn: NumDrawn, earlier: Earlier) -> None:
        """Begin to fill the masks of the plan's draws, during its forward pass."""
        if self.are_in(plan):
            drawn = plan._replace(num_logits=tuple(num_drawn(plan)))
            self._filling = self._thread.submit(self._fill, drawn, earlier)

    def complete(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Record a step's tokens; adds to the result what grammars force, and why rows cannot go on."""
        self.record(plan, result.tokens)
        if forced := self.forced(plan, result.tokens):
            result = result._replace(forced=forced)
        if not result.failed:
            return result
        objections = tuple([self.objection(plan.slots[row]) for row in result.failed])
        return result._replace(objections=objections) if any(objections) else result

    def select(self, slots: Sequence[int], positions: Sequence[int]) -> RowMasks | None:
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
        return RowMasks(np.array(rows, np.int64), self._bits[places])

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
        """By row, the tokens that grammars force after those sampled; () without drafts, or with too many rows."""
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


class _ConstrainedOutput:
    """The output of a request, and its matcher, which has consumed a beginning of it."""

    def __init__(self, request: NewRequest, matcher: Any, grammars: Grammars) -> None:
        self.request_id = request.request_id
        self.num_prompt = request.num_prompt
        self.error = ""
        self._grammar = request.spec.params.grammar
        self._matcher, self._grammars = matcher, grammars
        self._outputs = list(request.sampled)
        self._num_consumed = 0
        self._num_held = 0  # leading consumed tokens that are still outputs

    def record(self, first: int, tokens: Sequence[int]) -> None:
        """Record tokens after the first `first` outputs; they replace the tokens of a failed step."""
        if self._outputs[first:] != list(tokens):
            self._num_held = min(self._num_held, first)
        self._outputs[first:] = tokens

    def fill(self, first: int, drafts: Sequence[int], bits: NDArray[np.int32]) -> None:
        """Fill `bits [1 + drafts, words]` for the token after `first` outputs, and after each draft that may stand.

        All bits are 0, so that no token can be drawn, where the masks cannot be computed.
        """
        try:
            self._move_to(first)
            self._fill(drafts, bits)
        except Exception as error:
            bits.fill(0)
            self.error = self.error or f"{type(error).__name__}: {error}"

    def forced(self) -> tuple[int, ...]:
        """The first tokens that must follow the outputs, as the tokenizer writes them."""
        try:
            self._move_to(len(self._outputs))
            if self._matcher.is_stopped():
                return ()
            text = self._matcher.compute_ff_bytes()
            if len(text) <= MAX_FORCED:
                return tuple(self._matcher.compute_ff_tokens())
            begin = text[:MAX_FORCED].decode(errors="ignore").encode()
            return tuple(self._grammars.tokens_of(begin)[:-1])  # the last may go on behind it
        except Exception:  # a draft less; the next mask tells what is wrong
            return ()

    def _move_to(self, num_outputs: int) -> None:
        check_known(num_outputs, len(self._outputs))
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
        output = self._grammars.bytes_of([*self._outputs[: self._num_consumed], *drafts])
        why = message_of(self._matcher) if self._matcher.is_error() else ""
        return f"{grammar.field}: {died(grammar.kind, grammar.text, output, why)}"
