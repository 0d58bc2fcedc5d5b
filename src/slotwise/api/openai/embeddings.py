"""`/v1/embeddings`: one vector for each input, from the hidden states of its tokens.

Its body has OpenAI's fields and vLLM's extensions.
"""

from __future__ import annotations

import asyncio
import base64
import time
from array import array
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from sys import byteorder
from typing import Literal

import msgspec

from slotwise.api.generate.choice import Choice, together
from slotwise.api.generate.context import Api
from slotwise.api.generate.generate import Job, ValidatedRequest, check, encoding_of, respond, usage_of
from slotwise.api.generate.shapes import EMBEDDING, to_json
from slotwise.api.http.api_errors import ApiError, ContextExceeded, bad_request, from_params
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_unknown_fields
from slotwise.api.protocol.decoding import decode
from slotwise.api.protocol.protocol import (
    Generate,
    KeptTokens,
    Length,
    Milliseconds,
    Priority,
    Prompt,
    Salt,
    Seconds,
    User,
)
from slotwise.core.params import InvalidParams, PoolingSpec, SamplingSpec
from slotwise.engine.generation import AT_THE_END

NO_TOKENS = SamplingSpec(max_tokens=None)
MAX_NUMBERS = 1 << 22  # of the vectors of one response: a thousand of a large model's

Format = Callable[[bytes], bytes]
"""Returns a vector, float32 and little-endian, as JSON."""


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    input: Prompt  # a text or its token ids; a list: several, each with its own vector
    model: str | None = None  # the served model's name, by default
    encoding_format: Literal["float", "base64"] | None = None  # of vectors; base64: of float32, little-endian
    dimensions: Length | None = None  # the first so many numbers of each vector, then normalized
    normalize: bool | None = None  # vectors have length 1; by default as the checkpoint says, else true
    user: User | None = None  # the tenant, where the server has no keys
    request_id: str | None = None  # the id of the response, and of the request in logs and queries
    service_tier: str | None = None  # `auto`, `default`, or one of the server's own: docs/tiers.md
    priority: Priority | None = None  # lower is earlier; None: its tier's
    ttft_ms: Milliseconds | None = None  # objective, milliseconds to the vector; None: its tier's
    queue_timeout: Seconds | None = None  # seconds to its first slot; the server's own bound holds as well
    cache_salt: Salt | None = None  # cached prefixes are shared only among requests of one key and one salt
    add_special_tokens: bool | None = None  # by default the tokenizer's are added
    truncate_prompt_tokens: KeptTokens | None = None  # an input's tokens that are kept; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # where tokens are dropped; by default on the right

    def as_generate(self) -> Generate:
        """The fields that it shares with requests to generate."""
        return Generate(
            model=self.model, user=self.user, request_id=self.request_id, service_tier=self.service_tier,
            priority=self.priority, ttft_ms=self.ttft_ms, queue_timeout=self.queue_timeout,
            cache_salt=self.cache_salt, add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens, truncation_side=self.truncation_side or "right")


@about(body=EmbeddingRequest)
async def embeddings(api: Api, exchange: HttpExchange) -> None:
    """Vectors of one text or several, by pooling the model's hidden states."""
    await respond(api, exchange, EMBEDDING, _embedding)


async def _embedding(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    asked = decode(EmbeddingRequest, body)
    warn_of_unknown_fields(exchange, EmbeddingRequest, body)
    request = asked.as_generate()
    slo = check(api, exchange, request, generates=False)
    pooling = _pooling(api, asked)
    encoding = encoding_of(api, request, 0, adds_special_tokens=True)._replace(param="input")
    api.limits.check_capacity(slo)
    with api.limits.admission_control.entering(slo):
        prompts = await api.text.prompts.of_completion(asked.input, api.settings.max_choices, exchange.holder, encoding)
    if (longest := max(map(len, prompts))) > (places := api.engine.client.info.limits.cache_tokens):
        raise ContextExceeded(places, longest, 0, "input",
                              hint="The cache holds no more: start with a larger --kv-cache-memory.")
    if (num_numbers := len(prompts) * _width(api, pooling)) > MAX_NUMBERS:
        raise bad_request(f"input: vectors of {num_numbers} numbers in all are more than {MAX_NUMBERS}; send fewer "
                          "inputs", "input")
    render = partial(_respond, formatted=_base64 if asked.encoding_format == "base64" else _floats)
    return ValidatedRequest(request, prompts, request.spec(NO_TOKENS, slo, pooling), render)


def _pooling(api: Api, asked: EmbeddingRequest) -> PoolingSpec:
    """Raises ApiError for vectors that the model does not give."""
    defaults = api.settings.pooling_defaults
    if defaults.objection:
        raise bad_request(f"this model gives no embeddings: {defaults.objection}", "model", "embeddings_not_supported")
    try:
        pooling = defaults.chosen(asked.dimensions, normalize=asked.normalize)
        pooling.check_width(api.engine.client.info.hidden_size)
    except InvalidParams as error:
        raise from_params(error) from error
    return pooling


def _width(api: Api, pooling: PoolingSpec | None) -> int:
    """Numbers of one vector."""
    return (pooling.dimensions if pooling else None) or api.engine.client.info.hidden_size


async def _respond(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice], formatted: Format) -> None:
    """Send all vectors, when the last of them is there."""
    num_numbers = len(choices) * _width(api, job.spec.pooling)
    if objection := api.limits.vector_numbers.objection(exchange.holder, num_numbers):
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"input: {objection}", code="vectors_full")
    api.limits.vector_numbers.acquire(exchange.holder, num_numbers)
    try:
        await together([_read(choice) for choice in choices])
        first_ns = time.monotonic_ns()
        await exchange.respond_in_parts(await _body(job, choices, formatted))
    finally:
        api.limits.vector_numbers.release(exchange.holder, num_numbers)
    last_ns = time.monotonic_ns()
    for choice in choices:
        api.observers.batched_observer.sent(choice.generation.request_id, first_ns, last_ns, 1)


async def _read(choice: Choice) -> None:
    """Wait until a vector is there.  Raises ApiError: the engine could not finish it, or it was aborted."""
    choice.generation.interval = AT_THE_END
    async for chunk in choice.generation:
        choice.read(chunk)
    if not choice.generation.pooled:
        raise bad_request(f"an input was ended ({choice.generation.end_reason}) before its vector was there",
                          "input", choice.generation.end_reason)


async def _body(job: Job, choices: list[Choice], formatted: Format) -> list[bytes]:
    """The response as JSON, in parts; other clients are served between vectors."""
    parts = [b'{"object":"list","data":[']
    for choice in choices:
        parts += (b"," * (choice.index > 0) + b'{"object":"embedding","index":%d,"embedding":' % choice.index,
                  formatted(choice.generation.pooled), b"}")
        await asyncio.sleep(0)
    last = {"model": job.heading.model, "id": job.heading.response_id, "usage": usage_of(job, choices)}
    return [*parts, b"]," + to_json(last)[1:]]


def _floats(vector: bytes) -> bytes:
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return to_json(numbers.tolist())


def _base64(vector: bytes) -> bytes:
    return b'"' + base64.b64encode(vector) + b'"'
