"""The path of one request through the front door: to a replica, and its response back to the client.

    route ─► send ─► head ─► first output to the client ─► ... ─► end
      ▲        │ failed       │                              │ failed
      └────────┴──────────────┘ once                         └─► an error ends the stream

A request whose replica fails before the client has received any output goes to another replica, once.  Behind that an
error ends a stream, in the form of its route, and cuts a whole response short.  A stream is passed on in whole events.
Signs of life are passed on, too, but do not count as output: the stream that they begin may still come from another
replica, and an answer with an error becomes an event.  A client that leaves closes the connection to the replica, which
then aborts the generation.

Where replicas have roles, one computes a prompt and another one answers:

    door ──┬── body, 1 token, do_remote_decode ────► prefill replica ──┐ blocks, chunk by chunk
           └── body, do_remote_prefill ────────────► decode replica ◄──┘ ──► the answer

Both requests name the same transfer, and carry the transfer secret.  The second one is sent when the prefill replica
has no earlier prompts, so blocks travel while the prompt is still computed, and the decode replica keeps blocks for one
prompt, not for a queue of them.  If the first one fails, the decode replica computes the prompt itself; so it does
where it has most of it in its cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Collection, Mapping
from http import HTTPStatus

import aiohttp
import msgspec

from slotwise.api.generate.prompt_transfer import HEADER
from slotwise.api.http.api_errors import ClientGone
from slotwise.api.http.http_exchange import HttpExchange
from slotwise.api.openai.responses import RESPONSES
from slotwise.core.routing.fleet import Shed
from slotwise.core.routing.replica import Replica
from slotwise.fleet.door import Door
from slotwise.fleet.upstream import (
    ATTEMPTS,
    ELSEWHERE,
    EVENT_STREAM,
    Answer,
    Opening,
    ReplicaLost,
    ReplicaRefusal,
    RoutedPrompt,
    Upstream,
    answer_of,
    end,
    headers_of,
    replica_lost,
    returned,
    send,
    target_of,
    whole_events,
)

APART = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_tokens", "/v1/messages": "max_tokens",
         RESPONSES: "max_output_tokens"}  # routes whose prompts may travel, with the field of the most output tokens
LEAST = 64.0  # tokens that a decode replica lacks; it computes fewer itself
LEFT_OUT = ("stream", "stream_options", "min_tokens", "explain", "bench_output_tokens",
            "max_completion_tokens")  # of the request for a prompt
AT_HOME = ("kv_transfer_params", "prompt_logprobs", "echo", "previous_response_id")  # with one no prompt travels

logger = logging.getLogger(__name__)
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
ANSWERED_BY = b"x-slotwise-replica"  # the replica that a response comes from, as GET /replicas names it
WHOLE = 1 << 20  # bytes of a response that is sent only once it is whole


# -- prompts that another replica computes -----------------------------------------------------------------------------


class Prefill:
    """The prompt of one request, on its way to the replica that answers.

    Args:
        path: of the request.
        headers: with which it is sent on.
    """

    def __init__(self, door: Door, path: str, headers: Mapping[str, str], body: bytes, prompt: RoutedPrompt) -> None:
        self._door, self._path, self._headers = door, path, headers
        self._body, self._prompt = body, prompt
        self._task: asyncio.Task[None] | None = None

    async def begin(self, name: str, request_id: str, failed: Collection[str]) -> tuple[bytes, Mapping[str, str]]:
        """Have the prompt computed elsewhere, if that is of use.

        Returns the body for the replica of that `name` and its headers, once it is to be sent.
        """
        fleet = self._door.fleet
        answering = next(replica for replica in fleet.replicas if replica.name == name)
        fields = self._fields(answering, request_id)
        if not fields:
            return self._body, self._headers
        transfer_id = secrets.token_hex(16)  # of this attempt: one that was given up may not have ended yet
        request = self._door.request_of(self._prompt, f"{request_id}/{transfer_id}")
        chosen = fleet.route(request, asyncio.get_running_loop().time(), {*failed, name}, for_prompts=True)
        if isinstance(chosen, Shed):
            return self._body, self._headers
        headers = {**self._headers, HEADER: self._door.settings.kv_transfer_secret}
        self._door.metrics.prefills[chosen.name] += 1
        its_turn = self._door.prompts.join(chosen.name, request.request_id)
        self._task = asyncio.create_task(
            self._compute(chosen.name, request.request_id, headers, _for_prompt(fields, transfer_id, self._path)))
        self._task.add_done_callback(lambda task: self._computed(chosen.name, request.request_id))
        await its_turn.wait()
        return msgspec.json.encode(fields | {"kv_transfer_params": {
            "do_remote_prefill": True, "transfer_id": transfer_id, "remote_host": chosen.report.kv_host,
            "remote_port": chosen.report.kv_port}}), headers

    def end(self) -> None:
        """The request has its answer, or none is wanted."""
        if self._task is not None:
            self._task.cancel()

    def _fields(self, answering: Replica, request_id: str) -> dict[str, msgspec.Raw]:
        """The fields of a body whose prompt may travel; none of any other."""
        if not answering.report.receives_prompts or self._path not in APART or not self._door.may_transfer:
            return {}
        if answering.lacked(request_id) < LEAST:
            return {}
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            fields: dict[str, msgspec.Raw] = _decode(self._body)
            return fields if _has_one_prompt(fields) else {}
        return {}

    def _computed(self, name: str, request_id: str) -> None:
        """Its task has ended, or was cancelled before it began."""
        self._door.fleet.finished(request_id)
        self._door.prompts.leave(name, request_id)

    async def _compute(self, name: str, request_id: str, headers: Mapping[str, str], body: bytes) -> None:
        door = self._door
        why = "it was lost"
        try:
            upstream = door.replicas.upstream(name)
            async with upstream.until_lost(), upstream.sending("POST", self._path, headers, body) as response:
                answer = await response.read()
                door.fleet.first_output(request_id, asyncio.get_running_loop().time())
                if response.status == HTTPStatus.OK:
                    return
                why = f"it answered {response.status}: {answer[:200].decode(errors='replace')}"
        except ReplicaLost:
            pass
        door.metrics.failed_prefills += 1
        logger.warning("replica %s has not computed a prompt: %s", name, why)


def _has_one_prompt(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether a body has one prompt, one choice, and nothing that needs the prompt computed where it is answered."""
    present = {name for name, raw in fields.items() if bytes(raw) not in (b"null", b"false")}
    if present.intersection(AT_HOME) or ("n" in present and bytes(fields["n"]) != b"1"):
        return False
    prompt = bytes(fields.get("prompt", b'""'))
    return prompt.startswith(b'"') or prompt.removeprefix(b"[").lstrip()[:1].isdigit()


def _for_prompt(fields: Mapping[str, msgspec.Raw], transfer_id: str, path: str) -> bytes:
    """The body with which a prompt is computed for another replica."""
    kept = {name: raw for name, raw in fields.items() if name not in LEFT_OUT}
    own = {"store": False} if path == RESPONSES else {}
    return msgspec.json.encode(kept | own | {APART[path]: 1} | {
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": transfer_id}})


# -- one request -------------------------------------------------------------------------------------------------------


class Forwarding:
    """One request, which is sent to a replica, and perhaps to a second one.

    Args:
        without: replicas that are not to be chosen.
    """

    def __init__(self, door: Door, exchange: HttpExchange, body: bytes, prompt: RoutedPrompt,
                 without: frozenset[str] = frozenset()) -> None:
        self._door, self._exchange, self._body, self._prompt = door, exchange, body, prompt
        self._failed = set(without)
        self._id = door.next_id()
        self._gone = False
        self._opening = Opening()
        self._scope: asyncio.Timeout | None = None  # of the attempt in progress

    async def run(self) -> None:
        """Raises ApiError: no replica may serve it, or the last one failed; ClientGone: the client has left."""
        turned_away: Answer | None = None
        async with self._exchange.watched(self._leave):
            for attempt in range(ATTEMPTS):
                upstream = self._route(is_first=attempt == 0)
                if upstream is None:
                    break
                try:
                    await self._attempt(upstream)
                    return
                except ReplicaRefusal as error:
                    turned_away = error.answer
                except ReplicaLost as error:
                    self._check_retry(error)
                finally:
                    self._door.fleet.finished(self._id)
                self._failed.add(upstream.name)
                self._door.metrics.rerouted += attempt == 0
            if turned_away is not None:
                await send(self._exchange, turned_away)
                return
        raise replica_lost()

    def _leave(self) -> None:
        self._gone = True
        if self._scope is not None:
            end(self._scope)

    def _route(self, *, is_first: bool) -> Upstream | None:
        """The replica to send it to; None: there is no second one."""
        door, now = self._door, asyncio.get_running_loop().time()
        request = door.request_of(self._prompt, self._id)
        found = door.fleet.route(request, now, self._failed)
        if not isinstance(found, Shed):
            door.metrics.routed[found.name] += 1
            return door.replicas.upstream(found.name)
        if is_first:
            raise door.shed(found, request.adapter)
        return None

    def _check_retry(self, error: ReplicaLost) -> None:
        """Raises unless the request may go elsewhere."""
        if self._gone:
            raise ClientGone from error
        if self._opening.is_over:
            raise replica_lost() from error

    async def _attempt(self, upstream: Upstream) -> None:
        exchange = self._exchange
        if self._gone:
            raise ClientGone
        exchange.late_headers = lambda: [(ANSWERED_BY, upstream.name.encode("latin-1", "replace"))]
        sent = headers_of(exchange, self._prompt)
        prefill = Prefill(self._door, exchange.scope["path"], sent, self._body, self._prompt)
        try:
            async with upstream.until_lost() as self._scope:
                body, headers = await prefill.begin(upstream.name, self._id, self._failed)
                async with upstream.sending(exchange.scope["method"], target_of(exchange), headers, body) as response:
                    if response.content_type == EVENT_STREAM:
                        await self._pass_stream(response)
                    else:
                        await self._pass_whole(response)
        finally:
            self._scope = None
            prefill.end()

    async def _pass_stream(self, response: aiohttp.ClientResponse) -> None:
        exchange = self._exchange
        async for events in whole_events(response.content):
            if self._opening.read(events):
                raise ReplicaRefusal(answer_of(response, events))
            if not exchange.status:
                exchange.more += returned(response.headers)
            if self._opening.is_over:
                self._output()
            await exchange.event(events)
        await exchange.close()

    async def _pass_whole(self, response: aiohttp.ClientResponse) -> None:
        """Sends a response once it is whole; a very long one in parts, and it is cut short if the replica fails."""
        exchange, parts, size = self._exchange, list[bytes](), 0
        async for part in response.content.iter_any():
            self._output()
            parts.append(part)
            size += len(part)
            if size > WHOLE:
                await self._pass_long(response, b"".join(parts))
                return
        answer = answer_of(response, b"".join(parts))
        if answer.code in ELSEWHERE:
            raise ReplicaRefusal(answer)
        await send(exchange, answer)

    async def _pass_long(self, response: aiohttp.ClientResponse, begun: bytes) -> None:
        exchange, self._opening.is_over = self._exchange, True
        exchange.more += returned(response.headers)
        try:
            await exchange.event(begun, response.headers.get("content-type", "application/json").encode("latin-1"))
            async for part in response.content.iter_any():
                await exchange.event(part)
        except BaseException:
            exchange.abort()
            raise
        await exchange.close()

    def _output(self) -> None:
        self._door.fleet.first_output(self._id, asyncio.get_running_loop().time())
