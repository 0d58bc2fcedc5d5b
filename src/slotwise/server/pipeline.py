"""From a request's body to its answer: what every route that uses the model shares.

    enter ──► body ──► the route's own check: an Asked ──► Job ──► generate.answer ──► the route's own renderer
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from slotwise.core.params import InvalidParams, PoolingParams, SamplingParams
from slotwise.core.slo import SLO
from slotwise.server.api_errors import bad_request, from_params
from slotwise.server.context import Api
from slotwise.server.generate import Renderer, answer
from slotwise.server.http_exchange import HttpExchange, checked_request_id
from slotwise.server.job import Job, Repeated
from slotwise.server.parsers.output_format import Parsing
from slotwise.server.prompt_transfer import has_secret, transfer_of
from slotwise.server.prompts import Encoding
from slotwise.server.protocol import Generate
from slotwise.server.shapes import Heading, Shape
from slotwise.server.tiers import UNTIERED
from slotwise.speculation.speculation_settings import NONE


class Asked(NamedTuple):
    """A checked request with its prompts, parameters and objectives."""

    request: Generate
    slo: SLO
    prompts: list[list[int]]
    params: SamplingParams
    render: Renderer
    repeated: Repeated = Repeated()
    is_silent: bool = False
    pooling: PoolingParams | None = None  # vectors are wanted, and no tokens
    parsing: Parsing | None = None  # how outputs are parsed; None: they are text


Check = Callable[[Api, HttpExchange, bytes], Awaitable[Asked]]
"""Decodes and checks a body, and encodes its prompts."""


async def respond(api: Api, exchange: HttpExchange, shape: Shape, prepare: Check) -> None:
    """Answer a request.  Raises ApiError: it cannot be served, or failed."""
    _enter(api, exchange)
    async with api.clients.bodies.reading(exchange) as body:
        try:
            asked = await prepare(api, exchange, body)
        except RecursionError as error:
            raise bad_request("the body is nested too deeply", code="too_deep") from error
        del body  # frees its memory while the response is generated
    request, slo, params = asked.request, asked.slo, asked.params
    try:
        params.check_vocabulary(api.engine.client.info.vocab_size, api.engine.client.info.eos_token_ids)
    except InvalidParams as error:
        raise from_params(error) from error
    tier = slo.tier or (UNTIERED if request.service_tier is not None else "")
    salt = _salt(exchange.tenant, request.cache_salt)
    if api.engine.sleep is not None:
        salt = api.engine.sleep.salt(salt)
    kv = transfer_of(request, asked.prompts, params, api.engine.client.info.kv_transfer,
                     is_trusted=has_secret(exchange.scope["headers"], api.settings.kv_transfer_secret))
    prediction = await _prediction(api, exchange, request)
    with api.engine.models.held(request.model) as adapter:
        name = api.settings.served_model_name if adapter is None else adapter.name
        heading = Heading.now(shape, exchange.request_id, name, tier)
        job = Job(request, asked.prompts, params, heading, slo, salt, exchange.received_ns, exchange.read_ns,
                  exchange.traceparent, asked.repeated, asked.is_silent, asked.pooling, asked.parsing,
                  prediction, adapter, kv)
        await answer(api, exchange, job, asked.render)


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


def encoding_of(api: Api, request: Generate, num_output: int, *, adds_special_tokens: bool) -> Encoding:
    """How prompts are encoded.

    Args:
        num_output: tokens for which a prompt leaves room if as many of its own are kept as fit.
        adds_special_tokens: by default.
    """
    most, longest = request.truncate_prompt_tokens, api.text.prompts.longest
    if most == -1:
        most = max(1, longest - num_output)
    elif most is not None and not 0 < most <= longest:
        raise bad_request(f"truncate_prompt_tokens: must be -1 or between 1 and {longest}", "truncate_prompt_tokens")
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
