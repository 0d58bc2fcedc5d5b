"""Prompts that one replica computes for another one, which answers.

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
from collections import defaultdict
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from slotwise.routing.fleet import Shed
from slotwise.routing.replica import Replica
from slotwise.scale.routed import Prompt
from slotwise.scale.upstream import ReplicaLost
from slotwise.server.prompt_transfer import HEADER
from slotwise.server.responses import RESPONSES

if TYPE_CHECKING:
    from slotwise.scale.door import Door

APART = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_tokens", "/v1/messages": "max_tokens",
         RESPONSES: "max_output_tokens"}  # routes whose prompts may travel, with the field of the most output tokens
LEAST = 64.0  # tokens that a decode replica lacks; fewer are computed there beside its rows
LEFT_OUT = ("stream", "stream_options", "min_tokens", "explain", "bench_output_tokens",
            "max_completion_tokens")  # of the request for a prompt
AT_HOME = ("kv_transfer_params", "prompt_logprobs", "echo", "previous_response_id")  # with one no prompt travels

logger = logging.getLogger(__name__)
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Prompts:
    """The prompts that each prefill replica was sent and has not computed, the oldest first."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, dict[str, asyncio.Event]] = defaultdict(dict)

    def join(self, name: str, request_id: str) -> asyncio.Event:
        """A prompt is sent.  Returns what is set when it is the oldest, or is computed."""
        turns = self._turns[name]
        turns[request_id] = turn = asyncio.Event()
        if len(turns) == 1:
            turn.set()
        return turn

    def leave(self, name: str, request_id: str) -> None:
        """A prompt is computed, or is not wanted any more."""
        turns = self._turns[name]
        turns.pop(request_id).set()
        if turns:
            next(iter(turns.values())).set()


class Prefill:
    """The prompt of one request, on its way to the replica that answers.

    Args:
        path: of the request.
        headers: with which it is sent on.
    """

    def __init__(self, door: Door, path: str, headers: Mapping[str, str], body: bytes, prompt: Prompt) -> None:
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
        request = self._door.request_of(self._prompt, f"{request_id}/prompt")
        chosen = fleet.route(request, asyncio.get_running_loop().time(), {*failed, name}, for_prompts=True)
        if isinstance(chosen, Shed):
            return self._body, self._headers
        headers = {**self._headers, HEADER: self._door.settings.kv_transfer_secret}
        self._door.metrics.prefills[chosen.name] += 1
        transfer_id = secrets.token_hex(16)
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
