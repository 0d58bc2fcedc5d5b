"""Choices of responses: the engine's tokens, detokenized and ended by stop strings; and the requests in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from slotwise.api.http.api_errors import from_ending
from slotwise.api.parsers.base_parser import CallArguments, CallName, Content, Part
from slotwise.api.parsers.parser_table import TOOL_CALLS, ParsedOutput
from slotwise.core.record import TokenLogprobs
from slotwise.engine.generation import AT_THE_END, Chunk, Generation
from slotwise.text.stop_strings import Continuation

INTERVAL = 64  # tokens that are parsed, or formatted, at a time

T = TypeVar("T")


class Delta(NamedTuple):
    """Text and tokens since the last delta.  The last one has a finish reason.

    `stop_reason` is the stop string, or the stop token of the request, that ended the output.  `parts` is what a parser
    makes of the text; None where there is no parser, and the text is the answer.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: str | None
    stop_reason: str | int | None = None
    parts: Sequence[Part] | None = None

    def events(self) -> list[Delta]:
        """The deltas that a stream sends: tool calls are followed by their end, as in OpenAI's streams."""
        calls = any(isinstance(part, CallName | CallArguments) for part in self.parts or ())
        if self.finish_reason is None or not calls:
            return [self]
        return [self._replace(finish_reason=None, stop_reason=None),
                Delta("", (), (), self.finish_reason, self.stop_reason, ())]

    def after(self, text: str) -> Delta:
        """The same after more text of the answer."""
        parts = None if self.parts is None else [Content(text), *self.parts]
        return self._replace(text=text + self.text, parts=parts)


class Choice:
    """One continuation of one prompt.

    Args:
        stop_ids: stop tokens of the request, except for end tokens of the model.
        is_silent: the prompt is all that is wanted; the one token that the engine generates is dropped.
        parsed: parses the output; None: it is text.
    """

    def __init__(
        self, index: int, generation: Generation, continuation: Continuation, stop_ids: Collection[int] = (), *,
        is_silent: bool = False, parsed: ParsedOutput | None = None,
    ) -> None:
        self.index = index
        self.generation = generation
        self.continuation = continuation
        self._stop_ids = stop_ids
        self._is_silent = is_silent
        self._parsed = parsed

    @property
    def is_parsed(self) -> bool:
        return self._parsed is not None

    def wait(self, *, has_logprobs: bool = False) -> None:
        """Lets `generation` wait for all tokens, where no client waits for each.

        It comes in parts where its end may depend on them, or where much at once would delay every stream: a text is
        parsed, log-probabilities are formatted.
        """
        if not self.continuation.looks_for_stops:
            self.generation.interval = INTERVAL if has_logprobs or self.is_parsed else AT_THE_END

    @property
    def num_tokens(self) -> int:
        return self.continuation.num_tokens

    @property
    def drafted(self) -> tuple[int, int]:
        """Drafts of its output that were right, and those that were not; none after its end."""
        return self.generation.drafted(self.num_tokens)

    @property
    def num_cached(self) -> int:
        """Prompt tokens found in the cache."""
        return max(0, self.generation.num_cached)

    def read(self, chunk: Chunk) -> Delta:
        """The delta of a chunk.  A stop string in it ends the generation.

        Raises:
            ApiError: the engine rejected or shed the request, timed it out, or failed.
        """
        continuation, reason = self.continuation, chunk.finish_reason
        if reason in ("rejected", "timeout", "shed", "error"):
            raise from_ending(reason, chunk.message)
        if self._is_silent:
            return Delta("", (), (), "length" if reason == "stop" else reason)
        text, kept = continuation.read(chunk.token_ids, reason)
        stop_reason: str | int | None = continuation.stop_reason
        if stop_reason is not None:
            self.generation.finish("stop")
            reason = "stop"
        elif reason == "stop" and chunk.token_ids and chunk.token_ids[-1] in self._stop_ids:
            stop_reason = chunk.token_ids[-1]
        parts: Sequence[Part] | None = None
        if self._parsed is not None:
            parts, reason = self._parsed.read(text, reason)
            if reason == TOOL_CALLS:
                self.generation.finish("stop")
        if kept == len(chunk.token_ids):
            return Delta(text, chunk.token_ids, chunk.logprobs, reason, stop_reason, parts)
        return Delta(text, chunk.token_ids[:kept], chunk.logprobs[:kept], reason, stop_reason, parts)


def parts_of(delta: Delta) -> Sequence[Part]:
    """What a delta adds to an output, for routes that distinguish its parts."""
    if delta.parts is not None:
        return delta.parts
    return [Content(delta.text)] if delta.text else ()


async def together(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results, of all choices of a response; the first failure cancels the others and is raised as itself.

    One choice gets a task of its own, too: waking up through all layers below would cost it more at every token.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class ActiveRequest(NamedTuple):
    """A request in progress."""

    tenant: str
    abort: Callable[[], None]
    choices: Sequence[Choice]
    tier: str


class ActiveRequests:
    """Requests in progress by name.  Tracing ids may repeat, so a name may stand for several requests.

    `scope` is the tenant whose requests are searched; "": those of all tenants (see `Keys.scope_of`).
    """

    def __init__(self) -> None:
        self._active: dict[str, list[ActiveRequest]] = {}

    @contextmanager
    def listed(self, names: Sequence[str], request: ActiveRequest) -> Iterator[None]:
        """Register a request under `names` for the duration of the context."""
        keys = list(dict.fromkeys(names))
        for key in keys:
            self._active.setdefault(key, []).append(request)
        try:
            yield
        finally:
            for key in keys:
                self._active[key] = [other for other in self._active[key] if other is not request]
                if not self._active[key]:
                    del self._active[key]

    def named(self, scope: str, name: str) -> tuple[ActiveRequest, ...]:
        """All requests of this name within the scope."""
        return tuple([request for request in self._active.get(name, ()) if scope in ("", request.tenant)])

    def abort(self, scope: str, name: str) -> bool:
        """Abort all requests of this name.  Returns whether there were any."""
        found = self.named(scope, name)
        for request in found:
            request.abort()
        return bool(found)
