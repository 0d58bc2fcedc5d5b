"""An OpenAI-compatible server whose every token comes at a known time.  Run as a program: prints its address.

    received ── ttft ──► first event ── itl ──► event ── itl ──► event ...      `per_event` tokens in each

Deadlines are absolute, counted from when the request's body was read, so that lateness does not add up.  `kinds` says,
in turn, what becomes of each request.  GET /seen tells what came.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web

ANSWERS = "answers"  # as asked
CUT = "cut"  # the connection closes after two events
ERROR_EVENT = "error event"  # an error within the stream
HALVES = "halves"  # of characters: tokens before the last give no text
NO_USAGE = "no usage"
SILENT_ENDING = "silent ending"  # a last event without text, one itl after the last token
STATUSES = {"busy": 429, "overloaded": 503, "broken": 500, "not found": 404}


@dataclass
class Behavior:
    ttft: float = 0.0  # seconds
    itl: float = 0.0
    per_event: int = 1  # tokens
    kinds: list[str] = field(default_factory=lambda: [ANSWERS])
    api_key: str = ""
    model_card: dict[str, Any] = field(default_factory=lambda: {"id": "fake"})


class FakeServer:
    def __init__(self, behavior: Behavior) -> None:
        self._behavior = behavior
        self._bodies: list[dict[str, Any]] = []
        self._times: list[float] = []
        self._running = self._most_at_once = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([
            web.get("/v1/models", self._models), web.get("/seen", self._seen),
            web.post("/v1/completions", self._generate), web.post("/v1/chat/completions", self._generate)])
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if self._behavior.api_key and request.headers.get("Authorization") != f"Bearer {self._behavior.api_key}":
            return web.json_response({"error": {"message": "a key, please"}}, status=401)
        return web.json_response({"object": "list", "data": [self._behavior.model_card]})

    async def _seen(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"bodies": self._bodies, "times": self._times, "most_at_once": self._most_at_once})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        received = asyncio.get_running_loop().time()
        kind = self._behavior.kinds[len(self._bodies) % len(self._behavior.kinds)]
        self._bodies.append(body)
        self._times.append(received)
        if kind in STATUSES:
            return web.json_response({"error": {"message": f"this is {kind}"}}, status=STATUSES[kind])
        self._running += 1
        self._most_at_once = max(self._most_at_once, self._running)
        try:
            return await self._stream(request, body, kind, received)
        finally:
            self._running -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], kind: str, received: float,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        if is_chat:
            await _send(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        asked = body.get("bench_output_tokens") or body["max_tokens"]
        per_event = self._behavior.per_event
        events = -(-asked // per_event)
        for number in range(events):
            await _until(received + self._behavior.ttft + number * self._behavior.itl)
            text = "word " * min(per_event, asked - number * per_event)
            if kind == HALVES and number < events - 1:
                text = ""
            is_last = number == events - 1 and kind != SILENT_ENDING
            await _send(response, {"choices": [_choice(text, "length" if is_last else None, is_chat)]})
            if number == 1 and kind == CUT:
                request.transport.close()
                return response
            if number == 1 and kind == ERROR_EVENT:
                await _send(response, {"error": {"message": "the engine failed"}})
                return response
        if kind == SILENT_ENDING:
            await _until(received + self._behavior.ttft + events * self._behavior.itl)
            await _send(response, {"choices": [_choice("", "stop", is_chat)]})
        if kind != NO_USAGE:
            used = {"prompt_tokens": len(body.get("prompt", "")), "completion_tokens": asked}
            await _send(response, {"choices": [], "usage": used})
        await response.write(b"data: [DONE]\n\n")
        return response


def _choice(text: str, reason: str | None, is_chat: bool) -> dict[str, Any]:
    said = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"index": 0, "finish_reason": reason} | said


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def _until(deadline: float) -> None:
    if (wait := deadline - asyncio.get_running_loop().time()) > 0:
        await asyncio.sleep(wait)


@contextlib.contextmanager
def fake_server(behavior: Behavior) -> Iterator[str]:
    """Its address, while it runs in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(asdict(behavior))], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


async def main() -> None:
    runner = web.AppRunner(FakeServer(Behavior(**json.loads(sys.argv[1]))).app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
