"""Grammars of requests, compiled by llguidance on a thread of low priority, beside the engine's steps.

    compile(request, grammar) ─► cache: content ─► matcher      found: compiled at once
                                     ▲ thread, in order         not found: the request waits, others run
    pop_compiled() ◄─────────────────┘
    matcher(request) ─► a copy for its slot, as often as it is admitted, until release(request)

Grammars that cannot be used are cached, too: finding that out takes seconds.  A grammar is skipped when all of its
requests have ended before its turn.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from slotwise import grammars
from slotwise.core.grammar import Grammar
from slotwise.engine.grammars import Compiled
from slotwise.kernels.cpu.threads import roam

MAX_CACHED = 32  # grammars: one of the largest that the limits allow has taken 19 MB
MAX_OBJECTIONS = 128  # grammars that cannot be used
NICENESS = 10  # of the thread: steps go first

Content = tuple[str, str]
"""Kind and text of a grammar: what makes two of them equal."""


class Grammars:
    """Compiles and holds the grammars of unfinished requests, as `engine.grammars.GrammarCompiler` says.

    Args:
        tokenizer: from `grammars.tokenizer_of`; None: no grammar compiles.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: OrderedDict[Content, Any] = OrderedDict()  # matchers, the latest use last
        self._objections: OrderedDict[Content, str] = OrderedDict()  # why others cannot be used, the latest last
        self._held: dict[str, tuple[Grammar, Any]] = {}  # by request: its grammar, and the matcher once compiled
        self._waiting: dict[Content, list[str]] = {}  # requests whose grammars the thread has
        self._ready: list[Compiled] = []
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

    def compile(self, request_id: str, grammar: Grammar) -> None:
        """Compile the grammar of a request, unless it is known."""
        if self._tokenizer is None:
            self._ready.append(Compiled(request_id, f"{grammar.field}: not available with this model's tokenizer"))
            return
        content = (grammar.kind, grammar.text)
        if (objection := self._objections.get(content)) is not None:
            self._ready.append(Compiled(request_id, f"{grammar.field}: {objection}"))
            return
        matcher = self._cache.get(content)
        self._held[request_id] = (grammar, matcher)
        if matcher is not None:
            self._cache.move_to_end(content)
            self._ready.append(Compiled(request_id))
        elif content in self._waiting:
            self._waiting[content].append(request_id)
        else:
            self._waiting[content] = [request_id]
            self._wanted.put(content)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(self._tokenizer,), name="grammars", daemon=True)
                self._thread.start()

    def pop_compiled(self) -> list[Compiled]:
        """The grammars compiled since the last call."""
        compiled, self._ready = self._ready, []
        while not self._done.empty():
            content, matcher, objection = self._done.get()
            if matcher is not None:
                _add(self._cache, content, matcher, MAX_CACHED)
            elif objection:
                _add(self._objections, content, objection, MAX_OBJECTIONS)
            elif self._is_wanted(content):  # by a request that came after it was skipped
                self._wanted.put(content)
                continue
            for request_id in self._waiting.pop(content):
                if (held := self._held.get(request_id)) is not None:  # else it has ended
                    self._held[request_id] = (held[0], matcher)
                    compiled.append(Compiled(request_id, objection and f"{held[0].field}: {objection}"))
        return compiled

    def release(self, request_id: str) -> None:
        """The request has ended."""
        self._held.pop(request_id, None)

    def matcher(self, request_id: str) -> Any:
        """A matcher of the request's grammar at its beginning, for one caller."""
        return self._held[request_id][1].deep_copy()

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens, special ones by their names."""
        return bytes(self._tokenizer.decode_bytes(list(tokens)))

    def _run(self, tokenizer: Any) -> None:
        roam()
        if sys.platform == "linux":  # elsewhere it would be the whole process's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            content = self._wanted.get()
            result = grammars.compiled(tokenizer, *content) if self._is_wanted(content) else (None, "")
            self._done.put((content, *result))

    def _is_wanted(self, content: Content) -> bool:
        """Whether a request that has not ended waits for it."""
        return any(request_id in self._held for request_id in tuple(self._waiting.get(content, ())))


def _add(cache: OrderedDict[Content, Any], content: Content, value: Any, most: int) -> None:
    cache[content] = value
    if len(cache) > most:
        cache.popitem(last=False)
