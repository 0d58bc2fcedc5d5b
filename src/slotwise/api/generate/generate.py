"""From a request's body to its answer: what every route that uses the model shares.

    enter ──► body ──► the route's own check: a ValidatedRequest ──► Job ──► start: an Add for each choice ──► render
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from slotwise.api.generate.choice import ActiveRequest, Choice
from slotwise.api.generate.context import Api
from slotwise.api.generate.logprobs import (
    MAX_ENTRIES,
    ChatLogprobs,
    CompletionLogprobs,
    LogprobsWriter,
    TokenNames,
    TokenTexts,
    check_entries,
    held,
    num_prompt_entries,
)
from slotwise.api.generate.prompt_transfer import has_secret, transfer_of
from slotwise.api.generate.prompts import Encoding
from slotwise.api.generate.request_log import RequestLog, seconds_since
from slotwise.api.generate.shapes import Heading, Shape, drafted, usage
from slotwise.api.http.api_errors import SHED, ApiError, bad_request, from_params, from_refusal
from slotwise.api.http.http_exchange import HttpExchange, checked_request_id
from slotwise.api.limits.quotas import headers_of
from slotwise.api.limits.tiers import UNTIERED
from slotwise.api.parsers.parser_table import Parsing
from slotwise.api.protocol.protocol import Generate
from slotwise.core.params import InvalidParams, SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.routing.prompt import PIECE, read
from slotwise.core.scheduler_limits import HINTED, OBEYING, SLO
from slotwise.core.speculation.speculation_settings import NONE
from slotwise.engine.generation import AT_THE_END
from slotwise.engine.messages import UNSUBMITTED, Add, Timing
from slotwise.engine.refusals import Refused
from slotwise.text.detokenizer import TextOffsets, detokenizer
from slotwise.text.stop_strings import Continuation, VisibleTokens

PREFIX = b"x-slotwise-prefix"  # header in which a router names the pieces of a prompt
SESSION_HEADER, RETAIN_HEADER = b"x-session-id", b"x-retain"
MAX_SESSION = 512  # characters of a session's name
SHORTEST, LONGEST = 0.001, 86_400.0  # seconds of a retention

Renderer = Callable[[Api, HttpExchange, "Job", list[Choice]], Awaitable[None]]
"""Reads the choices of a request, and sends the response.  Raises ApiError: the engine could not finish it."""


class Echo(NamedTuple):
    """What a response repeats of its prompts."""

    texts: tuple[str, ...] = ()  # the text before the output of each prompt; empty: there is no echo
    offsets: tuple[list[int], ...] = ()  # where the tokens of each prompt begin in it, with log-probabilities
    prompt_text: str | None = None  # the conversation as rendered; None: it is not returned


NO_ECHO = Echo()


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request as its route has checked it.

    Attributes:
        spec: of all choices; each has its own prompt and seed.
        render: sends the response.
        is_silent: no output is wanted: `max_tokens` is 0.
        parsing: how outputs are parsed; None: they are text.
        shares_prefix: the prompts begin alike, so the first is computed before the others, which find its blocks in the
            prefix cache.
    """

    request: Generate
    prompts: list[list[int]]
    spec: RequestSpec
    render: Renderer
    echo: Echo = NO_ECHO
    is_silent: bool = False
    parsing: Parsing | None = None
    shares_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Job(ValidatedRequest):
    """A request that is ready to start.

    Attributes:
        num_retained: tokens that the retention of a prompt covers at most.
    """

    heading: Heading = field(kw_only=True)
    num_retained: int = 0

    @property
    def params(self) -> SamplingSpec:
        return self.spec.params

    @property
    def shape(self) -> Shape:
        return self.heading.shape

    @property
    def most_tokens(self) -> int:
        """The most tokens it may need, prompts and outputs."""
        return sum(map(len, self.prompts)) + len(self.prompts) * self.params.n * (self.params.max_tokens or 0)

    def echo_of(self, index: int) -> str:
        """The text before the output of choice `index`."""
        return self.echo.texts[self.place(index)] if self.echo.texts else ""

    def num_written(self, num_cached: int) -> int:
        """Tokens of the first prompt that are retained and were not among the `num_cached` found in the cache."""
        return max(0, self.num_retained - num_cached)

    def place(self, index: int) -> int:
        """Which of the prompts choice `index` continues."""
        return index // self.params.n


def names_of(api: Api, job: Job) -> TokenTexts:
    """What tokens are called next to their log-probabilities."""
    return TokenNames() if job.request.return_tokens_as_token_ids else api.text.prompts.tokenizer


def writer_of(api: Api, job: Job, index: int) -> LogprobsWriter | None:
    """Writes the log-probabilities of choice `index`; None where none are wanted."""
    if job.params.logprobs is None:
        return None
    names = names_of(api, job)
    if not job.shape.prompts_in_choices:
        return LogprobsWriter(ChatLogprobs(names), api.text.formatting)
    text = detokenizer(api.text.prompts.tokenizer, job.prompts[job.place(index)],
                       shows_special=job.request.skip_special_tokens is False)
    return LogprobsWriter(CompletionLogprobs(names, TextOffsets(text, len(job.echo_of(index))).of), api.text.formatting)


def usage_of(job: Job, choices: list[Choice]) -> dict[str, Any]:
    """The token counts of a response."""
    cached = sum(choice.num_cached for choice in choices[:: job.params.n])
    counts = usage(sum(map(len, job.prompts)), sum(choice.num_tokens for choice in choices), cached)
    return counts | (drafted([choice.drafted for choice in choices]) if job.request.prediction is not None else {})


async def explained(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> dict[str, Any]:
    """Slotwise's own fields of the response, where the request has `explain`."""
    if not job.request.explain:
        return {}
    ids = [choice.generation.request_id for choice in choices]
    return {"slotwise": await api.observers.explainer.of_response(exchange.holder, ids)}


def log_fields(
    request_log: RequestLog, job: Job, choices: Sequence[Choice], exchange: HttpExchange,
) -> dict[str, Any]:
    """What the log line of an exchange says about its generations, as far as they have come."""
    ends = Counter(choice.generation.end_reason or "unfinished" for choice in choices)
    first = min([at for choice in choices if (at := choice.generation.first_token_ns)], default=0)
    fields: dict[str, Any] = {
        "id": job.heading.response_id, "stream": bool(job.request.stream),
        "prompt_tokens": sum(map(len, job.prompts)),
        "cached_tokens": sum(choice.num_cached for choice in choices[:: job.params.n]),
        "output_tokens": sum(choice.num_tokens + choice.generation.num_unread for choice in choices),
        "finish_reasons": dict(ends), "read_s": seconds_since(exchange, exchange.read_ns),
        "first_token_s": seconds_since(exchange, first) if first else None}
    if job.spec.adapter:
        fields["adapter"] = job.spec.adapter_name
    if texts := request_log.texts(job.prompts):
        fields["prompts"] = texts
    return fields


Check = Callable[[Api, HttpExchange, bytes], Awaitable[ValidatedRequest]]
"""Decodes and checks a body, and encodes its prompts."""


async def respond(api: Api, exchange: HttpExchange, shape: Shape, prepare: Check) -> None:
    """Answer a request.  Raises ApiError: it cannot be served, or failed."""
    _enter(api, exchange)
    async with api.clients.bodies.reading(exchange) as body:
        try:
            validated = await prepare(api, exchange, body)
        except RecursionError as error:
            raise bad_request("the body is nested too deeply", code="too_deep") from error
        del body  # frees its memory while the response is generated
    request, spec = validated.request, validated.spec
    try:
        spec.params.check_vocabulary(api.engine.client.info.vocab_size, api.engine.client.info.eos_token_ids)
    except InvalidParams as error:
        raise from_params(error) from error
    tier = spec.slo.tier or (UNTIERED if request.service_tier is not None else "")
    salt = _salt(exchange.tenant, request.cache_salt)
    kv = transfer_of(request, validated.prompts, spec.params, api.engine.client.info.kv_transfer,
                     is_trusted=has_secret(exchange.scope["headers"], api.settings.kv_transfer_secret))
    spec = replace(spec, salt=salt, kv=kv, prediction=await _prediction(api, exchange, request),
                   queue_timeout=_queue_timeout(api, spec))
    spec, num_retained = _retention(api, exchange, request, replace(spec, session=session_of(exchange, spec)),
                                    validated.prompts)
    with api.engine.models.held(request.model) as adapter:
        name = api.settings.served_model_name
        if adapter is not None:
            name, spec = adapter.name, replace(spec, adapter=adapter.number, adapter_name=adapter.name)
        await answer(api, exchange, Job(
            request, validated.prompts, spec, validated.render, validated.echo, validated.is_silent, validated.parsing,
            validated.shares_prefix, heading=Heading.now(shape, exchange.request_id, name, tier),
            num_retained=num_retained))


def _queue_timeout(api: Api, spec: RequestSpec) -> float:
    """The smaller of the client's limit and the server's, in seconds; 0: none."""
    return min([bound for bound in (spec.queue_timeout, api.settings.queue_timeout) if bound], default=0.0)


def session_of(exchange: HttpExchange, spec: RequestSpec) -> str:
    """The name of a request's session: its header's, or else its body's."""
    return dict(exchange.scope["headers"]).get(SESSION_HEADER, b"").decode("latin-1")[:MAX_SESSION] or spec.session


def _retention(
    api: Api, exchange: HttpExchange, request: Generate, spec: RequestSpec, prompts: Sequence[Sequence[int]],
) -> tuple[RequestSpec, int]:
    """The request with what its header X-Retain says, and how many tokens of its first prompt its retention covers.

    Hints of other protocols are obeyed as far as the server can.

    Raises:
        ApiError: `retain`, in the body or the header, cannot be obeyed.
    """
    header = dict(exchange.scope["headers"]).get(RETAIN_HEADER)
    if header is not None:
        try:
            retain = float(header)
        except ValueError:
            retain = 0.0
        if not SHORTEST <= retain <= LONGEST:
            raise bad_request(f"X-Retain: must be a number of seconds from {SHORTEST:g} to {LONGEST:g}", "retain")
        spec = replace(spec, retain=retain, retain_tokens=0)
    if not spec.retain:
        return spec, 0
    limits, scheduling = api.engine.client.info.limits, api.engine.client.scheduling
    most = int(limits.num_blocks * scheduling.tenant_cache_share)
    num_blocks = [(spec.retain_tokens or len(prompt)) // limits.block_size for prompt in prompts]
    objection = ""
    if not limits.enable_prefix_caching:
        objection = "this server has no prefix cache; start it with --enable-prefix-caching"
    elif scheduling.eviction_policy not in OBEYING:
        objection = (f"the eviction policy {scheduling.eviction_policy} obeys no retention; set --eviction-policy "
                     f"{HINTED}")
    elif max(num_blocks) > most:
        objection = (f"the prompt has {max(num_blocks)} full blocks of {limits.block_size} tokens, and a tenant may "
                     f"retain {most}; set a larger --tenant-cache-share")
    if objection and (header is not None or request.retain is not None):
        raise bad_request(f"retain: {objection}", "retain", "retention_not_available")
    is_obeyed = limits.enable_prefix_caching and scheduling.eviction_policy in OBEYING
    return spec, min(num_blocks[0], most) * limits.block_size if is_obeyed else 0


async def _prediction(api: Api, exchange: HttpExchange, request: Generate) -> tuple[int, ...]:
    """The tokens that the client expects.  Raises ApiError where no drafts are verified."""
    if request.prediction is None:
        return ()
    speculation = api.engine.client.info.speculation
    if speculation is None or speculation.method == NONE:
        raise bad_request("prediction is not supported by a server that was started with the speculative-config "
                          "method none", "prediction", "unsupported_parameter")
    text, request.prediction.content = request.prediction.text, ""
    return await api.text.prompts.of_prediction(text, exchange.holder)


def check_truncation(num_tokens: int | None, longest: int) -> None:
    """Raises ApiError for a `truncate_prompt_tokens` out of range; -1 and None keep as many tokens as fit, and all."""
    if num_tokens is not None and num_tokens != -1 and not 0 < num_tokens <= longest:
        raise bad_request(f"truncate_prompt_tokens: must be -1 or between 1 and {longest}", "truncate_prompt_tokens")


def encoding_of(api: Api, request: Generate, num_output: int, *, adds_special_tokens: bool) -> Encoding:
    """How prompts are encoded.

    Args:
        num_output: tokens for which a prompt leaves room if as many of its own are kept as fit.
        adds_special_tokens: by default.
    """
    most, longest = request.truncate_prompt_tokens, api.text.prompts.longest
    check_truncation(most, longest)
    if most == -1:
        most = max(1, longest - num_output)
    adds = request.add_special_tokens
    return Encoding(adds_special_tokens if adds is None else adds, most, request.truncation_side != "right")


def _salt(tenant: str, cache_salt: str | None) -> str:
    """The salt of prefix-cache hashes.  Tenants' names are all of one length: no salt can equal another tenant's."""
    return f"{tenant}:{cache_salt}" if cache_salt else tenant


def _enter(api: Api, exchange: HttpExchange) -> None:
    """Refuse, before its body is read, a request that finds the queue full or its quota of requests used up."""
    api.limits.check_capacity(SLO(exchange.tenant))
    account = api.limits.account(exchange)
    api.limits.quotas.check_queue(account)
    api.limits.quotas.count_request(account)


def check(api: Api, exchange: HttpExchange, request: Generate, *, generates: bool = True) -> SLO:
    """All checks that need no prompt.  Returns the objectives the request is served on."""
    api.engine.models.adapter(request.model)
    if generates and (objection := api.engine.client.info.generation_objection):
        raise bad_request(f"{objection}; use /v1/embeddings", "model", "generation_not_supported")
    request.refuse_unsupported()
    if request.request_id is not None:
        exchange.request_id = checked_request_id(request.request_id, "request_id")
    return api.limits.slo(request, exchange.tenant)


SHORT_STOPS = 256  # characters of a request's stop strings that the event log shows
MAX_PROMPT_TOKENS = 1 << 23  # of all choices of a request: the engine keeps each choice's own, some 44 bytes a token
PASS_TOKENS = 1 << 16  # of choices that are sent to the engine in one pass of the event loop
CHOICE_TOKENS = 1 << 11  # a choice costs as much as so many tokens of its prompt
MAX_BIASES = 1 << 16  # biased tokens of a request, times its choices: about a megabyte of the event log
MAX_GRAMMARS = 2 << 20  # characters of a request's grammar, times its choices: each is sent and logged with its own
MAX_ECHO = 4 << 20  # characters of prompts in one response
LEAST_SHARED = 256  # tokens of a common prefix that others need not compute, if the first prompt is computed alone


async def start(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    """`n` continuations of every prompt, in OpenAI's order: all or none, or the first alone (see `follow`).

    Raises:
        ApiError: the engine accepts no more, or these are too many.
    """
    prompts, params, slo = job.prompts, job.params, job.spec.slo
    if len(prompts) * params.n > api.settings.max_choices:
        raise bad_request(f"n: at most {api.settings.max_choices} choices in one request", "n")
    if (sum(map(len, prompts)) + len(prompts) * len(job.spec.prediction)) * params.n > MAX_PROMPT_TOKENS:
        raise bad_request(f"n: the prompts of all choices together may have at most {MAX_PROMPT_TOKENS} tokens", "n")
    check_entries(len(prompts) * params.n, params, sum(map(len, prompts)))
    _check_biases(len(prompts) * params.n, params)
    _check_echo(job)
    job.request.forced_lengths(len(prompts))
    api.limits.check_capacity(slo, len(prompts) * params.n, sum(map(len, prompts)) * params.n)
    api.limits.quotas.check_queue(api.limits.quotas.account(slo.tenant), len(prompts) * params.n)
    await _submit(api, exchange, job, choices, prompts[: 1 if _is_led(api, job) else None])


def _is_led(api: Api, job: Job) -> bool:
    """Whether the first prompt is computed before the others: they find enough of it in the prefix cache."""
    limits, (first, *others) = api.engine.client.info.limits, job.prompts
    if not (job.shares_prefix and others and limits.enable_prefix_caching):
        return False
    shared, size = 0, limits.block_size
    while all(other[shared : shared + size] == first[shared : shared + size] for other in others) \
            and shared + size < len(first):
        shared += size
    return shared * len(others) >= LEAST_SHARED


async def follow(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    """Start the choices of the other prompts, if only the first one was started, once that is computed.

    Raises:
        ApiError: the engine accepts no more, or could not finish the first one.
    """
    rest = job.prompts[len(choices) // job.params.n :]
    if not rest:
        return
    (first,) = choices
    first.generation.interval = AT_THE_END
    async for chunk in first.generation:
        first.read(chunk)
    if first.generation.pooled:  # else it was aborted
        await _submit(api, exchange, job, choices, rest)


async def _submit(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice],
                  prompts: Sequence[Sequence[int]]) -> None:
    """Send the choices of some prompts to the engine.  Other clients are served between long ones.

    Raises:
        ApiError: the engine accepts no more; all choices are aborted.
    """
    timing = Timing(exchange.received_ns, exchange.read_ns, time.monotonic_ns())
    params = job.params
    lengths = job.request.forced_lengths(len(job.prompts))[len(choices) // params.n :]
    seed = api.engine.seeds.getrandbits(63) if params.seed is None else params.seed
    shared = _without_long_stops(job.spec)
    visible, stop_ids = _visible(job), _stop_ids(api, params)
    num_sent = 0  # tokens since the last pass of the event loop
    try:
        for prompt, forced_length in zip(prompts, lengths, strict=False):
            tokens = tuple(prompt)
            for k in range(params.n):
                if (num_sent := num_sent + len(prompt) + CHOICE_TOKENS) > PASS_TOKENS:
                    num_sent = 0
                    await asyncio.sleep(0)
                unique = f"{job.heading.response_id}-{next(api.engine.serials)}"
                text = Continuation(api.text.prompts.tokenizer, prompt, params.stop, params.min_tokens, visible)
                if api.observers.traces is not None and exchange.traceparent:
                    api.observers.traces.caller(unique, exchange.traceparent)
                spec = replace(shared, prompt=tokens, params=shared.params.of_choice(k), seed=(seed + k) % 2**64,
                               forced_length=forced_length, cache_generation=_cache_generation(api, exchange))
                generation = api.engine.client.submit(Add(UNSUBMITTED, spec, timing, unique))
                generation.num_prompt = len(prompt) if spec.prediction else 0
                choices.append(Choice(len(choices), generation, text, stop_ids, is_silent=job.is_silent,
                                      parsed=job.parsing.output() if job.parsing is not None else None))
    except BaseException as error:
        finish(choices, "abort")
        if isinstance(error, Refused):
            raise from_refusal(error, api.limits.admission_control.retry_after) from error
        raise


def _cache_generation(api: Api, exchange: HttpExchange) -> int:
    """The generation of the key's cached prompts, read right before a request is submitted.

    Between an earlier reading and the submission there may be a reset, after which the prompt must not be found.
    """
    return api.engine.sleep.generation_of(exchange.tenant) if api.engine.sleep is not None else 0


def _without_long_stops(spec: RequestSpec) -> RequestSpec:
    """Returns `spec` for the engine and the event log, where every choice has its own, with the lengths of the stop
    strings that it leaves out: this process alone looks for them.
    """
    lengths = tuple(map(len, spec.params.stop))
    if sum(lengths) <= SHORT_STOPS:
        return spec
    return replace(spec, params=replace(spec.params, stop=()), stop_lengths=lengths)


def _check_biases(num_choices: int, params: SamplingSpec) -> None:
    """Raises ApiError when what all choices are sent with is too large: biased and banned tokens, and grammars."""
    if params.grammar is not None and num_choices * len(params.grammar.text) > MAX_GRAMMARS:
        raise bad_request(f"{params.grammar.field}: {num_choices} choices may have a grammar of at most "
                          f"{MAX_GRAMMARS // num_choices} characters", params.grammar.field)
    for name, size in (("logit_bias", len(params.logit_bias)), ("allowed_token_ids", len(params.allowed_token_ids)),
                       ("bad_words", sum(map(len, params.bad_words_token_ids)))):
        if num_choices * size > MAX_BIASES:
            raise bad_request(f"{name}: {num_choices} choices may have at most {MAX_BIASES // num_choices} tokens each",
                              name)


def _check_echo(job: Job) -> None:
    """Raises ApiError for a response that would repeat too much of its prompts: each of `n` choices has its own."""
    ids = sum(map(len, job.prompts)) * job.params.n
    if job.request.return_token_ids and ids > MAX_ENTRIES:
        raise bad_request(f"return_token_ids: {ids} ids of prompts in all choices are more than {MAX_ENTRIES}",
                          "return_token_ids")
    characters = sum(map(len, job.echo.texts)) * job.params.n
    if characters > MAX_ECHO:
        raise bad_request(f"echo: {characters} characters of prompts in all choices are more than {MAX_ECHO}", "echo")


def _visible(job: Job) -> VisibleTokens:
    visible = VisibleTokens(bool(job.request.include_stop_str_in_output), job.request.skip_special_tokens is False)
    return visible if job.parsing is None else visible._replace(marks=job.parsing.marks)


def _stop_ids(api: Api, params: SamplingSpec) -> frozenset[int]:
    """Stop tokens that a response names as its stop reason: those that do not end every output of the model."""
    return frozenset(params.stop_token_ids).difference(
        () if params.ignore_eos else api.engine.client.info.eos_token_ids)


def finish(choices: list[Choice], reason: str) -> None:
    """End the choices that have not ended."""
    for choice in choices:
        choice.generation.finish(reason)


def named_prefix(exchange: HttpExchange) -> tuple[int, tuple[int, ...]]:
    """Returns the bytes of a request's prompt and its pieces, as its router names them; none without a router.

    Raises:
        ApiError: no router sends such a header.
    """
    given = dict(exchange.scope["headers"]).get(PREFIX)
    if given is None:
        return 0, ()
    try:
        return read(given.decode("latin-1"))
    except ValueError as error:
        raise bad_request(f"X-Slotwise-Prefix: {error}", "X-Slotwise-Prefix") from error


async def answer(api: Api, exchange: HttpExchange, job: Job) -> None:
    """Generate and respond.  A client that disconnects aborts its generations.

    Raises:
        ApiError: the engine rejected the request, timed it out, or failed.
    """
    wait_estimate, prefix = api.limits.admission_control.wait_estimate(), named_prefix(exchange)
    choices: list[Choice] = []
    account = api.limits.quotas.account(job.spec.slo.tenant)
    with (api.limits.quotas.reserved(account, job.most_tokens, lambda: _used(job, choices)),
          held(api.limits.prompt_entries, exchange.holder, num_prompt_entries(job.params, sum(map(len, job.prompts))))):
        exchange.about_generation = partial(log_fields, api.request_log, job, choices)
        await start(api, exchange, job, choices)
        api.observers.prefix_index.expect(choices[0].generation.request_id, prefix, len(job.prompts[0]), PIECE,
                                job.spec.adapter, exchange.tenant)
        exchange.more += headers_of(wait_estimate)
        await _generate(api, exchange, job, choices)


async def _generate(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
    names = (exchange.request_id, job.heading.response_id)

    is_aborted = False

    def abort() -> None:
        nonlocal is_aborted
        is_aborted = True
        finish(choices, "abort")

    try:
        active = ActiveRequest(exchange.tenant, abort, choices, job.spec.slo.tier)
        with api.engine.active_requests.listed(names, active):
            async with exchange.watched(abort), _kept_alive(api, exchange, job, choices):
                await follow(api, exchange, job, choices)
                if is_aborted:  # while the others were sent
                    abort()
                await job.render(api, exchange, job, choices)
    except ApiError as error:
        if error.code == SHED:
            error.retry_after = api.limits.admission_control.retry_after
        raise
    except asyncio.CancelledError:
        raise
    except BaseException:  # detokenizing failed, say; a panic of the tokenizer does not subclass Exception
        finish(choices, "error")
        raise
    finally:
        abort()


def _kept_alive(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> AbstractAsyncContextManager[None]:
    """Within it a silent stream shows signs of life: from then on the response has no other status than 200."""
    if not job.request.stream or exchange.scope["http_version"] == "1.0":
        return nullcontext()
    refuses = job.spec.queue_timeout or job.params.grammar is not None or job.spec.kv is not None

    def is_settled() -> bool:
        """Whether all choices have been admitted, or wait for slots alone, and for as long as it takes."""
        waits = not refuses and not api.engine.client.scheduling.ordering.shed_late
        return waits or all(choice.generation.num_cached >= 0 for choice in choices)

    return exchange.kept_alive(job.shape.waiting, api.settings.silence_timeout, is_settled)


def _used(job: Job, choices: list[Choice]) -> int:
    """Tokens of prompts that the engine started, and of outputs, whether read or not."""
    begun = {job.place(choice.index) for choice in choices if choice.generation.num_cached >= 0}
    return sum(len(job.prompts[place]) for place in begun) + sum(
        choice.num_tokens + choice.generation.num_unread for choice in choices)
