"""Streamed responses: events for each choice, as its tokens come."""

from __future__ import annotations

import time

from slotwise.server.choice import Choice, Delta, together
from slotwise.server.context import Api
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.job import Job, explained, usage_of, writer_of
from slotwise.server.shapes import Events, drafted, to_json, usage


async def respond_stream(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    """Send the events of all choices, each as soon as it is there.

    Raises:
        ApiError: the engine rejected or shed the request, timed it out, or failed.
    """
    options = job.request.stream_options
    has_usage = options is not None and bool(options.include_usage)
    may_call = job.parsing is not None and job.parsing.tools is not None
    events = Events(job.heading, has_usage=has_usage, may_call=may_call)
    streams = [_Streamed(api, exchange, job, events, choice.index) for choice in choices]
    await together([stream.run(choice) for stream, choice in zip(streams, choices, strict=True)])
    extras = await explained(api, exchange, job, choices)
    await exchange.end(events.last(usage_of(job, choices), extras) if has_usage or extras else b"")
    last_ns = time.monotonic_ns()
    for stream, choice in zip(streams, choices, strict=True):
        api.observers.batched_observer.sent(choice.generation.request_id, stream.first_ns, last_ns, stream.num_events)


class _Streamed:
    """Writes one choice's events."""

    def __init__(self, api: Api, exchange: HttpExchange, job: Job, events: Events, index: int) -> None:
        options = job.request.stream_options
        self._exchange, self._events, self._job = exchange, events, job
        self._interval = max(api.settings.stream_interval, job.request.stream_interval or 1)
        self._writer = writer_of(api, job, index)
        self._counts = options is not None and bool(options.continuous_usage_stats)
        self._has_ids = bool(job.request.return_token_ids)
        self._is_plain = self._writer is None and not self._counts and not self._has_ids and job.parsing is None
        self.first_ns = 0  # monotonic, when the first event was written to the socket
        self.num_events = 0

    async def run(self, choice: Choice) -> None:
        """Write the first event as soon as there is a token, then one per interval.

        An event is written even where it adds no text (half a character, or what may begin a stop string): clients that
        time a stream count its events.
        """
        opening = self._events.opening(choice.index, self._repeated() if choice.index == 0 else b"")
        echo = self._job.echo(choice.index)
        async for chunk in choice.generation:
            delta = choice.read(chunk)
            if echo:
                delta, echo = delta.after(echo), ""
            if not self._is_plain or delta.finish_reason is not None:
                written = [await self._full(choice, one) for one in delta.events()]
                await self._exchange.event(opening + b"".join(written))
            else:
                await self._exchange.event(opening + self._events.plain(choice.index, delta.text))
            if not self.num_events:
                self.first_ns = time.monotonic_ns()
            self.num_events += 1
            if delta.finish_reason is not None:
                return
            opening = b""
            choice.generation.interval = self._interval

    async def _full(self, choice: Choice, delta: Delta) -> bytes:
        logprobs = b"null"
        if self._writer is not None:
            await self._writer.add(delta)
            logprobs = b"".join(self._writer.pop())
        prompt = self._job.prompts[self._job.place(choice.index)]
        used = usage(len(prompt), choice.num_tokens, choice.num_cached) if self._counts else None
        if used is not None and self._job.request.prediction is not None:
            used |= drafted([choice.drafted])
        return self._events.full(choice.index, delta, logprobs, used, self._ids(delta, prompt))

    def _ids(self, delta: Delta, prompt: list[int]) -> bytes:
        """Fields of a choice with token ids, where the request wants them; those of its prompt once."""
        if not self._has_ids:
            return b""
        fields = b',"token_ids":' + to_json(delta.token_ids)
        if self._job.shape.prompts_in_choices and not self.num_events:
            fields += b',"prompt_token_ids":' + to_json(prompt)
        return fields

    def _repeated(self) -> bytes:
        """Fields of a chat's first event that repeat its prompt."""
        fields = b',"prompt_token_ids":' + to_json(self._job.prompts[0]) if self._has_ids else b""
        if self._job.repeated.prompt_text is not None:
            fields += b',"prompt_text":' + to_json(self._job.repeated.prompt_text)
        return fields
