"""`/openapi.json`, generated from the types that bodies are decoded into, and from what endpoints say of themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from slotwise.api.anthropic.anthropic_messages import MESSAGES, MessagesErrorBody
from slotwise.api.generate.request_log import GENERATING, POOLING
from slotwise.api.http.api_errors import TRY_LATER, ErrorBody
from slotwise.api.http.http_exchange import About, Endpoint, Json, about_of
from slotwise.api.limits.quotas import POSITION, START
from slotwise.api.limits.tiers import TierSettings
from slotwise.api.protocol.protocol import ChatRequest
from slotwise.api.protocol.unsupported import unsupported_fields
from slotwise.core.params import PARAMETERS
from slotwise.engine.scheduling import MAX_TIERS, changes_schema
from slotwise.text.conversation import MAX_MESSAGES
from slotwise.version import __version__

REFUSED = "x-refused"  # of a field of the OpenAPI document that is accepted only with values that change nothing
AT_ANY_ROUTE = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND,
                HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)
# Of routes, each with the beginnings of its paths.
AREAS: dict[str, tuple[str, ...]] = {
    "Generate": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    "Vectors, scores and decisions": POOLING,
    "Tokens": ("/tokenize", "/detokenize"),
    "Models and adapters": ("/v1/models", "/v1/load_model", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "Requests and steps": ("/requests", "/explain", "/cache", "/abort_requests", "/events", "/what_if"),
    "Health and load": ("/health", "/ping", "/version", "/load", "/metrics", "/experts", "/replica", "/replicas"),
    "Administration": ("/admin", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache")}
PAGES = "Pages"  # the area of all other routes
# Fields that most requests have or want, first in a description.
COMMON = (
    "messages", "prompt", "input", "model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "temperature", "top_p", "top_k", "seed", "stop", "n", "system", "instructions", "tools", "tool_choice",
    "response_format", "stream_options", "reasoning_effort", "logprobs")
QUESTION = "Name three colors of the rainbow."
# Bodies that can be sent as they are, where the server has what they name.
EXAMPLES: dict[tuple[str, str], Json] = {
    ("POST", "/v1/chat/completions"): {
        "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "temperature": 0, "stream": True},
    ("POST", "/v1/completions"): {
        "prompt": "def read_lines(path):", "max_tokens": 32, "temperature": 0, "stream": True},
    ("POST", "/v1/responses"): {"input": QUESTION, "max_output_tokens": 64, "temperature": 0, "stream": True},
    ("POST", "/v1/messages"): {
        "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "temperature": 0, "stream": True},
    ("POST", "/v1/messages/count_tokens"): {"messages": [{"role": "user", "content": QUESTION}]},
    ("POST", "/v1/embeddings"): {"input": "The sun rises in the east."},
    ("POST", "/v2/embed"): {"texts": ["The sun rises in the east."], "embedding_types": ["float"]},
    **{("POST", path): {"query": "Where does the sun rise?", "documents": ["In the east.", "Cats sleep."], "top_n": 1}
       for path in ("/v1/rerank", "/rerank", "/v2/rerank")},
    **{("POST", path): {"text_1": "Where does the sun rise?", "text_2": ["In the east.", "Cats sleep."]}
       for path in ("/v1/score", "/score")},
    **{("POST", path): {"input": "The sun rises in the east."} for path in ("/v1/classify", "/classify")},
    ("POST", "/v1/systemone"): {"state": "My card was charged twice.", "questions": {"team": {
        "type": "choice", "instructions": "Which team should answer?",
        "criteria": {"billing": "payments", "shipping": None}}}},
    ("POST", "/tokenize"): {"prompt": "The sun rises in the east."},
    ("POST", "/detokenize"): {"tokens": [3, 4, 5]},
    ("POST", "/abort_requests"): {"request_ids": ["my-request"]},
    ("POST", "/what_if"): {"changes": {"max_num_seqs": 4}},
    ("PUT", "/admin/scheduling"): {"max_num_seqs": 16},
    ("PUT", "/admin/replicas"): {"replicas": 2},
    ("POST", "/v1/load_model"): {"model": "/path/to/checkpoint"},
    ("POST", "/v1/load_lora_adapter"): {"lora_name": "my-adapter", "lora_path": "/path/to/adapter"},
    ("POST", "/v1/unload_lora_adapter"): {"lora_name": "my-adapter"}}
EVENT: Json = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
WITH_A_BODY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
WHEN_GENERATING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.GATEWAY_TIMEOUT)
QUEUE: Json = {
    POSITION: {"description": "How many waited for a slot before it when it came.",
               "schema": {"type": "integer", "minimum": 0}},
    START: {"description": "Milliseconds until it was to have a slot, by the pace measured then; absent without one.",
            "schema": {"type": "integer", "minimum": 0}}}

QUOTA: Json = {
    f"X-RateLimit-{what}-{of}": {"description": f"{tells} of the {of.lower()} a key may have a minute; absent where it "
                                 "has no such quota.", "schema": schema}
    for of in ("Requests", "Tokens") for what, tells, schema in (
        ("Limit", "The number", {"type": "integer", "minimum": 1}),
        ("Remaining", "What is left", {"type": "integer", "minimum": 0}),
        ("Reset", "When all are back (1m0s, 1.5s, 20ms)", {"type": "string"}))}


class ContentPart(msgspec.Struct):
    type: str


class ChatMessage(msgspec.Struct):
    """The fields every message must have."""

    role: str
    content: str | list[ContentPart] | None = None


def document(
    routes: Sequence[tuple[str, str, Endpoint]], open_to_all: Sequence[str], root_path: str = "",
) -> bytes:
    """The OpenAPI document of `routes`, each a method, a path and an endpoint, as JSON.

    Args:
        open_to_all: paths that need no key.
        root_path: prefix of all paths, for clients that reach the server through a proxy.
    """
    bodies = bodies_of(routes)
    types = [*bodies.values(), ChatMessage, ErrorBody, MessagesErrorBody, TierSettings]
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for kind in bodies.values():
        described, refused = components[kind.__name__], unsupported_fields(kind)
        described["properties"] |= {name: {"enum": neutral, REFUSED: True} for name, neutral in refused.items()}
        described["properties"] = _in_order(described["properties"], described.get("required", ()))
        for name in described["properties"].keys() & PARAMETERS.keys():
            described["properties"][name]["description"] = _WITHOUT_NONE.sub("null", PARAMETERS[name].help)
    schemas = dict(zip(types, references, strict=True))
    if ChatRequest in schemas:
        components["ChatRequest"]["properties"]["messages"] = {
            "type": "array", "items": schemas[ChatMessage], "minItems": 1, "maxItems": MAX_MESSAGES}
    paths: dict[str, Json] = {}
    for method, path, endpoint in routes:
        operation = _operation(method, path, about_of(endpoint), schemas)
        operation["tags"] = [area_of(path)]
        operation["summary"] = (inspect.getdoc(endpoint) or endpoint.__name__).partition("\n")[0]
        operation["operationId"] = f"{endpoint.__name__}_{method.lower()}{path.translate(_WORD)}"
        if path in open_to_all:
            operation["security"] = []
        paths.setdefault(path.replace(":path}", "}"), {})[method.lower()] = operation
    return msgspec.json.encode({
        "openapi": "3.1.0",
        "info": {"title": "Slotwise", "version": __version__},
        "security": [{"key": []}, {}],  # for servers without keys
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    })


def bodies_of(routes: Sequence[tuple[str, str, Endpoint]]) -> dict[str, type]:
    """The types that bodies are decoded into, by path."""
    return {path: body for _, path, endpoint in routes if (body := about_of(endpoint).body) is not None}


def area_of(path: str) -> str:
    """What a route is about, by its path."""
    return next((area for area, beginnings in AREAS.items() if _begins(path, beginnings)), PAGES)


def place_of(path: str) -> int:
    """Where a route stands among those of its area."""
    beginnings = AREAS.get(area_of(path), ())
    return next((place for place, one in enumerate(beginnings) if _begins(path, (one,))), len(beginnings))


def _begins(path: str, beginnings: Sequence[str]) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in beginnings)


def _in_order(properties: Json, required: Sequence[str]) -> Json:
    """The fields as a reader wants them: required ones, common ones, others, and last those that are refused."""
    places = {name: place for place, name in enumerate(COMMON)}
    return dict(sorted(properties.items(), key=lambda one: (
        REFUSED in one[1], one[0] not in required, places.get(one[0], len(places)))))


_WORD = str.maketrans("/{}:", "____")
_WITHOUT_NONE = re.compile(r"\bNone\b")  # in a help text, which is about the value in Python
_IN_PATH = re.compile(r"{(\w+):path}")


def _operation(method: str, path: str, about: About, schemas: dict[type, Json]) -> Json:
    takes_body = method in ("POST", "PUT") and about.takes_body
    statuses = AT_ANY_ROUTE + WITH_A_BODY * takes_body + WHEN_GENERATING * (path in GENERATING) + about.statuses
    errors = schemas[MessagesErrorBody if path.startswith(MESSAGES) else ErrorBody]
    operation: Json = {"responses": {
        "200": {"description": "OK", "content": _answer(about)},
        **{str(int(status)): _error(status, errors) for status in statuses}}}
    if takes_body:
        schema = _changes(schemas[TierSettings]) if about.body is None else schemas[about.body]
        example = {"example": EXAMPLES[method, path]} if (method, path) in EXAMPLES else {}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema} | example}}
    if path in GENERATING:
        for status, headers in (("200", QUEUE | QUOTA), ("429", QUOTA), ("503", QUEUE)):
            operation["responses"][status].setdefault("headers", {}).update(headers)
    if about.query:
        operation["parameters"] = [{"name": one["name"], "in": "query", "schema": one["schema"]} for one in about.query]
    if named := _IN_PATH.search(path):
        operation["parameters"] = [{"name": named[1], "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _changes(tier: Json) -> Json:
    schema = changes_schema()
    schema["properties"]["tiers"] = {"type": "array", "items": tier, "maxItems": MAX_TIERS}
    return schema


def _answer(about: About) -> Json:
    if about.media_type != "application/json":
        return {about.media_type: {"schema": {"type": "string"}}}
    whole = {"application/json": {"schema": {"type": "object"}}}
    return whole | {"text/event-stream": {"schema": EVENT}} if about.streams else whole


def _error(status: HTTPStatus, schema: Json) -> Json:
    response: Json = {"description": status.phrase, "content": {"application/json": {"schema": schema}}}
    if status in TRY_LATER:
        response["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
    return response
