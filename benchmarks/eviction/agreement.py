"""Compares what-ifs with real servers: the same traffic with and without retention, predicted by each for the other.

    without retention (lru)      window ──► POST /what_if "hinted, and these prompts retained"  ──► the second's figures
    with retention (hinted)      window ──► POST /what_if "lru"                                 ──► the first's figures

Each window uses a server of its own with a small cache, over HTTP, in an open loop: a request is sent at its time,
whether or not earlier ones have ended. Ten minutes of traffic are scaled to a window: pauses and gaps between arrivals
by the same factor, one in `every` of its sessions is sent, and lengths are multiplied by `tokens`. A fourth of the
sessions (or of the groups that share a prefix) asks to be retained. An agent's next prompt repeats the tokens that the
server answered; its pauses begin when an answer of usual speed would have ended.

usage: python -m benchmarks.eviction agreement MODEL --trace JSONL --json FILE [--traffic agents] [--repeats 3]

A pair takes three minutes, in which nothing else may run.  Other pairs in the file are kept; those of the same traffic
and seed are repeats, whose spread the table of docs/reference/eviction.md gives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import aiohttp
import msgspec
from benchmarks.commands import parser_of
from benchmarks.eviction.orders import CONVERSATIONS
from benchmarks.server import Server, serving

from slotwise.core.scheduler_limits import HINTED, LRU
from slotwise.measure.bench.load_generator import BenchTarget, resolve
from slotwise.measure.bench.results import environment, write_json
from slotwise.measure.bench.server_run import NO_QUEUE_BOUND
from slotwise.measure.simulate.eviction_replay import working_set
from slotwise.measure.simulate.figures import quantile
from slotwise.measure.simulate.what_if import ALL, MEASURED, REPLAYED, WHAT_IF
from slotwise.measure.workload.distributions import below, stream
from slotwise.measure.workload.sessions import (
    AGENT_STARTS,
    AGENTS,
    FIRST_ID,
    PREFIX_RATE,
    PREFIXES,
    Agents,
    Piece,
    Session,
    Turn,
    agents,
    prefixes,
    read_mooncake,
)

KEY = "operator"
KEPT, OTHERS = "kept", "others"  # names of sessions: those that ask to be retained, where any do
KEPT_OF = 4  # sessions, or groups with a common prefix: one of so many asks to be retained
RETAIN = 300.0  # seconds: longer than a window
TRAFFIC_SECONDS = 600.0  # of the traffic that a window stands for
ANSWER_START, ANSWER_TOKEN = 0.1, 0.02  # seconds of an answer of usual speed: to its first token, and for each
BLOCK = 16  # tokens
LONGEST = 1280  # tokens of a prompt with its output; longer ones are left out
TENANT_SHARE = 0.75  # so that the longest prompt may be retained
SPARE = 32  # blocks that a cache has at least, beside those of one request
PROBED = 256 << 20  # bytes of a cache, by which the bytes of a block are known
WARM_UPS = (24, 100, 400, 1000)  # tokens of the prompts before a window
WITHOUT, WITH = "without", "with"


class Scale(NamedTuple):
    """How ten minutes of traffic become a window."""

    every: int  # one in so many sessions is sent
    tokens: float  # factor of lengths


SCALES = {CONVERSATIONS: Scale(12, 1 / 40), AGENTS: Scale(4, 1 / 48), PREFIXES: Scale(25, 1 / 8)}
CACHE_SHARE = 1 / 3  # of all different blocks: what the cache holds


class Ask(NamedTuple):
    """A request."""

    at: float  # seconds from the beginning of the window
    is_kept: bool  # it asks to be retained, where any do
    turn: Turn


def sessions_of(kind: str, scales: Scale, trace: Path, seed: int) -> list[tuple[Session, bool]]:
    """Returns sessions at the traffic's own times, and whether each of them may request retention."""
    every, scale = scales
    if kind == AGENTS:
        recipe = Agents(num_sessions=round(AGENT_STARTS * TRAFFIC_SECONDS / 60 / every), scale=scale,
                        rate=AGENT_STARTS / 60 / every)
        return [(session, number % KEPT_OF == 0) for number, session in enumerate(agents(recipe, seed))]
    if kind == PREFIXES:
        rate = PREFIX_RATE / every
        found = prefixes(seed, round(rate * TRAFFIC_SECONDS), rate, scale=scale)
        return [(session, _first(session) % KEPT_OF == 1) for session in found]
    found = [session for session in read_mooncake(trace, TRAFFIC_SECONDS, scale)
             if _first(session) % every == seed % every]
    return [(session, _first(session) // every % KEPT_OF == 0) for session in found]


def _first(session: Session) -> int:
    """Identifies the conversation of a Mooncake request, or the group of a request with a shared prefix.

    Most Mooncake prompts have the same first block, so it is skipped.
    """
    prompt = session.turns[0].prompt
    return prompt[1 if len(prompt) > 1 and prompt[0].content == FIRST_ID else 0].content


def asks_of(sessions: Sequence[tuple[Session, bool]], seconds: float) -> list[Ask]:
    """Returns the requests that arrive within `seconds`, in order."""
    found, faster = [], seconds / TRAFFIC_SECONDS
    for session, is_kept in sessions:
        at = session.starts_at * faster
        for turn in session.turns:
            at += turn.pause * faster
            if at < seconds and turn.num_prompt + turn.output.num_tokens <= LONGEST:
                found.append(Ask(at, is_kept, turn))
            at += ANSWER_START + ANSWER_TOKEN * turn.output.num_tokens
    return sorted(found, key=lambda one: one.at)


# -- a window ----------------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """Sends requests, and keeps what was answered."""

    http: aiohttp.ClientSession
    vocab_size: int
    retains: bool
    answered: dict[int, list[int]] = field(default_factory=dict)  # token ids by the content of the output
    waits: list[float] = field(default_factory=list)  # seconds to each first token
    num_unknown: int = 0  # outputs that a prompt was to repeat before they were known

    async def send(self, one: Ask) -> None:
        ids = [token for piece in one.turn.prompt for token in self._tokens(piece)]
        body: dict[str, Any] = {
            "prompt": ids, "max_tokens": one.turn.output.num_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True, "session_id": KEPT if one.is_kept else OTHERS}
        if one.is_kept and self.retains:
            body["retain"] = RETAIN
        self.answered[one.turn.output.content] = await self.answer(body)

    async def answer(self, body: dict[str, Any]) -> list[int]:
        """Returns the token ids of an answer, and notes when the first came."""
        found: list[int] = []
        began = time.perf_counter()
        async with self.http.post("/v1/completions", data=msgspec.json.encode(body),
                                  headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise RuntimeError(f"the server refused a request: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = msgspec.json.decode(line[6:])
                    if not found:
                        self.waits.append(time.perf_counter() - began)
                    for choice in event["choices"]:
                        found += choice.get("token_ids") or ()
        return found

    def _tokens(self, piece: Piece) -> list[int]:
        """The tokens of a piece: an answer's own, or those that its content stands for."""
        content, number = piece
        known = self.answered.get(content)
        if known is not None and len(known) == number:
            return known
        self.num_unknown += content in self.answered
        draw = stream(content, "tokens of a piece")
        return [FIRST_ID + below(draw, self.vocab_size - FIRST_ID) for _ in range(number)]


async def window(server: Server, vocab_size: int, asks: Sequence[Ask], *, retains: bool) -> dict[str, Any]:
    """Sends the requests at their times.  Returns what the client measured, and the server's answer to the what-if."""
    timeout, connector = aiohttp.ClientTimeout(300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as http:
        client = Client(http, vocab_size, retains)
        for number, length in enumerate(WARM_UPS):
            draw = stream(number, "tokens of a warm-up")
            await client.answer({
                "prompt": [FIRST_ID + below(draw, vocab_size - FIRST_ID) for _ in range(length)], "max_tokens": 16,
                "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True})
        client.waits.clear()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for one in asks:
                if (wait := one.at - (time.perf_counter() - began)) > 0:
                    await asyncio.sleep(wait)
                group.create_task(client.send(one))
        seconds = time.perf_counter() - began
        await asyncio.sleep(0.5)  # the server writes the ends into its log
        question = {"changes": {"eviction_policy": LRU}} if retains else {
            "changes": {"eviction_policy": HINTED}, "retain": {KEPT: RETAIN}}
        async with http.post("/what_if", json=question, headers={"Authorization": f"Bearer {KEY}"}) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"the server does not answer the what-if: {answer}")
    waits = client.waits
    return {"seconds": seconds, "unknown_outputs": client.num_unknown, "ttft_mean": fmean(waits),
            "ttft_p50": quantile(waits, 0.5), "ttft_p99": quantile(waits, 0.99), "what_if": _kept(answer, len(asks))}


def _kept(answer: Mapping[str, Any], num_asked: int) -> dict[str, Any]:
    """Returns the figures of an answer to a what-if.  Raises RuntimeError where it leaves out requests."""
    if answer["requests"] != num_asked + len(WARM_UPS):
        raise RuntimeError(f"the what-if replayed {answer['requests']} requests of {num_asked + len(WARM_UPS)}: send "
                           "fewer, or in a shorter window")
    return {run: {
        "found": answer["prompts"][run]["found"], "tokens": answer["prompts"][run]["tokens"],
        **{name: answer["groups"][ALL][run][name] for name in ("ttft_mean", "ttft_p50", "ttft_p99")}}
        for run in (MEASURED, REPLAYED, WHAT_IF)}


def options(asked: argparse.Namespace, policy: str, memory: int, log: str = "") -> list[str]:
    found = [asked.model, "--admin-api-key", KEY, "--eviction-policy", policy, "--kv-cache-memory", str(memory),
             "--block-size", str(BLOCK), "--tenant-cache-share", str(TENANT_SHARE), "--max-model-len", str(LONGEST),
             "--max-num-seqs", "8", "--speculative-config", '{"method": "none"}', *NO_QUEUE_BOUND]
    return [*found, "--event-log", log] if log else found


def pairs_of(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields pairs of windows, for each kind of traffic; which of the two is first alternates."""
    with serving(*options(asked, LRU, PROBED)) as server:
        of_block = PROBED / server.num_blocks
        _, vocab_size = resolve(BenchTarget(server.url))
    for repeat, kind in product(range(asked.repeats), asked.traffic):
        scales = SCALES[kind]._replace(every=SCALES[kind].every * asked.fewer)
        sessions = sessions_of(kind, scales, asked.trace, asked.seed)
        asks = asks_of(sessions, asked.seconds)
        needed = working_set([Session(0.0, (one.turn,)) for one in asks], BLOCK)
        num_blocks = max(int(needed * CACHE_SHARE), LONGEST // BLOCK + SPARE)
        pair: dict[str, Any] = {}
        for name, policy in ((WITHOUT, LRU), (WITH, HINTED))[:: -1 if (asked.seed + repeat) % 2 else 1]:
            log = str(asked.keep / f"{kind}-{asked.seed}-{repeat}-{name}") if asked.keep else ""
            with serving(*options(asked, policy, int(of_block * num_blocks), log)) as server:
                pair[name] = asyncio.run(window(server, vocab_size, asks, retains=name == WITH))
                num_blocks = server.num_blocks
        yield {"traffic": kind, "seed": asked.seed, "seconds": asked.seconds, **scales._asdict(),
               "requests": len(asks), "blocks": num_blocks, "needed_blocks": needed, **pair}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a checkpoint's folder, or the name of a published model")
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's trace of conversations")
    parser.add_argument("--json", type=Path, required=True, help="write the result here")
    parser.add_argument("--traffic", nargs="+", choices=tuple(SCALES), default=tuple(SCALES), help="kinds")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a window")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--fewer", type=int, default=1, metavar="N",
                        help="send one in N of these sessions, for a slow machine")
    parser.add_argument("--repeats", type=int, default=1, help="pairs of each kind")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the servers' event logs here")
    asked = parser.parse_args()
    rows = json.loads(asked.json.read_text())["rows"] if asked.json.exists() else []
    for row in pairs_of(asked):
        rows.append(row)
        rows.sort(key=lambda one: (one["traffic"], one["seed"]))
        write_json(asked.json, {"environment": environment(), "model": Path(asked.model).name,
                                "traffic_seconds": TRAFFIC_SECONDS, "rows": rows})
        for name, other in ((WITHOUT, WITH), (WITH, WITHOUT)):
            show(row, name, other)


def show(row: Mapping[str, Any], name: str, other: str) -> None:
    """Prints a server's prediction of the other window next to what that window measured."""
    said, measured = row[name]["what_if"], row[other]["what_if"][MEASURED]
    print(f"{row['traffic']}, seed {row['seed']}, {row['requests']} requests, {row['blocks']} of "
          f"{row['needed_blocks']} blocks: asked of the window {name} retention")
    for figure in ("found", "ttft_mean", "ttft_p50", "ttft_p99"):
        print(f"  {figure:10} measured {said[MEASURED][figure]:9.4g}  replayed {said[REPLAYED][figure]:9.4g}  what if "
              f"{said[WHAT_IF][figure]:9.4g}  measured {other} {measured[figure]:9.4g}  error "
              f"{said[WHAT_IF][figure] / measured[figure] - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
