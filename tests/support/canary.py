"""A stream that goes on while a server is ill-treated: its tokens, and how long it was kept waiting."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from support.live_server import Server

BODY = {"prompt": [40], "max_tokens": 200, "stream": True,  # through the toy's vocabulary, without meeting its end
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
STEP = 0.001  # seconds of a step of the toy engine


class Canary:
    """Sings until it is told to stop.  `gap` is the longest wait for an event, in seconds of the API process's
    computing time: what other requests cost it, however busy the machine is with other things.  It is at most the time
    of the tokens that the event has: one that came in time, and was read late, has a single token.
    """

    def __init__(self, server: Server, key: str = "") -> None:
        self.texts: list[str] = []
        self.gap = 0.0
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = server.url + "/v1/completions"
        self._clock = Path(f"/proc/{server.process.pid}/schedstat")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sing)

    def computed(self) -> float:
        """Seconds the main thread of the API process, which serves every stream, has computed."""
        return int(self._clock.read_text().split()[0]) * 1e-9

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _sing(self) -> None:
        with httpx.Client(timeout=120, headers=self._headers) as client:
            while not self._stop.is_set():
                with client.stream("POST", self._url, json=BODY) as response:
                    assert response.status_code == 200, response.read()
                    self.texts.append("".join(self._words(response)))

    def _words(self, response: httpx.Response) -> Iterator[str]:
        before, num_tokens = self.computed(), 0
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            event, now = json.loads(line.removeprefix("data: ")), self.computed()
            late = (event["usage"]["completion_tokens"] - num_tokens) * STEP
            self.gap, before = max(self.gap, min(now - before, late)), now
            num_tokens = event["usage"]["completion_tokens"]
            if event["choices"]:
                yield event["choices"][0]["text"]


@contextmanager
def singing(server: Server, text: str, key: str = "") -> Iterator[Canary]:
    """A canary for as long as the block runs; every time round it must have sung `text`."""
    canary = Canary(server, key)
    canary.start()
    try:
        yield canary
    finally:
        canary.stop()
    assert canary.texts and set(canary.texts) == {text}
