"""`/v1/embeddings` and `/v2/embed`: one vector for each input, from the hidden states of its tokens.

The first one's body has OpenAI's fields and vLLM's extensions, the other is Cohere's.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from slotwise.api.generate.choice import Choice
from slotwise.api.generate.context import Api
from slotwise.api.generate.generate import Job, Renderer, ValidatedRequest, check, encoding_of, respond, usage_of
from slotwise.api.generate.shapes import EMBEDDING, to_json
from slotwise.api.http.api_errors import ContextExceeded, bad_request, from_params
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_unknown_fields
from slotwise.api.pooling.pooled_requests import (
    PooledFields,
    TruncatedFields,
    cohere_meta,
    numbers_of,
    reading,
    validated,
)
from slotwise.api.protocol.decoding import MAX_PROMPTS, decode
from slotwise.api.protocol.protocol import Length, Prompt
from slotwise.api.protocol.unsupported import refuse
from slotwise.core.params import InvalidParams, PoolingSpec

Format = Callable[[bytes], bytes]
"""Returns a vector, float32 and little-endian, as JSON."""

QUERY, DOCUMENT, PASSAGE = "query", "document", "passage"  # names of checkpoints' prompts
# Values of `input_type`, Jina's and Cohere's, each with the names that checkpoints give its prompt.
INPUT_TYPES = {
    QUERY: (QUERY,), DOCUMENT: (DOCUMENT, PASSAGE), PASSAGE: (PASSAGE, DOCUMENT),
    "search_query": (QUERY,), "search_document": (DOCUMENT, PASSAGE),
    "classification": ("classification", "Classification"), "clustering": ("clustering", "Clustering")}


class EmbeddingRequest(TruncatedFields, kw_only=True):
    input: Prompt  # a text or its token ids; a list: several, each with its own vector
    encoding_format: Literal["float", "base64"] | None = None  # of vectors; base64: of float32, little-endian
    dimensions: Length | None = None  # the first so many numbers of each vector, then normalized
    normalize: bool | None = None  # vectors have length 1; by default as the checkpoint says, else true
    use_activation: bool | None = None  # vLLM's newer name of `normalize`
    input_type: str | None = None  # `query`, `document`, or another prompt of the checkpoint: it begins each text
    add_special_tokens: bool | None = None  # by default the tokenizer's are added
    embed_dtype: Any = None
    endianness: Any = None


@about(body=EmbeddingRequest)
async def embeddings(api: Api, exchange: HttpExchange) -> None:
    """Vectors of one text or several, by pooling the model's hidden states."""
    await respond(api, exchange, EMBEDDING, _embedding)


async def _embedding(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    asked = decode(EmbeddingRequest, body)
    warn_of_unknown_fields(exchange, EmbeddingRequest, body)
    refuse(asked)
    if asked.normalize is not None and asked.use_activation not in (None, asked.normalize):
        raise bad_request("use_activation: contradicts normalize", "use_activation")
    normalize = asked.use_activation if asked.normalize is None else asked.normalize
    pooling = pooling_of(api, asked.dimensions, normalize=normalize)
    formatted = _base64 if asked.encoding_format == "base64" else _floats
    texts = prompted(api, asked.input, asked.input_type, "input_type")
    return await embedded(api, exchange, asked, texts, pooling, partial(_respond, formatted=formatted))


async def embedded(api: Api, exchange: HttpExchange, asked: PooledFields, texts: Prompt, pooling: PoolingSpec,
                   render: Renderer, param: str = "input", width: int | None = None) -> ValidatedRequest:
    """A request for the vectors of texts.

    Args:
        render: sends the response.
        param: the request's field that has the texts, for errors.
        width: numbers of a vector; None: as many as `pooling` says.
    """
    request = asked.as_generate()
    slo = check(api, exchange, request, generates=False)
    encoding = encoding_of(api, request, 0, adds_special_tokens=True)._replace(param=param)
    api.limits.check_capacity(slo)
    with api.limits.admission_control.entering(slo):
        prompts = await api.text.prompts.of_completion(texts, api.settings.max_choices, exchange.holder, encoding)
    return validated(api, request, slo, prompts, pooling, render, param,
                     width=width or width_of(api, pooling))


def pooling_of(api: Api, dimensions: int | None = None, *, normalize: bool | None = None) -> PoolingSpec:
    """How a vector is made.  Raises ApiError for vectors that the model does not give."""
    defaults = api.settings.pooling_defaults
    if defaults.objection:
        raise bad_request(f"this model gives no embeddings: {defaults.objection}", "model", "embeddings_not_supported")
    try:
        pooling = defaults.chosen(dimensions, normalize=normalize)
        pooling.check_width(api.engine.client.info.hidden_size)
    except InvalidParams as error:
        raise from_params(error) from error
    return pooling


def width_of(api: Api, pooling: PoolingSpec) -> int:
    """Numbers of one vector."""
    return pooling.dimensions or api.engine.client.info.hidden_size


def prompted(api: Api, texts: Prompt, name: str | None, param: str) -> Prompt:
    """Texts with the checkpoint's prompt of this name before each; None: with its default prompt, if it has one.

    Raises:
        ApiError: the checkpoint has prompts, and none of this name.
    """
    defaults = api.settings.pooling_defaults
    chosen = name
    if name is not None:
        known = [one for one in INPUT_TYPES.get(name, (name,)) if one in defaults.prompts]
        if not known and name not in INPUT_TYPES:
            raise bad_request(f"{param}: must be one of {', '.join({**defaults.prompts, **INPUT_TYPES})}, not "
                              f"{name!r:.60}", param)
        if not known:  # the model treats texts of this kind as any other
            return texts
        chosen = known[0]
    if isinstance(texts, str):
        return defaults.prompted(texts, chosen)
    return [defaults.prompted(one, chosen) if isinstance(one, str) else one for one in texts]


async def _respond(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice], formatted: Format) -> None:
    """Send all vectors, when the last of them is there."""
    pooling = job.spec.pooling
    assert pooling is not None
    async with reading(api, exchange, choices, width_of(api, pooling)):
        await exchange.respond_in_parts(await _body(job, choices, formatted))


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
    return to_json(numbers_of(vector).tolist())


def _base64(vector: bytes) -> bytes:
    return b'"' + base64.b64encode(vector) + b'"'


# -- Cohere's form -----------------------------------------------------------------------------------------------------

CohereType = Literal["float", "base64", "binary", "ubinary"]  # int8 and uint8 need ranges of Cohere's own models
SIDES = {"START": "left", "END": "right"}  # where tokens are dropped, by Cohere's `truncate`
HALF = 1 << 7  # what distinguishes a signed byte from an unsigned one


class CohereEmbedRequest(PooledFields, kw_only=True):
    texts: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]  # each gets a vector
    input_type: str | None = None  # `search_query`, `search_document`, or a prompt of the checkpoint
    embedding_types: Annotated[list[CohereType], msgspec.Meta(min_length=1)] | None = None  # by default `float`
    output_dimension: Length | None = None  # the first so many numbers of each vector, then normalized
    max_tokens: Length | None = None  # a text's tokens that are kept; by default as many as fit
    truncate: Literal["NONE", "START", "END"] | None = None  # where tokens are dropped, by default at the end
    images: Any = None
    inputs: Any = None


@about(body=CohereEmbedRequest)
async def cohere_embed(api: Api, exchange: HttpExchange) -> None:
    """Vectors of texts, in Cohere's form."""
    await respond(api, exchange, EMBEDDING, _cohere_embedding)


async def _cohere_embedding(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    asked = decode(CohereEmbedRequest, body)
    warn_of_unknown_fields(exchange, CohereEmbedRequest, body)
    refuse(asked)
    kinds: list[str] = list(dict.fromkeys(asked.embedding_types or ("float",)))
    pooling = pooling_of(api, asked.output_dimension)
    if width_of(api, pooling) % 8 and not {"float", "base64"} >= set(kinds):
        raise bad_request(f"embedding_types: {width_of(api, pooling)} numbers do not fill whole bytes; send "
                          "another output_dimension", "embedding_types")
    cut = TruncatedFields(**{name: getattr(asked, name) for name in PooledFields.__struct_fields__})
    if asked.truncate != "NONE":
        cut.truncate_prompt_tokens = min(asked.max_tokens or api.text.prompts.longest, api.text.prompts.longest)
        cut.truncation_side = "left" if asked.truncate == "START" else "right"
    texts = prompted(api, list(asked.texts), asked.input_type, "input_type")
    found = await embedded(api, exchange, cut, texts, pooling,
                           partial(_respond_as_cohere, kinds=kinds, texts=asked.texts), "texts")
    longest = max(map(len, found.prompts))
    if asked.truncate == "NONE" and asked.max_tokens is not None and longest > asked.max_tokens:
        raise ContextExceeded(asked.max_tokens, longest, 0, "texts")
    return found


async def _respond_as_cohere(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice], kinds: Sequence[str],
                             texts: Sequence[str]) -> None:
    pooling = job.spec.pooling
    assert pooling is not None
    async with reading(api, exchange, choices, width_of(api, pooling)):
        vectors: dict[str, list[Any]] = {kind: [] for kind in kinds}
        for choice in choices:
            for kind in kinds:
                vectors[kind].append(_AS_COHERE[kind](choice.generation.pooled))
            await asyncio.sleep(0)
        await exchange.respond_json({
            "id": job.heading.response_id, "embeddings": vectors, "texts": texts, "response_type": "embeddings_by_type",
            "meta": cohere_meta(job, choices)})


def _bits(numbers: array[float]) -> list[int]:
    """Bytes of the numbers' signs, the first number in the highest bit: a positive number is 1."""
    return [sum((number > 0) << (7 - place) for place, number in enumerate(numbers[first : first + 8]))
            for first in range(0, len(numbers), 8)]


_AS_COHERE: dict[str, Callable[[bytes], Any]] = {
    "float": lambda vector: numbers_of(vector).tolist(),
    "base64": lambda vector: base64.b64encode(vector).decode(),
    "ubinary": lambda vector: _bits(numbers_of(vector)),
    "binary": lambda vector: [byte - HALF for byte in _bits(numbers_of(vector))]}
