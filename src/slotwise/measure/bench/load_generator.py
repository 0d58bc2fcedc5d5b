"""Sends a workload to an OpenAI-compatible server and times the answers as its clients see them.

An open loop sends each request at its time, whether or not others have ended: a slow server cannot slow the traffic
down, which is how users behave and what shows queues.  In a closed loop N users wait for their answers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any

import aiohttp
import msgspec
import uvloop

from slotwise.measure.bench.measures import (
    COMPLETED,
    FAILED,
    REJECTED,
    GoodputLimits,
    RequestOutcome,
    samples,
    serving_metrics,
)
from slotwise.measure.bench.results import environment, workload_facts
from slotwise.measure.workload.distributions import below, stream
from slotwise.measure.workload.workloads import Workload, WorkRequest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)
SAFE_VOCAB_SIZE = 4000  # token ids below it exist in nearly every vocabulary
CONNECT_SECONDS = 30.0
SILENT_SECONDS = 3600.0  # without a byte, after which an answer is abandoned
IDLE_SECONDS = 2.0  # connections are kept for the next request, shorter than servers keep them
MAX_EVENT = 1 << 20  # bytes of one server-sent event
MAX_STREAM = 1 << 28  # bytes of a streamed answer
MAX_TOKENS = 1 << 31  # that a server may say it counted
MAX_REASON = 300  # characters kept of a server's error message
MAX_ANSWER = 1 << 22  # bytes of an answer that is not streamed
WORDS = (
    "time", "year", "people", "way", "day", "thing", "life", "world", "school", "state", "family", "group", "country",
    "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "question", "work", "number",
    "night", "point", "home", "water", "room", "area", "story")
PREPARED_TOKENS = 10_000_000  # of prompts made before the start; later ones are made when they are sent
WARMUP_TOKENS = 16  # the most output tokens of a warm-up request


class BenchError(RuntimeError):
    """A measurement cannot begin; the message is one line that says why."""


class BrokenStream(Exception):
    """The answer is incomplete or malformed."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The server and endpoint of requests.  Raises ValueError for an invalid address."""

    base_url: str
    endpoint: str = COMPLETIONS
    model: str = ""
    api_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"a base URL begins with http:// or https://, and {self.base_url!r} does not")
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"the endpoint is one of {', '.join(ENDPOINTS)}, not {self.endpoint!r}")
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Phrasing:
    """How a workload's requests are written for a server.

    Raises:
        ValueError: the parts contradict each other.
    """

    vocab_size: int = SAFE_VOCAB_SIZE  # prompts are random ids below it
    text_prompts: bool = False  # words instead of token ids, about a token each
    ignore_eos: bool = True
    hidden_lengths: bool = False  # all have the common max_tokens; Slotwise ends each at its own length
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"--vocab-size must be at least 1, not {self.vocab_size}")
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"--temperature must be between 0 and 100, not {self.temperature}")
        if self.hidden_lengths and not self.ignore_eos:
            raise ValueError("--hidden-lengths end every answer at its length, and so need --ignore-eos")

    def body(self, target: BenchTarget, workload: Workload, request: WorkRequest) -> bytes:
        """The JSON of a request."""
        asks = workload.max_tokens if self.hidden_lengths else request.num_output
        content: dict[str, Any] = {
            "model": target.model, "max_tokens": asks, "temperature": self.temperature, "stream": True,
            "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            content["ignore_eos"] = True
        if self.hidden_lengths:
            content["bench_output_tokens"] = request.num_output
        if request.number < len(workload.conversations):
            content["messages"] = [
                {"role": role, "content": text} for role, text in workload.conversations[request.number]]
        elif target.endpoint == CHAT:
            content["messages"] = [{"role": "user", "content": prompt_text(workload, request)}]
        elif self.text_prompts:
            content["prompt"] = prompt_text(workload, request)
        else:
            content["prompt"] = workload.prompt_ids(request, self.vocab_size)
        return msgspec.json.encode(content)


def prompt_text(workload: Workload, request: WorkRequest) -> str:
    """As many words as the prompt has tokens; those of one prefix group begin alike."""
    shared = stream(workload.seed, f"prefix words {request.prefix}")
    own = stream(workload.seed, f"prompt words {request.number}")
    draws = [shared] * request.num_prefix + [own] * (request.num_prompt - request.num_prefix)
    return " ".join(WORDS[below(rng, len(WORDS))] for rng in draws)


# -- one streamed request ----------------------------------------------------------------------------------------------

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = 0


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str | None:
        said = self.content or self.reasoning_content or self.reasoning
        return said if said or self.role else self.content  # a role without text opens an answer before any token


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """True also for a token without text yet: half a character, or what may begin a stop string."""
        text = self.text if self.delta is None else self.delta.text
        return bool(text) or (text is not None and not self.finish_reason)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Client:
    """Sends requests over its own connections, as many as there are requests in progress.

    Args:
        clock: seconds since the run began.
    """

    def __init__(self, session: aiohttp.ClientSession, target: BenchTarget, clock: Callable[[], float]) -> None:
        self._session = session
        self._url = target.base_url + target.endpoint
        self._headers = target.headers | {"Content-Type": "application/json"}
        self._clock = clock

    async def complete(self, body: bytes, outcome: RequestOutcome) -> None:
        """Send `body` and fill `outcome`, whatever comes of it."""
        outcome.sent = self._clock()
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as response:
                if response.status != 200:
                    outcome.error = f"{response.status}: {await _reason(response)}"
                    refused = 400 <= response.status < 500 or response.status == 503
                    outcome.status = REJECTED if refused else FAILED
                else:
                    await self._read(response, outcome)
                    outcome.status = COMPLETED
        except (aiohttp.ClientError, OSError, TimeoutError, BrokenStream, ValueError, RecursionError) as error:
            outcome.status = FAILED  # the last two: events that cannot be decoded
            outcome.error = f"{type(error).__name__}: {error}"[:MAX_REASON]
        outcome.ended = outcome.ended or self._clock()

    async def _read(self, response: aiohttp.ClientResponse, outcome: RequestOutcome) -> None:
        """Raises BrokenStream when the answer is incomplete."""
        has_ended = False
        async for data in _events(response):
            now = self._clock()
            if data == b"[DONE]":
                break
            event = _decode(data)
            if event.error is not None:
                raise BrokenStream(_message(event.error))
            if event.usage is not None:
                outcome.num_prompt = event.usage.prompt_tokens
                outcome.num_output = event.usage.completion_tokens or 0
            for choice in event.choices:
                if choice.has_token:
                    outcome.token_times.append(now)
                if choice.has_token or choice.finish_reason:
                    outcome.ended = now
                has_ended = has_ended or bool(choice.finish_reason)
        if not has_ended:
            raise BrokenStream("the stream ended before the answer did")
        if not outcome.num_output:
            raise BrokenStream("the server sent no usage: the number of tokens is unknown")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events, one line each."""
    rest, size = bytearray(), 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_STREAM:
            raise BrokenStream(f"an answer of more than {MAX_STREAM} bytes")
        rest += chunk
        if b"\n" in chunk:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()
        if len(rest) > MAX_EVENT:
            raise BrokenStream(f"an event of more than {MAX_EVENT} bytes")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """A whole answer, cut at MAX_ANSWER bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER:
            break
    return bytes(body[:MAX_ANSWER])


async def _reason(response: aiohttp.ClientResponse) -> str:
    """The server's error message, on one line."""
    body = await _body(response)
    try:
        return _message(msgspec.json.decode(body))
    except (ValueError, RecursionError):
        return _message(body.decode(errors="replace") or response.reason or "no reason given")


def _message(said: Any) -> str:
    """The message within an error body of any of the usual shapes."""
    while isinstance(said, dict):
        said = said.get("error") or said.get("message") or said.get("detail") or str(said)
    return " ".join(str(said).split())[:MAX_REASON]


def open_session() -> aiohttp.ClientSession:
    """A session without a limit of connections: the workload alone determines their number."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS))


# -- the models of a server --------------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct):
    """A server's description of a model; `meta` is llama.cpp's."""

    id: str
    vocab_size: int | None = None
    meta: dict[str, Any] | None = None

    @property
    def known_vocab_size(self) -> int:
        """0 when the server does not report it."""
        reported = self.vocab_size or (self.meta or {}).get("n_vocab")
        return reported if isinstance(reported, int) and reported > 0 else 0


class _Models(msgspec.Struct):
    data: list[ModelCard] = []


async def list_models(session: aiohttp.ClientSession, target: BenchTarget) -> list[ModelCard]:
    """The models of a server; none when it has no such list.

    Raises:
        BenchError: no server answers there, or it refuses.
    """
    url = f"{target.base_url}/v1/models"
    timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
    try:
        async with session.get(url, headers=target.headers, timeout=timeout) as response:
            if response.status in (401, 403):
                raise BenchError(f"{target.base_url} wants a key: give it as --api-key ({await _reason(response)})")
            if response.status != 200:
                return []
            return msgspec.json.decode(await _body(response), type=_Models).data
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchError(f"no server answers at {target.base_url}: {_reason_of(error)}") from error
    except (ValueError, RecursionError):  # no JSON, or too deep
        return []


def _reason_of(error: Exception) -> str:
    """The system's message for an error, without the library's text around it."""
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = getattr(inner, "errno", None)
    words = os.strerror(number) if number and number > 0 else getattr(inner, "strerror", None)
    return words or str(inner) or type(error).__name__


# -- open and closed loops ---------------------------------------------------------------------------------------------

Prepare = Callable[[WorkRequest], bytes]
Send = Callable[[bytes, RequestOutcome], Awaitable[None]]
Watch = Callable[[RequestOutcome], None]


def ignore(outcome: RequestOutcome) -> None:
    """A `Watch` that does nothing."""


class LoadRun:
    """Sends a workload to a server.  `outcomes` holds those so far.

    Args:
        prepare: makes a request's body.
        watch: receives each outcome.
    """

    def __init__(self, workload: Workload, prepare: Prepare, watch: Watch = ignore) -> None:
        self._workload = workload
        self._prepare = prepare
        self._watch = watch
        self._start = 0.0
        self._bodies = {request.number: prepare(request) for request in _affordable(workload)}
        self.outcomes: list[RequestOutcome] = []

    def clock(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start

    async def run(self, send: Send) -> None:
        """Run until every request has an outcome.  When cancelled, requests in progress become unfinished outcomes.

        Args:
            send: sends a body and fills the outcome; does not raise for anything a server does.
        """
        self._start = time.perf_counter()
        await (self._closed(send) if self._workload.users else self._open(send))

    async def _open(self, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            for request in self._workload.requests:
                body = self._body(request)
                due = request.arrives_at or 0.0
                if (wait := due - self.clock()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._ask(send, body, RequestOutcome(request.number, due=due)))

    async def _closed(self, send: Send) -> None:
        waiting = iter(self._workload.requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._workload.users, len(self._workload.requests))):
                group.create_task(self._user(send, waiting))

    async def _user(self, send: Send, waiting: Iterator[WorkRequest]) -> None:
        for request in waiting:
            body = self._body(request)
            await self._ask(send, body, RequestOutcome(request.number, due=self.clock()))

    async def _ask(self, send: Send, body: bytes, outcome: RequestOutcome) -> None:
        try:
            await send(body, outcome)
        finally:
            self.outcomes.append(outcome)
            self._watch(outcome)

    def _body(self, request: WorkRequest) -> bytes:
        return self._bodies.pop(request.number, b"") or self._prepare(request)


def _affordable(workload: Workload) -> list[WorkRequest]:
    """The first requests, whose prompts together have at most `PREPARED_TOKENS`."""
    totals = accumulate(request.num_prompt for request in workload.requests)
    return [request for request, total in zip(workload.requests, totals, strict=True) if total <= PREPARED_TOKENS]


# -- a run and its result ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The outcome of a run."""

    outcomes: list[RequestOutcome]  # in order of completion
    duration: float  # seconds from the start to the last answer's end
    interrupted: bool


def resolve(target: BenchTarget, vocab_size: int = 0) -> tuple[BenchTarget, int]:
    """Query a server for what was not given: the target with its model, and the size of the vocabulary.

    Args:
        vocab_size: as given; 0: the server's if it reports one, else a safe one.

    Raises:
        BenchError: no server answers, or it lists no model and none was given.
    """
    async def ask() -> tuple[BenchTarget, int]:
        async with open_session() as session:
            cards = await list_models(session, target)
        if not cards and not target.model:
            raise BenchError(f"{target.base_url} does not say which models it has: name one with --model")
        model = target.model or cards[0].id
        reported = next((card.known_vocab_size for card in cards if card.id == model), 0)
        return replace(target, model=model), vocab_size or reported or SAFE_VOCAB_SIZE

    return uvloop.run(ask())


def measure(
    target: BenchTarget, workload: Workload, phrasing: Phrasing, *, num_warmups: int = 1, watch: Watch = ignore,
) -> LoadResult:
    """Send a workload and time the answers.  An interrupt ends it, and completed measurements are kept.

    Raises:
        BenchError: a warm-up request failed; the message has the server's answer.
        KeyboardInterrupt: before any request had an outcome.
    """
    load = LoadRun(workload, lambda request: phrasing.body(target, workload, request), watch)

    async def run() -> None:
        async with open_session() as session:
            client = Client(session, target, load.clock)
            for number in range(num_warmups):
                await _warm_up(client, _warmup_body(target, workload, phrasing, number))
            await load.run(client.complete)

    interrupted = False
    try:
        uvloop.run(run())
    except KeyboardInterrupt:
        if not load.outcomes:
            raise
        interrupted = True
    duration = max((outcome.ended for outcome in load.outcomes), default=0.0)
    return LoadResult(load.outcomes, duration, interrupted)


def _warmup_body(target: BenchTarget, workload: Workload, phrasing: Phrasing, number: int) -> bytes:
    """A request like the first of the workload, with a short answer and a prompt that does not recur."""
    first = workload.requests[0]
    number += len(workload.requests)
    return phrasing.body(
        target, workload, replace(first, number=number, num_output=min(first.num_output, WARMUP_TOKENS)))


async def _warm_up(client: Client, body: bytes) -> None:
    outcome = RequestOutcome(0)
    await client.complete(body, outcome)
    if outcome.status != COMPLETED:
        raise BenchError(f"the server does not serve the workload's kind of request: {outcome.error}")


def serving_result(
    target: BenchTarget, workload: Workload, measured: LoadResult, objectives: GoodputLimits,
) -> dict[str, Any]:
    """The result of a run, with the field names of `vllm bench serve` where it has them."""
    where, done = environment(), [outcome for outcome in measured.outcomes if outcome.status == COMPLETED]
    counted = sum(outcome.num_prompt for outcome in done) if workload.conversations else None
    return {
        "version": 1, "kind": "serve", "status": "interrupted" if measured.interrupted else "completed",
        "environment": where, "date": where["created"],
        "backend": "openai", "endpoint_type": target.endpoint, "model_id": target.model,
        "num_prompts": len(workload.requests), "request_rate": offered_rate(workload),
        "max_concurrency": workload.users or None, "seed": workload.seed,
        "workload": workload_facts(workload, counted, [outcome.num_output for outcome in done]),
        "goodput": objectives.limits,
        **serving_metrics(measured.outcomes, measured.duration, objectives), **samples(measured.outcomes),
    }


def offered_rate(workload: Workload) -> float | str:
    """Requests per second at which a workload arrives; "inf" if all at once or in a closed loop."""
    last = workload.requests[-1].arrives_at
    return (len(workload.requests) - 1) / last if last else "inf"
