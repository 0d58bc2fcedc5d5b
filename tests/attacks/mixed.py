"""Mixed legitimate load: greedy requests with expected tokens from a quiet server, aborts, disconnects and readers.

Every response is checked on arrival: it must end once, have the tokens of the quiet run, and be no error outside of
windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from benchmarks.server import Server

from attacks import clients, ledger
from attacks.clients import PATH, Answer, ask, ask_briefly, ask_whole
from attacks.watch import Journal

CHAT = "/v1/chat/completions"
LOOKED = 0.5  # seconds between two reads of /metrics, /explain and the like
SIZES = ((3, 60), (17, 200), (64, 33), (130, 150), (300, 90), (500, 24), (700, 120), (900, 48))  # prompt, output tokens
TEXTS = ("import os\n\n", "class Queue:\n    def __init__(self", "# Returns the largest of ", "for i in range(10):\n")


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Returns (path, body) of greedy requests of many shapes; the same ones in every run."""
    rng = random.Random(23)
    greedy = {"temperature": 0, "ignore_eos": True}
    known: list[tuple[str, dict[str, Any]]] = []
    for size, output in SIZES:
        prompt = [rng.randrange(100, 4000) for _ in range(size)]
        known.append((PATH, greedy | {"prompt": prompt, "max_tokens": output}))
    for number, text in enumerate(TEXTS):
        known.append((PATH, greedy | {"prompt": text, "max_tokens": 40 + 30 * number}))
        known.append((CHAT, greedy | {"messages": [{"role": "user", "content": text}], "max_tokens": 30 + 20 * number}))
    return known


class MixedLoad:
    """`workers` clients that each send one request after the other."""

    def __init__(self, server: Server, journal: Journal, workers: int = 6) -> None:
        self.fates: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # messages of errors and refusals
        self.latest = ""  # id of the latest request
        self._server, self._journal, self._workers = server, journal, workers
        self._bodies = bodies()
        self._known: list[tuple[str, int]] = []
        self._stop = asyncio.Event()

    async def learn(self, http: aiohttp.ClientSession) -> None:
        """Records the tokens of a quiet server, each request alone.

        Raises:
            RuntimeError: a request did not complete.
        """
        for path, body in self._bodies:
            answer = await ask(http, self._server, body, path=path)
            if answer.fate != ledger.COMPLETED:
                raise RuntimeError(f"a quiet server did not complete {str(body)[:100]}: {answer}")
            self._known.append(answer.tokens)

    @asynccontextmanager
    async def running(self, salt: int) -> AsyncIterator[MixedLoad]:
        """Runs the load during the block, then waits for active requests.

        Args:
            salt: makes another sequence of requests of the same seed.
        """
        self._stop.clear()
        async with clients.session() as http:
            tasks = [asyncio.create_task(self._work(http, random.Random(f"{self._journal.seed}-{salt}-{number}")))
                     for number in range(self._workers)]
            tasks.append(asyncio.create_task(self._read(http)))
            tasks.append(asyncio.create_task(self._view(http)))
            try:
                yield self
            finally:
                self._stop.set()
                for error in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(error, BaseException):
                        raise error

    async def _work(self, http: aiohttp.ClientSession, rng: random.Random) -> None:
        await asyncio.sleep(rng.uniform(0, 1))
        while not self._stop.is_set():
            answer = await self._one(http, rng)
            self.fates[answer.fate] += 1
            if answer.fate in (ledger.REFUSED, ledger.FAILED, ledger.UNHEARD):
                self.refused[answer.error[:100]] += 1
                await asyncio.sleep(0.2)
            await asyncio.sleep(rng.expovariate(1 / 0.15))

    async def _one(self, http: aiohttp.ClientSession, rng: random.Random) -> Answer:
        number = rng.randrange(len(self._bodies))
        path, body = self._bodies[number]
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                return self._judged(await ask(http, self._server, body, path=path), number)
            case 4 | 5:
                return self._judged(await ask_whole(http, self._server, body, path), number)
            case 6:
                several = body | {"n": 2}
                return self._judged(await ask(http, self._server, several, path=path), number, 2)
            case 7:
                return self._judged(await self._aborted(http, rng, path, body), number, 0)
            case 8:
                return self._judged(await ask(http, self._server, body, rng.randint(1, 30), path), number, 0)
            case _:
                if path == CHAT:
                    path, body = self._bodies[0]
                return self._judged(await ask_briefly(http, self._server, body, rng.uniform(0, 0.4)), number, 0)

    async def _aborted(
        self, http: aiohttp.ClientSession, rng: random.Random, path: str, body: dict[str, Any],
    ) -> Answer:
        """Sends a request that another connection aborts, in any state."""
        name = f"aborted-{rng.getrandbits(48):x}"
        task = asyncio.create_task(ask(http, self._server, body | {"request_id": name}, path=path))
        await asyncio.sleep(rng.uniform(0, 0.6))
        self.latest = name
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with http.post(f"{self._server.url}/abort_requests", json={"request_ids": [name]}) as response:
                await response.read()
        return await task

    def _judged(self, answer: Answer, number: int, choices: int = 1) -> Answer:
        """Checks the laws on `answer`.

        Args:
            number: of its body.
            choices: number of choices whose tokens must equal the quiet run's; 0: the request may have ended early.
        """
        journal, body = self._journal, self._bodies[number]
        what = f"body {number} ({body[0]}, {body[1]['max_tokens']} tokens)"
        if answer.fate in (ledger.LOST, ledger.UNHEARD):
            journal.violated("each request ends once", f"{what}: {answer.broken or 'connection refused'}; "
                             f"status {answer.status}, {answer.ends} ends", answer.sent)
        elif answer.fate in (ledger.FAILED, ledger.REFUSED, ledger.IMPOSSIBLE):
            if not journal.excused(answer.sent, answer.ended):
                journal.violated("no error where nothing was done to the engine",
                                 f"{what}: {answer.status} {answer.error}", answer.sent)
        elif choices and answer.fate != ledger.COMPLETED:
            journal.violated("no error where nothing was done to the engine",
                             f"{what}: ended as {answer.finish_reason}", answer.sent)
        elif choices and not self._is_known(answer, number, choices):
            journal.violated("tokens as in the quiet run", f"{what}: {answer.num_tokens} tokens, {answer.text[:80]!r} "
                             f"instead of {self._known[number][0][:80]!r}", answer.sent)
        return answer

    def _is_known(self, answer: Answer, number: int, choices: int) -> bool:
        text, num_tokens = self._known[number]
        return list(answer.texts.values()) == [text] * choices and answer.num_tokens == num_tokens * choices

    # -- readers -------------------------------------------------------------------------------------------------

    async def _read(self, http: aiohttp.ClientSession) -> None:
        """Reads /metrics, /load, /explain and /requests, in turn."""
        while not self._stop.is_set():
            for path in ("/metrics", f"/explain/{self.latest or 'x'}", "/load", f"/requests/{self.latest or 'x'}"):
                began, status, said = time.perf_counter(), 0, ""
                try:
                    async with http.get(self._server.url + path) as response:
                        status, said = response.status, (await response.text())[:200]
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    said = f"{type(error).__name__}: {error}"
                if status not in (200, 400, 404, 429) and not self._journal.excused(began, time.perf_counter()):
                    self._journal.violated("readers are answered", f"GET {path}: {status} {said}", began)
                await asyncio.sleep(LOOKED)

    async def _view(self, http: aiohttp.ClientSession) -> None:
        """Reads /events, for three seconds at a time."""
        while not self._stop.is_set():
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(3), http.get(f"{self._server.url}/events") as response:
                    async for _ in response.content.iter_any():
                        if self._stop.is_set():
                            return
            await asyncio.sleep(2)
