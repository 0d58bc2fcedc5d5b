"""From checked prompts to a complete response: the part that both endpoints share."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from http import HTTPStatus
from typing import Any, NamedTuple

from slotwise.core.params import SamplingParams
from slotwise.core.slo import SLO
from slotwise.engine.admission_control import AdmissionControl
from slotwise.engine.client import QUEUE_FULL, EngineClient, Refused
from slotwise.engine.generation import AT_THE_END
from slotwise.engine.messages import Add
from slotwise.observe.batched_observer import BatchedObserver
from slotwise.observe.metrics import Metrics
from slotwise.observe.recorder import Recorder
from slotwise.observe.step_time import StepTimeModel
from slotwise.observe.traces import Traces
from slotwise.server import explain
from slotwise.server.active_requests import ActiveRequest, ActiveRequests
from slotwise.server.bodies import Bodies
from slotwise.server.browsers import Browsers
from slotwise.server.choice import Choice, Delta, together
from slotwise.server.errors import SHED, ApiError, bad_request, from_refusal
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.keys import Keys
from slotwise.server.logprobs import INTERVAL, LogprobsWriter, check_entries
from slotwise.server.prompts import Prompts
from slotwise.server.protocol import Generate
from slotwise.server.queue_position import headers_of
from slotwise.server.quotas import Account, Quotas
from slotwise.server.settings import ServerSettings
from slotwise.server.shapes import Events, Heading, Shape, usage, whole_choice, whole_response
from slotwise.server.slo import Tiers, slo_of
from slotwise.server.subscribers import Subscribers
from slotwise.text.continuation import Continuation


class Api:
    """The components that the endpoints work with.

    Args:
        step_times: a step-time model, possibly fitted earlier.
    """

    def __init__(self, engine_client: EngineClient, prompts: Prompts, settings: ServerSettings,
                 step_times: StepTimeModel) -> None:
        limits = engine_client.info.limits
        self.keys = Keys(settings.all_keys, settings.admin_api_key)
        self.browsers = Browsers(settings)
        self.bodies = Bodies(settings)
        self.tiers = Tiers(settings.tiers, self.keys)
        self.engine_client = engine_client
        self.prompts = prompts
        self.settings = settings
        self.metrics = Metrics(settings.served_model_name, engine_client.info, lambda: engine_client.healthy)
        self.admission_control = AdmissionControl(limits, settings.max_num_queued_reqs, settings.max_num_queued_tokens,
                                                  engine_client.max_live)
        self.recorder = Recorder()
        self.recorder.started(engine_client.info)
        self.quotas = Quotas(self.tiers.quota, self.admission_control, self.refused)
        self.subscribers = Subscribers()
        self.step_times = step_times
        self.metrics.told["step_time_model_error"] = lambda: step_times.error
        self.explainer = explain.Explainer()
        self._traces: Traces | None = None
        self.batched_observer = BatchedObserver([self.metrics, self.recorder, self.step_times])
        engine_client.observers += [self.admission_control, self.batched_observer]
        self.active_requests = ActiveRequests()
        self.formatting = asyncio.Lock()  # see server.logprobs
        self.num_exchanges = 0  # in progress, of any kind
        self._seeds = random.Random(settings.seed)
        self._serials = itertools.count()

    def check_room(self, slo: SLO, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raises ApiError when this many more do not fit the queue or their tier's bound, or the engine is closed.

        Args:
            slo: as far as it is known.
        """
        admission_control = self.admission_control
        try:
            self.engine_client.check_open()
        except Refused as refused:
            raise from_refusal(refused, admission_control.retry_after) from refused
        objection, retry_after = admission_control.objection(slo.tenant, num_requests, num_tokens), 0
        if not objection and (bound := self.tiers.bound(slo.tier)) is not None:
            objection = admission_control.tier_objection(slo, bound, num_requests)
            retry_after = admission_control.tier_retry_after(slo.tier, bound)
        if objection:
            self.refused(QUEUE_FULL)
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, objection, code=QUEUE_FULL,
                           retry_after=retry_after or admission_control.retry_after,
                           more=headers_of(admission_control.wait_estimate()))

    def account(self, exchange: HttpExchange) -> Account:
        """The account of a request's key; the response tells what is left of it."""
        account = self.quotas.account(exchange.tenant)
        exchange.last_told = account.headers
        return account

    def slo(self, request: Generate, tenant: str) -> SLO:
        """The objectives of a request.  Raises ApiError for a request that exceeds what its tier allows."""
        return slo_of(request, tenant, self.tiers.choose(request.service_tier, tenant))

    def close(self) -> None:
        """End the worker processes."""
        self.prompts.close()
        self.explainer.close()

    def trace(self, traces: Traces) -> None:
        """Trace every request from here on."""
        self._traces = traces
        self.recorder.tell(traces)

    def refused(self, kind: str) -> None:
        """Count a request that was refused before the engine service received it."""
        self.batched_observer.refused(kind)

    def start(self, job: Job) -> list[Choice]:
        """`n` continuations of every prompt, in OpenAI's order: all or none.

        Raises:
            ApiError: the engine accepts no more, or these are too many.
        """
        tokenised_ns = time.monotonic_ns()
        prompts, params = job.prompts, job.params
        if len(prompts) * params.n > self.settings.max_choices:
            raise bad_request(f"n: at most {self.settings.max_choices} choices in one request", "n")
        check_entries(len(prompts) * params.n, params)
        lengths = job.request.forced_lengths(len(prompts))
        self.check_room(job.slo, len(prompts) * params.n, sum(map(len, prompts)) * params.n)
        self.quotas.check_queue(self.quotas.account(job.slo.tenant), len(prompts) * params.n)
        timeout = self._queue_timeout(job.request.queue_timeout)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        choices: list[Choice] = []
        try:
            for prompt, drawn in zip(prompts, lengths, strict=True):
                for k in range(params.n):
                    # Tracing ids may repeat; the engine's may not.
                    unique = f"{job.heading.response_id}-{next(self._serials)}"
                    text = Continuation(self.prompts.tokenizer, prompt, params.stop, params.min_tokens)
                    if self._traces is not None and job.traceparent:
                        self._traces.caller(unique, job.traceparent)
                    generation = self.engine_client.submit(Add(
                        unique, prompt, params, (seed + k) % 2**64, drawn, job.salt, timeout,
                        job.received_ns, tokenised_ns, job.slo))
                    choices.append(Choice(len(choices), generation, text))
        except Exception as error:
            finish(choices, "abort")
            if isinstance(error, Refused):
                raise from_refusal(error, self.admission_control.retry_after) from error
            raise
        return choices

    def _queue_timeout(self, asked: float | None) -> float:
        """The smaller of the client's limit and the server's, in seconds; 0: none."""
        bounds = [bound for bound in (asked, self.settings.queue_timeout) if bound]
        return min(bounds, default=0.0)


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
    with api.quotas.reserved(account, job.most_tokens, lambda: _used(job, choices)):
        choices += api.start(job)
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
    told = await _told(api, exchange, job, choices)
    first_ns = time.monotonic_ns()
    await exchange.respond_in_parts(whole_response(job.heading, answers, _usage(job, choices), told))
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
    told = await _told(api, exchange, job, choices)
    await exchange.end(events.last(_usage(job, choices), told) if has_usage or told else b"")
    last_ns = time.monotonic_ns()
    for stream, choice in zip(streams, choices, strict=True):
        api.batched_observer.sent(choice.generation.request_id, stream.first_ns, last_ns, stream.num_events)


async def _told(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> dict[str, Any]:
    """Slotwise's own fields of the response, where the request has `explain`."""
    if not job.request.explain:
        return {}
    ids = [choice.generation.request_id for choice in choices]
    return {"slotwise": await explain.of_response(api, exchange.holder, ids)}


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
