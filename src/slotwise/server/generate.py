"""From checked prompts to a complete response: the part that all routes which use the model share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial

from slotwise.core.params import SamplingParams
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import UNSUBMITTED, Add, Timing
from slotwise.engine.refusals import Refused
from slotwise.routing.prompt import PIECE
from slotwise.server.active_requests import ActiveRequest
from slotwise.server.api_errors import SHED, ApiError, bad_request, from_refusal
from slotwise.server.choice import Choice
from slotwise.server.context import Api
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.job import Job, log_fields
from slotwise.server.logprobs import MAX_ENTRIES, check_entries, held, num_prompt_entries
from slotwise.server.quotas import headers_of
from slotwise.server.replica_state import named_prefix
from slotwise.text.continuation import Continuation, VisibleTokens

SHORT_STOPS = 256  # characters of a request's stop strings that the event log shows
MAX_PROMPT_TOKENS = 1 << 23  # of all choices of a request: the engine keeps each choice's own, some 36 bytes a token
PASS_TOKENS = 1 << 16  # of choices that are sent to the engine in one pass of the event loop
CHOICE_TOKENS = 1 << 11  # a choice costs as much as so many tokens of its prompt
MAX_BIASES = 1 << 16  # biased tokens of a request, times its choices: about a megabyte of the event log
MAX_GRAMMARS = 2 << 20  # characters of a request's grammar, times its choices: each is sent and logged with its own
MAX_ECHO = 4 << 20  # characters of prompts in one response

Renderer = Callable[[Api, HttpExchange, Job, list[Choice]], Awaitable[None]]
"""Reads the choices of a request, and sends the response.  Raises ApiError: the engine could not finish it."""


async def start(api: Api, job: Job) -> list[Choice]:
    """`n` continuations of every prompt, in OpenAI's order: all or none.  Other clients are served between long ones.

    Raises:
        ApiError: the engine accepts no more, or these are too many.
    """
    timing = Timing(job.received_ns, job.read_ns, time.monotonic_ns())
    prompts, params = job.prompts, job.params
    if len(prompts) * params.n > api.settings.max_choices:
        raise bad_request(f"n: at most {api.settings.max_choices} choices in one request", "n")
    if (sum(map(len, prompts)) + len(prompts) * len(job.prediction)) * params.n > MAX_PROMPT_TOKENS:
        raise bad_request(f"n: the prompts of all choices together may have at most {MAX_PROMPT_TOKENS} tokens", "n")
    check_entries(len(prompts) * params.n, params, sum(map(len, prompts)))
    _check_biases(len(prompts) * params.n, params)
    _check_repeated(job)
    lengths = job.request.forced_lengths(len(prompts))
    api.limits.check_capacity(job.slo, len(prompts) * params.n, sum(map(len, prompts)) * params.n)
    api.limits.quotas.check_queue(api.limits.quotas.account(job.slo.tenant), len(prompts) * params.n)
    timeout = _queue_timeout(api, job.request.queue_timeout)
    seed = api.engine.seeds.getrandbits(63) if params.seed is None else params.seed
    sent, stop_lengths = _without_long_stops(params)
    shown, stop_ids = _shown(job), _stop_ids(api, params)
    adapter, adapter_name = (job.adapter.number, job.adapter.name) if job.adapter is not None else (0, "")
    choices: list[Choice] = []
    num_sent = 0  # tokens since the last pass of the event loop
    try:
        for prompt, forced_length in zip(prompts, lengths, strict=True):
            tokens = tuple(prompt)
            for k in range(params.n):
                if (num_sent := num_sent + len(prompt) + CHOICE_TOKENS) > PASS_TOKENS:
                    num_sent = 0
                    await asyncio.sleep(0)
                unique = f"{job.heading.response_id}-{next(api.engine.serials)}"
                text = Continuation(api.text.prompts.tokenizer, prompt, params.stop, params.min_tokens, shown)
                if api.observers.traces is not None and job.traceparent:
                    api.observers.traces.caller(unique, job.traceparent)
                spec = RequestSpec(
                    tokens, sent.of_choice(k), (seed + k) % 2**64, salt=job.salt, slo=job.slo, pooling=job.pooling,
                    adapter=adapter, adapter_name=adapter_name, kv=job.kv, prediction=job.prediction,
                    forced_length=forced_length, queue_timeout=timeout, stop_lengths=stop_lengths)
                generation = api.engine.client.submit(Add(UNSUBMITTED, spec, timing, unique))
                generation.num_prompt = len(prompt) if job.prediction else 0
                choices.append(Choice(len(choices), generation, text, stop_ids, is_silent=job.is_silent,
                                      parsed=job.parsing.output() if job.parsing is not None else None))
    except BaseException as error:
        finish(choices, "abort")
        if isinstance(error, Refused):
            raise from_refusal(error, api.limits.admission_control.retry_after) from error
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
    """Raises ApiError when what all choices are sent with is too large: biased and banned tokens, and grammars."""
    if params.grammar is not None and num_choices * len(params.grammar.text) > MAX_GRAMMARS:
        raise bad_request(f"{params.grammar.field}: {num_choices} choices may have a grammar of at most "
                          f"{MAX_GRAMMARS // num_choices} characters", params.grammar.field)
    for name, size in (("logit_bias", len(params.logit_bias)), ("allowed_token_ids", len(params.allowed_token_ids)),
                       ("bad_words", sum(map(len, params.bad_words_token_ids)))):
        if num_choices * size > MAX_BIASES:
            raise bad_request(f"{name}: {num_choices} choices may have at most {MAX_BIASES // num_choices} tokens each",
                              name)


def _check_repeated(job: Job) -> None:
    """Raises ApiError for a response that would repeat too much of its prompts: each of `n` choices has its own."""
    ids = sum(map(len, job.prompts)) * job.params.n
    if job.request.return_token_ids and ids > MAX_ENTRIES:
        raise bad_request(f"return_token_ids: {ids} ids of prompts in all choices are more than {MAX_ENTRIES}",
                          "return_token_ids")
    characters = sum(map(len, job.repeated.echoes)) * job.params.n
    if characters > MAX_ECHO:
        raise bad_request(f"echo: {characters} characters of prompts in all choices are more than {MAX_ECHO}", "echo")


def _shown(job: Job) -> VisibleTokens:
    shown = VisibleTokens(bool(job.request.include_stop_str_in_output), job.request.skip_special_tokens is False)
    return shown if job.parsing is None else shown._replace(marks=job.parsing.marks)


def _stop_ids(api: Api, params: SamplingParams) -> frozenset[int]:
    """Stop tokens that a response names as its stop reason: those that do not end every output of the model."""
    return frozenset(params.stop_token_ids).difference(
        () if params.ignore_eos else api.engine.client.info.eos_token_ids)


def finish(choices: list[Choice], reason: str) -> None:
    """End the choices that have not ended."""
    for choice in choices:
        choice.generation.finish(reason)


async def answer(api: Api, exchange: HttpExchange, job: Job, render: Renderer) -> None:
    """Generate and respond.  A client that disconnects aborts its generations.

    Args:
        render: sends the response.

    Raises:
        ApiError: the engine rejected the request, timed it out, or failed.
    """
    wait_estimate, prefix = api.limits.admission_control.wait_estimate(), named_prefix(exchange)
    choices: list[Choice] = []
    account = api.limits.quotas.account(job.slo.tenant)
    with (api.limits.quotas.reserved(account, job.most_tokens, lambda: _used(job, choices)),
          held(api.limits.prompt_entries, exchange.holder, num_prompt_entries(job.params, sum(map(len, job.prompts))))):
        exchange.about_generation = partial(log_fields, api.request_log, job, choices)
        choices += await start(api, job)
        api.observers.prefix_index.expect(choices[0].generation.request_id, prefix, len(job.prompts[0]), PIECE,
                                job.adapter.number if job.adapter is not None else 0)
        exchange.more += headers_of(wait_estimate)
        await _answered(api, exchange, job, choices, render)


async def _answered(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice], render: Renderer) -> None:
    names = (exchange.request_id, job.heading.response_id)

    def abort() -> None:
        finish(choices, "abort")

    try:
        with api.engine.active_requests.listed(names, ActiveRequest(exchange.tenant, abort, choices, job.slo.tier)):
            async with exchange.watched(abort), _kept_alive(api, exchange, job, choices):
                await render(api, exchange, job, choices)
    except ApiError as error:
        if error.code == SHED:
            error.retry_after = api.limits.admission_control.retry_after
        raise
    except asyncio.CancelledError:
        raise
    except BaseException:  # detokenizing failed, say; a panic of the tokenizer is no Exception
        finish(choices, "error")
        raise
    finally:
        abort()


def _kept_alive(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> AbstractAsyncContextManager[None]:
    """Within it a silent stream shows signs of life: from then on the response has no other status than 200."""
    if not job.request.stream or exchange.scope["http_version"] == "1.0":
        return nullcontext()
    refuses = _queue_timeout(api, job.request.queue_timeout) or job.params.grammar is not None or job.kv is not None

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
