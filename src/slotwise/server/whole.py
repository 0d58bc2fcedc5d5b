"""Whole responses: all choices as one JSON object, sent when the last of them has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from slotwise.server.choice import Choice, Delta, together
from slotwise.server.context import Api
from slotwise.server.echo import put_prompts
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.job import Job, explained, usage_of, writer_of
from slotwise.server.logprobs import LogprobsWriter, PromptFormat, with_prompts
from slotwise.server.parsers.output_parser import Content, Part
from slotwise.server.prompt_transfer import transfer_fields
from slotwise.server.shapes import add_field, ending, message_fields, to_json, whole_choice, whole_response


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
    if job.repeated.offsets:
        await put_prompts(api, job, choices, writers)
    answers = [_choice(job, *one) for one in zip(choices, outputs, writers, strict=True)]
    del outputs, writers
    extras = await explained(api, exchange, job, choices)
    last: list[bytes] = []
    if job.request.prompt_logprobs is not None:
        last = await with_prompts(job.shape, job.prompts, choices, answers, PromptFormat(
            api.text.prompts.tokenizer, api.text.formatting))
    extras |= _repeated(job, answers) | transfer_fields(job.kv, api.engine.client.info.kv_transfer)
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
    echo, parts = job.echo(choice.index), output.parts
    said = job.shape.whole(echo + output.text) if parts is None else message_fields([Content(echo), *parts])
    answer = whole_choice(choice.index, said, [b"null"] if writer is None else writer.pop(),
                          ending(output.last.finish_reason, output.last.stop_reason))
    if job.request.return_token_ids:
        add_field(answer, b"token_ids", [to_json(output.token_ids)])
    return answer


def _repeated(job: Job, answers: Sequence[list[bytes]]) -> dict[str, Any]:
    """Adds the prompts' token ids to the `answers` of their choices, or returns them and their text as fields."""
    extras: dict[str, Any] = {}
    if job.request.return_token_ids:
        prompts = [to_json(prompt) for prompt in job.prompts]
        if job.shape.prompts_in_choices:
            for index, answer in enumerate(answers):
                add_field(answer, b"prompt_token_ids", [prompts[job.place(index)]])
        else:
            extras["prompt_token_ids"] = msgspec.Raw(prompts[0])
    if job.repeated.prompt_text is not None:
        extras["prompt_text"] = job.repeated.prompt_text
    return extras
