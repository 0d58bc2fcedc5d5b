"""Steps of mixed shapes for a long time: the engine process holds the memory that was said at its start."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from . import clients, ledger
from .clients import Answer, ask
from .family import resident
from .server import MIB, Server, serving

PATHS = {"onednn": "bfloat16", "float32": "float32"}  # kernel path of linear layers, and the dtype it serves
CACHE = 64 * MIB  # bytes of the key-value cache: the load fills it
MOST_AT_ONCE = 64
PAUSE = 2.0  # seconds after each group
LONGEST = (900, 100)  # prompt and output tokens
WITHIN = 0.1  # of what was said
QUARTERS = 4


def shapes(seconds: float, seed: int) -> ledger.Row:
    """Runs a server of each kernel path, all at once."""
    with ExitStack() as stack:
        servers = {path: stack.enter_context(serving(
            "--dtype", dtype, "--log-format", "json", "--kv-cache-memory", str(CACHE),
            environment={"SLOTWISE_CPU_LINEAR": path})) for path, dtype in PATHS.items()}
        fates, held = asyncio.run(_loaded(servers, seconds, seed))
        said = {path: int(server.ready["memory_bytes"]) for path, server in servers.items()}
    return ledger.Row(
        f"mixed shapes for {seconds:g} s, seed {seed}", ledger.tally(fates), 0,
        {f"memory as said, {path}": max(held[path]) <= (1 + WITHIN) * said[path]
         and held[path][-1] >= (1 - WITHIN) * said[path] for path in said},
        [f"{path}: {said[path] / MIB:.0f} MiB were said, {_as_text(held[path])} MiB were held at the start and after "
         f"each quarter, {held[path][-1] / said[path]:.0%} at the end" for path in said],
        {"said": said, "held": held})


def _as_text(held: list[int]) -> str:
    return ", ".join(f"{one / MIB:.0f}" for one in held)


async def _loaded(
    servers: dict[str, Server], seconds: float, seed: int,
) -> tuple[list[str], dict[str, list[int]]]:
    """Returns the outcome of each request, and the resident bytes of each engine process, by path."""
    fates: list[str] = []
    held = {path: [resident(server.engine_pid)] for path, server in servers.items()}
    rngs = {path: random.Random(f"{seed}-{path}") for path in servers}
    for _ in tqdm(range(QUARTERS), unit="quarter", desc="    mixed shapes"):
        for told in await asyncio.gather(
                *(_load(server, rngs[path], seconds / QUARTERS) for path, server in servers.items())):
            fates += told
        for path, server in servers.items():
            held[path].append(resident(server.engine_pid))
    return fates, held


async def _load(server: Server, rng: random.Random, seconds: float) -> list[str]:
    """Sends groups of a random number of random requests.  Returns their outcomes."""
    fates: list[str] = []
    end = time.perf_counter() + seconds
    async with clients.session() as http:
        while time.perf_counter() < end:
            answers: list[Answer] = await asyncio.gather(
                *(ask(http, server, _body(rng)) for _ in range(rng.randint(1, MOST_AT_ONCE))))
            fates += [answer.fate for answer in answers]
            await asyncio.sleep(PAUSE)
    return fates


def _body(rng: random.Random) -> dict[str, Any]:
    prompt, output = (int(most ** rng.random()) for most in LONGEST)
    return {"prompt": [rng.randrange(100, 4000) for _ in range(prompt)], "max_tokens": output,
            "temperature": 0, "ignore_eos": True}
