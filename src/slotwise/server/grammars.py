"""The grammars of requests, checked in a worker process: they come from clients, and may take any time to compile.

A grammar that compiles there within the limits is sent to the engine, which compiles it beside its steps.  Results are
kept by content, so that a grammar that is used again costs nothing here.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from slotwise.core.grammar import JSON_SCHEMA, Grammar
from slotwise.server.body_precheck import GRAMMARS
from slotwise.server.errors import ApiError, bad_request, from_queue_full
from slotwise.server.protocol import Generate
from slotwise.server.turns import QueueFull, Turns
from slotwise.server.worker import CallError, Worker, WorkerError
from slotwise.server.worker_main import Limits
from slotwise.text.structured_output import StructuredOutputError, of_response_format, of_structured_outputs

MAX_WAITING, MAX_WAITING_OF_ONE = 1024, 256  # grammars of all clients, and of one
MAX_KNOWN = 4096  # results
GUIDED, RESPONSE_FORMAT = "guided_", "response_format"
INVALID = f"Invalid schema for {RESPONSE_FORMAT}: "  # OpenAI's words, by which LangChain tells what to do instead
LIMITS = Limits(seconds=5.0, memory=1 << 30, answer=1 << 16, niceness=5)


def grammar_of(request: Generate) -> Grammar | None:
    """What the output of a request must match; None: anything.

    Raises:
        ApiError: fields that describe no grammar, or several.
    """
    found: list[Grammar] = []
    for name in GRAMMARS:
        if (value := getattr(request, name)) is not None:
            try:
                grammar = _grammar(name, value)
            except StructuredOutputError as error:
                raise bad_request(str(error), name) from error
            found += [grammar] if grammar is not None else []
    if len(found) > 1:
        raise bad_request(f"{found[1].field}: not available with {found[0].field}", found[1].field)
    return found[0] if found else None


def _grammar(name: str, value: Any) -> Grammar | None:
    if name == RESPONSE_FORMAT:
        return of_response_format(value)
    return of_structured_outputs(value if name == "structured_outputs" else {name.removeprefix(GUIDED): value}, name)


class GrammarChecker:
    """Says which grammars the engine can use.

    Args:
        special: the tokenizer's special tokens, which a grammar may name.
    """

    def __init__(self, special: Iterable[str], limits: Limits = LIMITS) -> None:
        self._special = list(special)
        self._known: OrderedDict[bytes, str] = OrderedDict()  # objections by digest, the latest use last
        self._worker = Worker("slotwise.text.grammar_check", limits, Turns(MAX_WAITING, MAX_WAITING_OF_ONE))

    async def check(self, grammar: Grammar, holder: str) -> None:
        """Raises ApiError for a grammar that does not compile within the limits.

        Args:
            holder: the client; clients take turns.
        """
        key = hashlib.blake2b(f"{grammar.kind}\n{grammar.text}".encode(errors="replace"), digest_size=16).digest()
        objection = self._known.get(key)
        if objection is None:
            objection = self._known[key] = await self._objection(grammar, holder)
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if objection:
            is_schema = grammar.kind == JSON_SCHEMA and grammar.field == RESPONSE_FORMAT
            raise bad_request(f"{grammar.field}: {INVALID * is_schema}{objection}", grammar.field)

    async def _objection(self, grammar: Grammar, holder: str) -> str:
        try:
            return str(await self._worker.call(holder, "check", lambda: (grammar.kind, grammar.text, self._special)))
        except QueueFull as error:
            raise from_queue_full(error, "grammars to compile") from error
        except WorkerError as error:  # it crashed twice, most likely by this grammar
            raise ApiError(HTTPStatus.BAD_REQUEST, f"{grammar.field}: the compiler of grammars {error}",
                           param=grammar.field, code="grammar_failed") from error
        except CallError as error:
            raise bad_request(f"{grammar.field}: compiling the grammar {error}", grammar.field) from error
        except UnicodeError as error:
            raise bad_request(f"{grammar.field}: not valid Unicode", grammar.field) from error

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
