"""What the routes have in common that are answered from prompts alone: fields, prompts, and how vectors are read.

A request of these routes has a prompt for each vector that it needs.  The engine computes all prompts of all requests
in the same steps, and frees a prompt's slot in the step that completes it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from sys import byteorder
from typing import Any, Literal

from slotwise.api.generate.choice import Choice, together
from slotwise.api.generate.context import Api
from slotwise.api.generate.generate import Job, Renderer, ValidatedRequest, usage_of
from slotwise.api.http.api_errors import ApiError, ContextExceeded, bad_request
from slotwise.api.http.http_exchange import HttpExchange
from slotwise.api.protocol.protocol import Generate, KeptTokens, RequestFields, User
from slotwise.core.params import PoolingSpec, SamplingSpec
from slotwise.core.scheduler_limits import SLO
from slotwise.engine.generation import AT_THE_END

NO_TOKENS = SamplingSpec(max_tokens=None)
MAX_NUMBERS = 1 << 22  # of the vectors of one response: a thousand of a large model's


class PooledFields(RequestFields, kw_only=True):
    """The fields of every such request."""

    user: User | None = None  # the tenant, where the server has no keys

    def as_generate(self) -> Generate:
        """The fields that these requests share with requests to generate."""
        given = {name: getattr(self, name, None) for name in Generate.__struct_fields__}
        return Generate(**{name: value for name, value in given.items() if value is not None})


class TruncatedFields(PooledFields, kw_only=True):
    """The fields of requests whose texts may be cut to a number of tokens."""

    truncate_prompt_tokens: KeptTokens | None = None  # tokens of a prompt to keep, special ones too; -1: all that fit
    truncation_side: Literal["left", "right"] | None = None  # where tokens are dropped; by default on the right
    padding: Any = None
    mm_processor_kwargs: Any = None

    def as_generate(self) -> Generate:
        shared = super().as_generate()
        shared.truncation_side = self.truncation_side or "right"
        return shared


def validated(api: Api, request: Generate, slo: SLO, prompts: list[list[int]], pooling: PoolingSpec, render: Renderer,
              param: str, *, width: int, shares_prefix: bool = False) -> ValidatedRequest:
    """A request with its prompts.

    Args:
        render: sends the response.
        param: the request's field that has the texts, for errors.
        width: numbers of each vector.
        shares_prefix: the prompts begin alike: see `ValidatedRequest`.

    Raises:
        ApiError: a prompt does not fit into the cache, or the vectors are too many.
    """
    if (longest := max(map(len, prompts))) > (places := api.engine.client.info.limits.cache_tokens):
        raise ContextExceeded(places, longest, 0, param,
                              hint="The cache holds no more: start with a larger --kv-cache-memory.")
    if (num_numbers := len(prompts) * width) > MAX_NUMBERS:
        raise bad_request(f"{param}: vectors of {num_numbers} numbers in all are more than {MAX_NUMBERS}; send fewer "
                          "texts", param)
    return ValidatedRequest(request, prompts, request.spec(NO_TOKENS, slo, pooling), render,
                            shares_prefix=shares_prefix)


@asynccontextmanager
async def reading(api: Api, exchange: HttpExchange, choices: Sequence[Choice], width: int) -> AsyncIterator[None]:
    """Within it all vectors are there, and the response is sent; they count against what tenants may hold.

    Args:
        width: numbers of each vector.

    Raises:
        ApiError: the engine could not finish a vector, it was aborted, or too many numbers are held.
    """
    num_numbers = len(choices) * width
    if objection := api.limits.vector_numbers.objection(exchange.holder, num_numbers):
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, objection, code="vectors_full")
    api.limits.vector_numbers.acquire(exchange.holder, num_numbers)
    try:
        await together([read(choice) for choice in choices])
        first_ns = time.monotonic_ns()
        yield
    finally:
        api.limits.vector_numbers.release(exchange.holder, num_numbers)
    last_ns = time.monotonic_ns()
    for choice in choices:
        api.observers.batched_observer.sent(choice.generation.request_id, first_ns, last_ns, 1)


async def read(choice: Choice) -> None:
    """Wait until a vector is there.  Raises ApiError: the engine could not finish it, or it was aborted."""
    choice.generation.interval = AT_THE_END
    async for chunk in choice.generation:
        choice.read(chunk)
    if not choice.generation.pooled:
        reason = choice.generation.end_reason
        raise bad_request(f"the request was ended ({reason}) before its answer was there", code=reason)


def numbers_of(vector: bytes) -> array[float]:
    """The numbers of a vector, float32 and little-endian."""
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return numbers


def heading_of(job: Job, choices: list[Choice], kind: str) -> dict[str, Any]:
    """The fields of a response that all these routes have, as vLLM's.  Args: kind: the value of `object`."""
    return {"id": job.heading.response_id, "object": kind, "created": job.heading.created,
            "model": job.heading.model, "usage": usage_of(job, choices)}


def cohere_meta(job: Job, choices: list[Choice], **billed: int) -> dict[str, Any]:
    """The field `meta` of Cohere's responses.  Args: billed: units in addition to tokens."""
    num_tokens = usage_of(job, choices)["prompt_tokens"]
    return {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens} | billed,
            "tokens": {"input_tokens": num_tokens, "output_tokens": 0}}
