"""`/v1/responses`: OpenAI's Responses API, served as a chat; responses are stored for a time, and may be continued.

Output items, and the events that build them, are made from the parts of an output:

    parts      Reasoning, ...    Content, ...                       CallName, CallArguments, ...
    items      0: reasoning      1: message                         2: function_call
    events     output_item.added, [content_part.added], *.delta ..., *.done, [content_part.done], output_item.done
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from slotwise.api.generate.choice import Choice, Delta, parts_of
from slotwise.api.generate.context import Api, ServerClients
from slotwise.api.generate.generate import Job, ValidatedRequest, respond
from slotwise.api.generate.response_store import StoredResponse, StoreFull
from slotwise.api.generate.shapes import RESPONSE, Heading, to_json
from slotwise.api.http.api_errors import ApiError, ContextExceeded, ErrorFormat, bad_request, renamed
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_unknown_fields, warn_of_unknown_keys
from slotwise.api.openai.completions import validated_chat
from slotwise.api.openai.responses_protocol import ResponsesRequest, messages_of
from slotwise.api.parsers.base_parser import CallArguments, CallName, Content, Part, Reasoning, new_call_id
from slotwise.api.protocol.decoding import MAX_NAME, decode
from slotwise.engine.generation import Chunk
from slotwise.text.conversation import Message

Json = dict[str, Any]
Event = tuple[str, Json]  # its type without `response.`, and its fields

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
PARTS: dict[str, Json] = {
    MESSAGE: {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    REASONING: {"type": "reasoning_text", "text": ""}}
DELTAS = {MESSAGE: "output_text", REASONING: "reasoning_text", CALL: "function_call_arguments"}
RESPONSES = "/v1/responses"
FIELDS = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format",
          "reasoning_effort": "reasoning.effort"}  # chats' names of fields, here
NEUTRAL = (("stream", "false"), ("include_obfuscation", "false"))  # parameters of a query, with what changes nothing
CODES = {HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded"}  # of a response that failed; else `server_error`


class Items:
    """The items of one response, one after the other.

    Args:
        name: of the response, in the items' ids.
    """

    def __init__(self, name: str) -> None:
        self.items: list[Json] = []  # the last one may be open
        self._name = name
        self._open: str | int | None = None  # the kind of the item that is open: a call's is its number
        self._texts: list[str] = []  # of the item that is open

    def read(self, parts: Sequence[Part]) -> Iterator[Event]:
        """Yields the events of the next parts."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self._begin(MESSAGE, MESSAGE)
                    yield self._delta(text)
                case Reasoning(text):
                    yield from self._begin(REASONING, REASONING)
                    yield self._delta(text)
                case CallName(index, name):
                    yield from self._begin(index, CALL, call_id=new_call_id(), name=name)
                case CallArguments(_, text):
                    yield self._delta(text)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """Yields the end of the item that is open.  Args: status: `incomplete` if the output was cut off."""
        if self._open is None:
            return
        self._open = None
        item, text = self.items[-1], "".join(self._texts)
        kind = item["type"]
        item["status"] = status
        done: Json = {"text": text} if kind != CALL else {"arguments": text, "name": item["name"]}
        if kind == MESSAGE:
            done["logprobs"] = []
        yield f"{DELTAS[kind]}.done", self._place(item) | done
        if kind == CALL:
            item["arguments"] = text
        else:
            item["content"] = [PARTS[kind] | {"text": text}]
            yield "content_part.done", self._place(item) | {"part": item["content"][0]}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _begin(self, opened: str | int, kind: str, **fields: str) -> Iterator[Event]:
        if opened == self._open:
            return
        yield from self.end()
        self._open, self._texts = opened, []
        item: Json = {"id": f"{kind}-{self._name}-{len(self.items)}", "type": kind, "status": "in_progress"} | fields
        if kind == CALL:
            item["arguments"] = ""
        else:
            item["content"] = []
            if kind == MESSAGE:
                item["role"] = "assistant"
            else:
                item["summary"] = []
        self.items.append(item)
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}
        if kind != CALL:
            yield "content_part.added", self._place(item) | {"part": PARTS[kind]}

    def _delta(self, text: str) -> Event:
        item = self.items[-1]
        self._texts.append(text)
        fields: Json = self._place(item) | {"delta": text}
        if item["type"] == MESSAGE:
            fields["logprobs"] = []
        return f"{DELTAS[item['type']]}.delta", fields

    def _place(self, item: Json) -> Json:
        place: Json = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return place if item["type"] == CALL else place | {"content_index": 0}


# -- the endpoints -----------------------------------------------------------------------------------------------------


def _in_own_words(error: ApiError) -> ApiError:
    """An error with this API's names of fields, and its sentence for an input that is too long."""
    own = renamed(error, FIELDS)
    if isinstance(error, ContextExceeded) and error.num_prompt > error.longest:
        own.message = ("Your input exceeds the context window of this model. Please adjust your input and try again. "
                       + own.message)
    return own


ERRORS = ErrorFormat(lambda error, _: _in_own_words(error).body(), b"event: error\ndata: %b\n\n")


@about(body=ResponsesRequest, streams=True)
async def responses(api: Api, exchange: HttpExchange) -> None:
    """Answers to a conversation as items of a response, whole or as a stream."""
    await respond(api, exchange, RESPONSE, _response)


async def stored_response(clients: ServerClients, exchange: HttpExchange) -> None:
    """A stored response of this key."""
    for name, value in exchange.query():
        if (name, value) not in NEUTRAL:
            raise bad_request(f"{name[:MAX_NAME]} is not supported", name[:MAX_NAME], "unsupported_parameter")
    await exchange.respond(_stored(clients, exchange, exchange.scope["path_params"]["response_id"]).response)


async def delete_response(clients: ServerClients, exchange: HttpExchange) -> None:
    """Forget a stored response of this key."""
    response_id = exchange.scope["path_params"]["response_id"]
    _stored(clients, exchange, response_id)
    clients.responses.drop(exchange.tenant, response_id)
    await exchange.respond_json({"id": response_id, "object": "response", "deleted": True})


def _stored(clients: ServerClients, exchange: HttpExchange, response_id: str) -> StoredResponse:
    """Raises ApiError: this key has no such response, or it has expired."""
    found = clients.responses.find(exchange.tenant, response_id, time.monotonic())
    if found is None:
        raise ApiError(HTTPStatus.NOT_FOUND, f"there is no response {response_id!r:.200}", "response_id",
                       "response_not_found")
    return found


async def _response(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    request = decode(ResponsesRequest, body)
    warn_of_unknown_fields(exchange, ResponsesRequest, body)
    warn_of_unknown_keys(exchange, "input", request.input)
    request.check()
    chat = request.as_chat(_before(api.clients, exchange, request.previous_response_id))
    conversation = to_json(chat.messages[bool(request.instructions) :]) if request.stores else b""
    text = request.text.format if request.text else None
    repeated = {
        "tools": request.tools or [], "tool_choice": request.tool_choice or "auto",
        "text": {"format": text or {"type": "text"}}}
    encoded = {name: msgspec.Raw(to_json(value)) for name, value in repeated.items()}
    request.input, request.tools, request.tool_choice, request.text = "", None, None, None
    asked = _Request(request, conversation, encoded)
    try:
        return await validated_chat(api, exchange, chat, partial(_render, asked=asked))
    except ContextExceeded:
        if request.stream:
            name = request.model or api.settings.served_model_name
            await _begin_to_fail(exchange, asked, Heading.now(RESPONSE, exchange.request_id, name, ""))
        raise


async def _begin_to_fail(exchange: HttpExchange, asked: _Request, heading: Heading) -> None:
    """Begin the stream of an input that is too long, as OpenAI does: Codex looks for the error in its last event."""
    def response(status: str, error: Json | None = None) -> Json:
        return {"response": asked.response(heading, status) | {"output": [], "usage": None, "error": error}}

    def last(error: ApiError, _: str) -> bytes:
        own = _in_own_words(error)
        failed = response("failed", {"code": own.code, "message": own.message})
        return _event("error", 2, {"error": own.content()}) + _event("response.failed", 3, failed)

    exchange.error_format = ERRORS._replace(of_stream=last)
    await exchange.event(_event("response.created", 0, response("in_progress"))
                         + _event("response.in_progress", 1, response("in_progress")))


class _Request(NamedTuple):
    """What a response needs of its request."""

    fields: ResponsesRequest  # without those below
    conversation: bytes  # messages of a chat, without instructions, as JSON; empty: the response is not stored
    repeated: dict[str, msgspec.Raw]  # fields of any depth that the response repeats

    def response(self, heading: Heading, status: str) -> Json:
        """The fields of a response that its request determines."""
        request, fields = self.fields, heading.of("response")
        reasoning = request.reasoning
        return {
            "id": fields.pop("id"), "object": fields.pop("object"), "created_at": fields.pop("created"), **fields,
            "status": status, "error": None, "background": False,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
            "previous_response_id": request.previous_response_id,
            "parallel_tool_calls": request.parallel_tool_calls is not False, "store": request.stores,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "temperature": request.temperature, "top_p": request.top_p, "truncation": "disabled",
            "user": request.user, **self.repeated, "metadata": request.metadata or {}}


def _before(clients: ServerClients, exchange: HttpExchange, response_id: str | None) -> list[Message]:
    """The messages of the response that is continued."""
    if response_id is None:
        return []
    found = clients.responses.find(exchange.tenant, response_id, time.monotonic())
    if found is None or found.expires_at == float("inf"):
        raise bad_request(f"previous_response_id: there is no complete response {response_id!r:.200}",
                          "previous_response_id", "previous_response_not_found")
    messages: list[Message] = msgspec.json.decode(found.messages)
    return messages


async def _render(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice], asked: _Request) -> None:
    """Send the response, whole or as events, and store it."""
    (choice,), conversation = choices, asked.conversation
    name, tenant, store = job.heading.response_id, exchange.tenant, api.clients.responses
    output = _Output(job, choice, asked)
    if not conversation:
        await _send(api, exchange, output)
        return
    try:
        begun = StoredResponse(to_json(output.response("in_progress")), conversation)
        store.begin(tenant, name, begun, time.monotonic())
    except StoreFull as full:
        if full.is_too_large:
            raise bad_request(f"input: {full}", "input", "too_large_to_store") from full
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(full), code="responses_full") from full
    try:
        await _send(api, exchange, output)
        if output.status in ("completed", "incomplete"):
            said = to_json(messages_of(output.items.items)) if output.items.items else b"[]"
            ended = StoredResponse(to_json(output.response(output.status)), _joined(conversation, said))
            store.complete(tenant, name, ended, time.monotonic())
    finally:
        if output.status not in ("completed", "incomplete"):
            store.drop(tenant, name)


def _joined(first: bytes, second: bytes) -> bytes:
    """Two lists as JSON, the first of which is not empty, as one."""
    return first if second == b"[]" else first[:-1] + b"," + second[1:]


async def _send(api: Api, exchange: HttpExchange, output: _Output) -> None:
    choice = output.choice
    if not output.request.stream:
        choice.wait()
    first_ns, num_events = 0, 0
    async for chunk in choice.generation:
        events = output.read(chunk)
        if output.request.stream:
            await exchange.event(b"".join([] if num_events else output.opening()) + events)
            exchange.error_format = ERRORS._replace(of_stream=lambda error, _: output.failed(_in_own_words(error)))
            choice.generation.interval = api.settings.stream_interval
        first_ns, num_events = first_ns or time.monotonic_ns(), num_events + 1
        if output.status != "in_progress":
            break
    if output.request.stream:
        await exchange.close()
    else:
        first_ns, num_events = time.monotonic_ns(), 1
        await exchange.respond_json(output.response(output.status))
    api.observers.batched_observer.sent(choice.generation.request_id, first_ns, time.monotonic_ns(), num_events)


class _Output:
    """A response as it comes."""

    def __init__(self, job: Job, choice: Choice, asked: _Request) -> None:
        self.choice = choice
        self.request = asked.fields
        self._asked = asked
        self.items = Items(job.heading.response_id)
        self.status = "in_progress"
        self._job = job
        self._num_events = 0
        self._reasoned, self._unclear = 0, 0  # tokens of reasoning; tokens since then whose text is not known yet
        self._reasons = job.parsing is not None  # the output may begin with reasoning, and is not past it

    def read(self, chunk: Chunk) -> bytes:
        """The events of a chunk; the last one, when it ends the output.  Raises ApiError: the engine failed."""
        events: list[bytes] = []
        for one in _singly(chunk) if self._reasons else (chunk,):
            delta = self.choice.read(one)
            if delta.finish_reason == "abort":
                raise bad_request("the request was aborted", code="abort")
            parts = parts_of(delta)
            self._count(delta, parts)
            events += self._events(self.items.read(parts))
            if delta.finish_reason is not None:
                self.status = "incomplete" if delta.finish_reason == "length" else "completed"
                events += self._events(self.items.end(self.status))
                events += self._events([(self.status, {"response": self.response(self.status)})])
                break
        return b"".join(events)

    def opening(self) -> list[bytes]:
        """The events before any item."""
        begun = {"response": self.response("in_progress") | {"output": [], "usage": None}}
        # They are written with the first items, and numbered before them.
        return [_event("response.created", 0, begun), _event("response.in_progress", 1, begun)]

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        told = {"code": CODES.get(HTTPStatus(error.status), "server_error"), "message": error.message}
        return b"".join(self._events([("failed", {"response": self.response("failed") | {"error": told}})]))

    def response(self, status: str) -> Json:
        """The response as it is now."""
        params, ended = self._job.params, status in ("completed", "incomplete")
        return self._asked.response(self._job.heading, status) | {
            "output": self.items.items, "temperature": params.temperature, "top_p": params.top_p,
            "usage": self._usage() if ended else None}

    def _usage(self) -> Json:
        num_prompt, num_output = len(self._job.prompts[0]), self.choice.num_tokens
        return {"input_tokens": num_prompt, "output_tokens": num_output, "total_tokens": num_prompt + num_output,
                "input_tokens_details": {
                    "cached_tokens": self.choice.num_cached,
                    "cache_write_tokens": self._job.num_written(self.choice.num_cached)},
                "output_tokens_details": {"reasoning_tokens": self._reasoned}}

    def _count(self, delta: Delta, parts: Iterable[Part]) -> None:
        """Count tokens of reasoning: those up to the last one that adds to its text."""
        if not self._reasons:
            return
        self._unclear += len(delta.token_ids)
        for part in parts:
            if isinstance(part, Reasoning):
                self._reasoned, self._unclear = self._reasoned + self._unclear, 0
            else:
                self._reasons = False

    def _events(self, events: Iterable[Event]) -> list[bytes]:
        """Events as they are sent; nothing for a response that is sent whole."""
        if not self.request.stream:
            for _ in events:
                pass
            return []
        found = []
        for kind, fields in events:
            found.append(_event(f"response.{kind}", self._num_events + 2, fields))  # behind the two of the opening
            self._num_events += 1
        return found


def _event(kind: str, number: int, fields: Json) -> bytes:
    data = to_json({"type": kind, "sequence_number": number} | fields)
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _singly(chunk: Chunk) -> Iterator[Chunk]:
    """A chunk's tokens one by one, so that each one's part is known; the last one with the end."""
    for place in range(len(chunk.token_ids) - 1):
        yield Chunk(chunk.token_ids[place : place + 1], chunk.logprobs[place : place + 1])
    yield chunk._replace(token_ids=chunk.token_ids[-1:], logprobs=chunk.logprobs[-1:])
