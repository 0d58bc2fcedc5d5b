"""From checked prompts to a complete response: the part that both endpoints share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, NamedTuple

from slotwise.core.params import SamplingParams
from slotwise.core.slo import SLO
from slotwise.engine.client import Refused
from slotwise.engine.generation import AT_THE_END
from slotwise.engine.messages import Add
from slotwise.server.active_requests import ActiveRequest
from slotwise.server.choice import Choice, Delta, together
from slotwise.server.context import Api
from slotwise.server.errors import SHED, ApiError, bad_request, from_refusal
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.logprobs import INTERVAL, LogprobsWriter, check_entries, held, num_prompt_entries
from slotwise.server.prompt_logprobs import PromptFormat, with_prompts
from slotwise.server.protocol import Generate
from slotwise.server.queue_headers import headers_of
from slotwise.server.shapes import Events, Heading, Shape, usage, whole_choice, whole_response
from slotwise.text.continuation import Continuation

SHORT_STOPS = 256  # characters of a request's stop strings that the event log shows
MAX_PROMPT_TOKENS = 1 << 23  # of all choices of a request: the engine keeps each choice's own, some 36 bytes a token
PASS_TOKENS = 1 << 16  # of choices that are sent to the engine in one pass of the event loop
MAX_BIASES = 1 << 16  # biased tokens of a request, times its choices: about a megabyte of the event log


class Job(NamedTuple):
    """A request that is ready to start."""

    request: Generate
    prompts: list[list[int]]
    params: SamplingParams
    heading: Heading
    slo: SLO
    salt: str
    received_ns: int  # monotonic
    traceparent: str  # W3C's header; empty when the caller is not traced

    @property
    def shape(self) -> Shape:
        return self.heading.shape

    @property
    def most_tokens(self) -> int:
        """The most tokens it may need, prompts and outputs."""
        return sum(map(len, self.prompts)) + len(self.prompts) * self.params.n * (self.params.max_tokens or 0)


async def start(api: Api, job: Job) -> list[Choice]:
    """`n` continuations of every prompt, in OpenAI's order: all or none.  Other clients are served between long ones.

    Raises:
        ApiError: the engine accepts no more, or these are too many.
    """
    tokenised_ns = time.monotonic_ns()
    prompts, params = job.prompts, job.params
    if len(prompts) * params.n > api.settings.max_choices:
        raise bad_request(f"n: at most {api.settings.max_choices} choices in one request", "n")
    if sum(map(len, prompts)) * params.n > MAX_PROMPT_TOKENS:
        raise bad_request(f"n: the prompts of all choices together may have at most {MAX_PROMPT_TOKENS} tokens", "n")
    check_entries(len(prompts) * params.n, params, sum(map(len, prompts)))
    _check_biases(len(prompts) * params.n, params)
    lengths = job.request.forced_lengths(len(prompts))
    api.check_capacity(job.slo, len(prompts) * params.n, sum(map(len, prompts)) * params.n)
    api.quotas.check_queue(api.quotas.account(job.slo.tenant), len(prompts) * params.n)
    timeout = _queue_timeout(api, job.request.queue_timeout)
    seed = api.seeds.getrandbits(63) if params.seed is None else params.seed
    sent, stop_lengths = _without_long_stops(params)
    choices: list[Choice] = []
    num_sent = 0  # tokens since the last pass of the event loop
    try:
        for prompt, output_tokens in zip(prompts, lengths, strict=True):
            for k in range(params.n):
                if (num_sent := num_sent + len(prompt)) > PASS_TOKENS:
                    num_sent = 0
                    await asyncio.sleep(0)
                unique = f"{job.heading.response_id}-{next(api.serials)}"
                text = Continuation(api.prompts.tokenizer, prompt, params.stop, params.min_tokens)
                if api.traces is not None and job.traceparent:
                    api.traces.caller(unique, job.traceparent)
                generation = api.engine_client.submit(Add(
                    unique, prompt, sent.of_choice(k), (seed + k) % 2**64, output_tokens, job.salt, timeout,
                    job.received_ns, tokenised_ns, job.slo, stop_lengths))
                choices.append(Choice(len(choices), generation, text))
    except BaseException as error:
        finish(choices, "abort")
        if isinstance(error, Refused):
            raise from_refusal(error, api.admission_control.retry_after) from error
        raise
    return choices


def _queue_timeout(api: Api, asked: float | None) -> float:
    """The smaller of the client's limit and the server's, in seconds; 0: none."""
    return min([bound for bound in (asked, api.settings.queue_timeout) if bound], default=0.0)


def _without_long_stops(params: SamplingParams) -> tuple[SamplingParams, tuple[int, ...]]:
    """Returns `params` for the engine and the event log, where every choice has its own, and the lengths of what it
    leaves out: this process alone looks for stop strings.
    """
    lengths = tuple(map(len, params.stop))
    return (params, ()) if sum(lengths) <= SHORT_STOPS else (replace(params, stop=()), lengths)


def _check_biases(num_choices: int, params: SamplingParams) -> None:
    """Raises ApiError when the biases of all choices together are too many: every choice is sent with its own."""
    if num_choices * len(params.logit_bias) > MAX_BIASES:
        raise bad_request(f"logit_bias: {num_choices} choices may have at most {MAX_BIASES // num_choices} tokens each",
                          "logit_bias")


def finish(choices: list[Choice], reason: str) -> None:
    """End the choices that have not ended."""
    for choice in choices:
        choice.generation.finish(reason)


async def answer(api: Api, exchange: HttpExchange, job: Job) -> None:
    """Generate and respond.  A client that disconnects aborts its generations.

    Raises:
        ApiError: the engine rejected the request, timed it out, or failed.
    """
    wait_estimate = api.admission_control.wait_estimate()
    choices: list[Choice] = []
    account = api.quotas.account(job.slo.tenant)
    with (api.quotas.reserved(account, job.most_tokens, lambda: _used(job, choices)),
          held(api.prompt_entries, exchange.holder, num_prompt_entries(job.params, sum(map(len, job.prompts))))):
        choices += await start(api, job)
        exchange.more += headers_of(wait_estimate)
        await _answered(api, exchange, job, choices)


async def _answered(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    names = (exchange.request_id, job.heading.response_id)

    def abort() -> None:
        finish(choices, "abort")

    try:
        with api.active_requests.listed(names, ActiveRequest(exchange.tenant, abort, choices, job.slo.tier)):
            async with exchange.watched(abort):
                await (_stream if job.request.stream else _whole)(api, exchange, job, choices)
    except ApiError as error:
        if error.code == SHED:
            error.retry_after = api.admission_control.retry_after
        raise
    except asyncio.CancelledError:
        raise
    except BaseException:  # detokenizing failed, say; a panic of the tokenizer is no Exception
        finish(choices, "error")
        raise
    finally:
        abort()


async def _whole(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    answers = await together([_whole_choice(job.shape, choice, _writer(api, job)) for choice in choices])
    extras = await _extras(api, exchange, job, choices)
    if job.params.prompt_logprobs is not None:
        extras |= await with_prompts(job.shape, job.prompts, choices, answers, PromptFormat(
            api.prompts.tokenizer, api.formatting))
    first_ns = time.monotonic_ns()
    body = whole_response(job.heading, answers, _usage(job, choices), extras)
    del answers, extras
    await exchange.respond_in_parts(body)
    last_ns = time.monotonic_ns()
    for choice in choices:
        api.batched_observer.sent(choice.generation.request_id, first_ns, last_ns, 1)


async def _whole_choice(shape: Shape, choice: Choice, writer: LogprobsWriter | None) -> list[bytes]:
    """A choice as JSON, in parts.  Waits once for all tokens, unless stop strings or log-probabilities are wanted.

    Raises:
        ApiError: the engine rejected or shed the request, timed it out, or failed.
    """
    if not choice.continuation.looks_for_stops:
        choice.generation.interval = AT_THE_END if writer is None else INTERVAL
    texts: list[str] = []
    reason = None
    async for chunk in choice.generation:
        delta = choice.read(chunk)
        texts.append(delta.text)
        if writer is not None:
            await writer.add(delta)
        if (reason := delta.finish_reason) is not None:
            break
    return whole_choice(shape, choice.index, "".join(texts), writer.pop() if writer is not None else [b"null"], reason)


def _writer(api: Api, job: Job) -> LogprobsWriter | None:
    if job.params.logprobs is None:
        return None
    return LogprobsWriter(job.shape.logprobs(api.prompts.tokenizer), api.formatting)


async def _stream(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    options = job.request.stream_options
    has_usage = options is not None and bool(options.include_usage)
    events = Events(job.heading, has_usage=has_usage)
    streams = [_Streamed(api, exchange, job, events) for _ in choices]
    await together([stream.run(choice) for stream, choice in zip(streams, choices, strict=True)])
    extras = await _extras(api, exchange, job, choices)
    await exchange.end(events.last(_usage(job, choices), extras) if has_usage or extras else b"")
    last_ns = time.monotonic_ns()
    for stream, choice in zip(streams, choices, strict=True):
        api.batched_observer.sent(choice.generation.request_id, stream.first_ns, last_ns, stream.num_events)


async def _extras(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> dict[str, Any]:
    """Slotwise's own fields of the response, where the request has `explain`."""
    if not job.request.explain:
        return {}
    ids = [choice.generation.request_id for choice in choices]
    return {"slotwise": await api.explainer.of_response(exchange.holder, ids)}


class _Streamed:
    """Writes one choice's events."""

    def __init__(self, api: Api, exchange: HttpExchange, job: Job, events: Events) -> None:
        options = job.request.stream_options
        self._exchange, self._events, self._job = exchange, events, job
        self._interval = api.settings.stream_interval
        self._writer = _writer(api, job)
        self._counts = options is not None and bool(options.continuous_usage_stats)
        self._is_plain = self._writer is None and not self._counts
        self.first_ns = 0  # monotonic, when the first event was written to the socket
        self.num_events = 0

    async def run(self, choice: Choice) -> None:
        """Write the first event as soon as there is a token, then one per interval.

        An event is written even where it adds no text (half a character, or what may begin a stop string): clients that
        time a stream count its events.
        """
        opening = self._events.opening(choice.index)
        async for chunk in choice.generation:
            delta = choice.read(chunk)
            if not self._is_plain or delta.finish_reason is not None:
                await self._exchange.event(opening + await self._full(choice, delta))
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
        prompt = self._job.prompts[choice.index // self._job.params.n]
        used = usage(len(prompt), choice.num_tokens, choice.num_cached) if self._counts else None
        return self._events.full(choice.index, delta, logprobs, used)


def _usage(job: Job, choices: list[Choice]) -> dict[str, Any]:
    cached = sum(choice.num_cached for choice in choices[:: job.params.n])
    return usage(sum(map(len, job.prompts)), sum(choice.num_tokens for choice in choices), cached)


def _used(job: Job, choices: list[Choice]) -> int:
    """Tokens of prompts that the engine started, and of outputs, whether read or not."""
    begun = {choice.index // job.params.n for choice in choices if choice.generation.num_cached >= 0}
    return sum(len(job.prompts[place]) for place in begun) + sum(
        choice.num_tokens + choice.generation.num_unread for choice in choices)
