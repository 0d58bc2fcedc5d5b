"""Responses of completions and chats: whole, when the last choice has ended, or events of each choice as it goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from slotwise.api.generate.choice import Choice, Delta, together
from slotwise.api.generate.context import Api
from slotwise.api.generate.generate import Job, explained, names_of, usage_of, writer_of
from slotwise.api.generate.logprobs import CompletionLogprobs, LogprobsWriter, PromptFormat, with_prompts
from slotwise.api.generate.prompt_transfer import transfer_fields
from slotwise.api.generate.shapes import (
    Events,
    add_field,
    drafted,
    ending,
    message_fields,
    to_json,
    usage,
    whole_choice,
    whole_response,
)
from slotwise.api.http.http_exchange import HttpExchange
from slotwise.api.parsers.base_parser import Content, Part


class Output(NamedTuple):
    """What a choice has generated, up to its last delta."""

    text: str
    parts: list[Part] | None  # of the text; None: it is not parsed
    token_ids: list[int]
    last: Delta


async def respond_whole(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    """Send the response.

    Raises:
        ApiError: the engine rejected or shed the request, timed it out, or failed.
    """
    writers = [writer_of(api, job, choice.index) for choice in choices]
    outputs = await together([_read(*pair) for pair in zip(choices, writers, strict=True)])
    if job.echo.offsets:
        await put_prompts(api, job, choices, writers)
    answers = [_choice(job, *one) for one in zip(choices, outputs, writers, strict=True)]
    del outputs, writers
    extras = await explained(api, exchange, job, choices)
    last: list[bytes] = []
    if job.request.prompt_logprobs is not None:
        last = await with_prompts(job.shape, job.prompts, choices, answers, PromptFormat(
            api.text.prompts.tokenizer, api.text.formatting))
    extras |= _prompt_fields(job, answers) | transfer_fields(job.spec.kv, api.engine.client.info.kv_transfer)
    first_ns = time.monotonic_ns()
    body = whole_response(job.heading, answers, usage_of(job, choices), extras, last)
    del answers, extras, last
    await exchange.respond_in_parts(body)
    last_ns = time.monotonic_ns()
    for choice in choices:
        api.observers.batched_observer.sent(choice.generation.request_id, first_ns, last_ns, 1)


async def _read(choice: Choice, writer: LogprobsWriter | None) -> Output:
    """All that a choice generates."""
    choice.wait(has_logprobs=writer is not None)
    texts: list[str] = []
    parts: list[Part] = []
    token_ids: list[int] = []
    delta = Delta("", (), (), None)
    async for chunk in choice.generation:
        delta = choice.read(chunk)
        texts.append(delta.text)
        parts += delta.parts or ()
        token_ids += delta.token_ids
        if writer is not None:
            await writer.add(delta)
        if delta.finish_reason is not None:
            break
    return Output("".join(texts), parts if choice.is_parsed else None, token_ids, delta)


def _choice(job: Job, choice: Choice, output: Output, writer: LogprobsWriter | None) -> list[bytes]:
    """A choice as JSON, in parts."""
    echo, parts = job.echo_of(choice.index), output.parts
    said = job.shape.whole(echo + output.text) if parts is None else message_fields([Content(echo), *parts])
    answer = whole_choice(choice.index, said, [b"null"] if writer is None else writer.pop(),
                          ending(output.last.finish_reason, output.last.stop_reason))
    if job.request.return_token_ids:
        add_field(answer, b"token_ids", [to_json(output.token_ids)])
    return answer


def _prompt_fields(job: Job, answers: Sequence[list[bytes]]) -> dict[str, Any]:
    """Adds the prompts' token ids to the `answers` of their choices, or returns them and their text as fields."""
    extras: dict[str, Any] = {}
    if job.request.return_token_ids:
        prompts = [to_json(prompt) for prompt in job.prompts]
        if job.shape.prompts_in_choices:
            for index, answer in enumerate(answers):
                add_field(answer, b"prompt_token_ids", [prompts[job.place(index)]])
        else:
            extras["prompt_token_ids"] = msgspec.Raw(prompts[0])
    if job.echo.prompt_text is not None:
        extras["prompt_text"] = job.echo.prompt_text
    return extras


async def put_prompts(api: Api, job: Job, choices: Sequence[Choice], writers: Sequence[LogprobsWriter | None]) -> None:
    """Place the entries of each prompt before those of its choices, which have ended."""
    names, num_choices = names_of(api, job), job.params.n
    for number, prompt in enumerate(job.prompts):
        first = number * num_choices
        formatted = CompletionLogprobs(names, partial(_next, iter(job.echo.offsets[number])))
        entries = choices[first].generation.prompt_logprobs
        of_prompt = LogprobsWriter(formatted, api.text.formatting)
        of_prompt.put(formatted.of_first(prompt[0]))
        await of_prompt.add(Delta("", prompt[1 : 1 + len(entries)], entries, None))
        lists = of_prompt.pop_lists()
        for writer in writers[first : first + num_choices]:
            if writer is not None:
                writer.put_first(lists)
        if job.request.prompt_logprobs is None:
            entries.clear()  # JSON takes half of the memory


def _next(offsets: Iterator[int], tokens: Sequence[int]) -> list[int]:
    return list(islice(offsets, len(tokens)))


async def respond_stream(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    """Send the events of all choices, each as soon as it is there.

    Raises:
        ApiError: the engine rejected or shed the request, timed it out, or failed.
    """
    options = job.request.stream_options
    has_usage = options is not None and bool(options.include_usage)
    may_call = job.parsing is not None and job.parsing.tools is not None
    events = Events(job.heading, has_usage=has_usage, may_call=may_call)
    streams = [_ChoiceStream(api, exchange, job, events, choice.index) for choice in choices]
    await together([stream.run(choice) for stream, choice in zip(streams, choices, strict=True)])
    extras = await explained(api, exchange, job, choices)
    await exchange.end(events.last(usage_of(job, choices), extras) if has_usage or extras else b"")
    last_ns = time.monotonic_ns()
    for stream, choice in zip(streams, choices, strict=True):
        api.observers.batched_observer.sent(choice.generation.request_id, stream.first_ns, last_ns, stream.num_events)


class _ChoiceStream:
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
        opening = self._events.opening(choice.index, self._prompt_fields() if choice.index == 0 else b"")
        echo = self._job.echo_of(choice.index)
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

    def _prompt_fields(self) -> bytes:
        """Fields of a chat's first event that repeat its prompt."""
        fields = b',"prompt_token_ids":' + to_json(self._job.prompts[0]) if self._has_ids else b""
        if self._job.echo.prompt_text is not None:
            fields += b',"prompt_text":' + to_json(self._job.echo.prompt_text)
        return fields
