"""The interfaces between planning and what runs concurrently: the executor, the compiler of grammars, adapters.

An executor runs plans strictly in order.  `submit` may return before the step is computed; `collect` returns the result
of the oldest step submitted.  Slots and blocks named in a plan's `released_slots`, `new_requests`, `freed_blocks`,
`expired_blocks`, `new_blocks`, `saves` and `loads` take effect when it is submitted, even if computing it fails, so
that the executor's state agrees with the scheduler's when the next plan comes.

Grammars are compiled while steps run:

    handle(Add) ─► compile(request, grammar)          its request waits: `grammar_compiling`
    step()      ─► pop_compiled() ─► Scheduler.compiled(...)      it may be admitted, or it is rejected
    it ended    ─► release(request)
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from slotwise.core.params import Grammar, PoolingSpec
from slotwise.core.record import FREED, PROPOSED, CompiledGrammar, RowKind, StepPlan, StepResult
from slotwise.core.request import Output

POLL = 0.001  # seconds between two looks at a grammar while nothing else runs


class GrammarCompiler(Protocol):
    """Compiles grammars on a thread of its own, in the order given.  The engine's thread calls it."""

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for `pop_compiled`."""
        ...

    @property
    def has_compiled(self) -> bool:
        """Whether `pop_compiled` returns any."""
        ...

    def compile(self, request_id: int, grammar: Grammar) -> None: ...

    def pop_compiled(self) -> Sequence[CompiledGrammar]:
        """Returns the grammars compiled since the last call."""
        ...

    def release(self, request_id: int) -> None:
        """The request has ended.  Does nothing for one without a grammar."""
        ...


class AdapterStore(Protocol):
    """The adapters of a model.

    Attributes:
        num_places: adapters that fit at the same time.
    """

    num_places: int

    def load(self, number: int, folder: Path) -> None:
        """Loads an adapter; on any thread, while steps run.  Raises an exception, with one line, if it cannot be."""
        ...

    def unload(self, number: int) -> None:
        """Forgets a loaded adapter, which no request has; on the thread of the steps."""
        ...


class Executor(Protocol):
    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult:
        """Returns the result of the oldest step submitted; raises the error of a step that failed."""
        ...


class Returnable(Protocol):
    """Memory, that of caches at least, which can be given back while no request is in a step."""

    def give_back(self) -> None:
        """Returns it to the system; the contents of caches are lost.  Raises OSError: it cannot."""
        ...


class ExpertCounts(Protocol):
    """Counts the tokens of each expert of a model with mixtures of experts."""

    def pop(self, *, is_idle: bool) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of each expert of each layer since the last call; () if there are none.

        Args:
            is_idle: no step is in flight: nothing may be left out.
        """
        ...


NextToken = Callable[[Sequence[int]], int]
"""A toy model: returns the token that follows a sequence."""

Propose = Callable[[Sequence[int], int], Sequence[int]]
"""A toy draft model: returns up to so many tokens that may follow a sequence."""


class FakeExecutor:
    """An executor with a function as the model, and a paged cache and host blocks that hold digests.

    A cache entry is a digest of its token and all before it, as keys and values depend on them.  Each step computes
    from the cache alone, so a block reused too early, a wrong prefix hit or a block table that differs from the
    scheduler's fails an assertion.
    """

    def __init__(
        self, block_size: int, next_token: NextToken, propose: Propose = lambda known, most: (),
        windows: Sequence[int] = (0,),
    ) -> None:
        """Args: windows: of each cache group, the tokens that a position sees; 0: all."""
        self._block_size = block_size
        self._next_token = next_token
        self._windows = windows
        self._propose = propose
        self._tokens: dict[int, list[int]] = {}  # slot -> known tokens
        self._num_at_join: dict[int, int] = {}  # slot -> known tokens when its request joined
        self._pooling: dict[int, PoolingSpec | None] = {}  # slot -> of its request
        self._tables: dict[int, list[list[int]]] = {}  # slot -> block table of each cache group
        self._cache: dict[tuple[int, int], int] = {}  # (block, offset) -> digest
        self._host: dict[tuple[int, int], int] = {}  # (host block, offset) -> digest
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        for block, place in plan.saves:
            self._host |= {(place, offset): self._cache[block, offset] for offset in range(self._block_size)}
        for place, block in plan.loads:
            self._cache |= {(block, offset): self._host[place, offset] for offset in range(self._block_size)}
        for slot in plan.released_slots:
            del self._tokens[slot], self._tables[slot]
        for join in plan.new_requests:
            assert join.slot not in self._tokens, f"slot {join.slot} is taken"
            assert join.spec.output is not Output.PROMPT_LOGPROBS, f"{join.spec.output} is not implemented"
            self._tokens[join.slot], self._tables[join.slot] = list(join.tokens), [[] for _ in self._windows]
            self._pooling[join.slot] = join.spec.pooling
            self._num_at_join[join.slot] = len(join.tokens)
        for slot, group, num_blocks in plan.freed_blocks:
            del self._tables[slot][group][-num_blocks:]
        for slot, group, num_blocks in plan.expired_blocks:
            table = self._tables[slot][group]
            first = next(index for index, block in enumerate(table) if block != FREED)
            table[first : first + num_blocks] = [FREED] * num_blocks
        for slot, group, blocks in plan.new_blocks:
            self._tables[slot][group].extend(blocks)
        named = tuple([self._named(plan, row) for row in range(len(plan.drafts))]) if plan.has_proposed else ()
        plan = plan.with_drafts(named) if named else plan
        tokens = tuple([self._run(plan, row) for row in range(plan.num_rows)])
        pooled = tuple([self._pooled(plan, row) for row in range(plan.num_rows)])
        self._results.append(StepResult(plan.step, tokens, pooled=pooled if any(pooled) else (), drafts=named))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def write(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Write the first tokens of a prompt into its blocks, as a transfer or a read from disk does."""
        digest = 0
        for position, token in enumerate(tokens):
            digest = hash((digest, token))
            self._cache[blocks[position // self._block_size], position % self._block_size] = digest

    def _named(self, plan: StepPlan, row: int) -> tuple[int, ...]:
        """Returns the drafts of a row, those of the draft model among them."""
        drafts = plan.drafts[row]
        if drafts[:1] != (PROPOSED,):
            return drafts
        return tuple(self._propose(self._tokens[plan.slots[row]][: plan.starts[row] + 1], len(drafts)))

    def _run(self, plan: StepPlan, row: int) -> tuple[int, ...]:
        slot, start, end = plan.slots[row], plan.starts[row], plan.starts[row] + plan.counts[row]
        drafts = plan.drafts[row] if plan.drafts else ()
        known = self._tokens[slot]
        if drafts:
            known[start + 1 :] = drafts
        for group in range(len(self._windows)):
            self._attend(slot, group, start, end)
        if (pooling := self._pooling[slot]) is not None:
            is_last = int(end == len(known))
            assert plan.num_logits[row] == (plan.counts[row] if pooling.reads_all else is_last)
            return ()
        is_decode = plan.kinds[row] is RowKind.DECODE
        assert plan.num_logits[row] == (1 + len(drafts) if is_decode or end == self._num_at_join[slot] else 0)
        return self._sampled(known, end - len(drafts), drafts) if plan.num_logits[row] else ()

    def _attend(self, slot: int, group: int, start: int, end: int) -> None:
        """Write the positions `start ... end - 1`, and read what they see."""
        known, window = self._tokens[slot], self._windows[group]
        for position in range(start, end):
            before = self._cache[self._place(slot, group, position - 1)] if position else 0
            self._cache[self._place(slot, group, position)] = hash((before, known[position]))
        history, first = 0, max(0, start - window + 1) if window else 0
        for position, token in enumerate(known[:end]):
            history = hash((history, token))
            if position >= first:
                stored = self._cache[self._place(slot, group, position)]
                assert stored == history, f"slot {slot} reads another request's cache"

    def _pooled(self, plan: StepPlan, row: int) -> bytes:
        """Returns the vector of a pooled prompt that this row completes: one number, the token after it."""
        slot, end = plan.slots[row], plan.starts[row] + plan.counts[row]
        if self._pooling[slot] is None or plan.kinds[row] is RowKind.DECODE or end < len(self._tokens[slot]):
            return b""
        return struct.pack("<f", self._next_token(self._tokens[slot]))

    def _sampled(self, known: list[int], end: int, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the accepted drafts and the token after them, and makes them known; `end`: of the tokens before."""
        del known[end:]  # drafts, or an old token that a rollback left
        for draft in (*drafts, None):
            known.append(self._next_token(known))
            if known[-1] != draft:
                break
        return tuple(known[end:])

    def _place(self, slot: int, group: int, position: int) -> tuple[int, int]:
        return self._tables[slot][group][position // self._block_size], position % self._block_size
