"""The interface between planning and the compilation of grammars, which runs beside the engine's steps.

    handle(Add) ─► compile(request, grammar)          its request waits: `grammar_compiling`
    step()      ─► pop_compiled() ─► Scheduler.compiled(...)      it may be admitted, or it is rejected
    it ended    ─► release(request)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from slotwise.core.grammar import Grammar

POLL = 0.001  # seconds between two looks at a grammar while nothing else runs


class Compiled(NamedTuple):
    """The grammar of a request is compiled; `objection` says why it cannot be, "" if it is."""

    request_id: int
    objection: str = ""


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

    def pop_compiled(self) -> Sequence[Compiled]:
        """Returns the grammars compiled since the last call."""
        ...

    def release(self, request_id: int) -> None:
        """The request has ended.  Does nothing for one without a grammar."""
        ...
