"""Scenarios with clients that disconnect, and a server that receives SIGTERM."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from urllib.parse import urlsplit

import aiohttp

from . import clients, ledger
from .clients import Answer, Canary, ask, ask_briefly
from .server import Metrics, Server, serving

NUM_DISCONNECTS = 1000
CROWD = 160  # concurrent clients, for 64 slots
SHUTDOWN = 5.0  # seconds, --shutdown-timeout
SPARE = 5.0  # further seconds that a server may take to exit
LONG, SHORT = 800, 20  # output tokens, of requests that exceed the shutdown timeout and that do not


def prompt(rng: random.Random, most: int = 200) -> list[int]:
    return [rng.randrange(100, 4000) for _ in range(rng.randint(1, most))]


# -- disconnects -------------------------------------------------------------------------------------------------


def disconnects(seconds: float) -> ledger.Row:
    with serving("--dtype", "float32") as server:
        return asyncio.run(_disconnects(server))


async def _disconnects(server: Server) -> ledger.Row:
    rng = random.Random(4)
    places = asyncio.Semaphore(CROWD)
    most_waiting = 0

    async with clients.session() as http, Canary(http, server).singing() as canary:
        async def one(number: int) -> Answer:
            async with places:
                return await _leave(http, server, rng, number)

        group = [asyncio.create_task(one(number)) for number in range(NUM_DISCONNECTS)]
        while not all(task.done() for task in group):
            most_waiting = max(most_waiting, int((await Metrics.read(http, server))["num_requests_waiting"]))
            await asyncio.sleep(0.1)
        answers = [task.result() for task in group]
        settled = await clients.quiet(http, server, but=1)  # the canary
    async with clients.session() as http:
        await clients.quiet(http, server)
        leaked = await clients.leaked(http, server)
        status, state = await clients.health(http, server)
        aborted = (await Metrics.read(http, server))['request_success_total{finished_reason="abort"']
    fates = ledger.tally(answer.fate for answer in [*answers, *canary.answers])
    spoken = sum(1 for answer in answers if answer.first)
    return ledger.Row(
        f"{NUM_DISCONNECTS:,} disconnects", fates, leaked,
        {"no request left": status == 200 and state["num_live"] == 0, "all quiet within a second": settled <= 1.0,
         "the canary's tokens unchanged": canary.unchanged},
        [f"gone while a body was sent, while queued (up to {most_waiting} waited), before the first token, and in "
         f"mid-stream ({spoken})", f"all quiet {settled:.2f} s after the last had left; {aborted:.0f} aborted in the "
         f"engine; a canary beside them gave the same tokens {len(canary.answers)} times"],
        {"seconds_until_quiet": settled, "mid_stream": spoken, "most_waiting": most_waiting, "aborted": aborted,
         "canary": len(canary.answers)})


async def _leave(http: aiohttp.ClientSession, server: Server, rng: random.Random, number: int) -> Answer:
    """Sends a request and disconnects in one of its phases."""
    body = {"prompt": prompt(rng), "max_tokens": 400, "ignore_eos": True}
    match number % 10:
        case 0:
            return await _half_a_body(server)
        case 1 | 2 | 3:
            return await ask_briefly(http, server, body, rng.uniform(0.0, 0.5))
        case _:
            return await ask(http, server, body, leave_after=rng.randint(1, 40))


async def _half_a_body(server: Server) -> Answer:
    answer = Answer(time.perf_counter())
    url = urlsplit(server.url)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Content-Length: 5000\r\n\r\n{\"prompt\": [")
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.close()
    answer.hung_up, answer.ended = True, time.perf_counter()
    return answer


# -- SIGTERM -----------------------------------------------------------------------------------------------------


def sigterm(seconds: float) -> ledger.Row:
    with serving("--shutdown-timeout", str(SHUTDOWN)) as server:
        return asyncio.run(_sigterm(server))


async def _sigterm(server: Server) -> ledger.Row:
    rng = random.Random(6)
    bodies = [{"prompt": prompt(rng), "max_tokens": LONG if number % 2 else SHORT, "ignore_eos": True}
              for number in range(CROWD)]
    engine = server.engine_pid
    async with clients.session() as http:
        inside = [asyncio.create_task(ask(http, server, body)) for body in bodies]
        while (await Metrics.read(http, server))["num_requests_running"] < 60:
            await asyncio.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        asked = time.perf_counter()
        newcomers = await _newcomers(http, server, asked)
        exited = time.perf_counter() - asked
        answers = [await task for task in inside]
    status = server.process.poll()
    fates = ledger.tally(answer.fate for answer in [*answers, *newcomers])
    counts, late = ledger.tally(a.fate for a in answers), ledger.tally(a.fate for a in newcomers)
    return ledger.Row(
        "SIGTERM at full load", fates, 0,
        {"exit status 0": status == 0, "exited in time": exited <= SHUTDOWN + SPARE,
         "newcomers got 503": set(late) <= {ledger.REFUSED, ledger.UNHEARD} and ledger.REFUSED in late,
         "no process left": not _alive(engine)},
        [f"of {CROWD} inside {counts.get(ledger.COMPLETED, 0)} completed and {counts.get(ledger.ABORTED, 0)} were "
         f"ended with finish_reason abort; {late.get(ledger.REFUSED, 0)} newcomers got 503",
         f"exited {exited:.1f} s after the signal (--shutdown-timeout {SHUTDOWN:g}) with status {status}; no process "
         "was left, and so no block"],
        {"inside": counts, "newcomers": late, "seconds_to_exit": exited, "exit_status": status,
         "broken_off": [answer.broken for answer in [*answers, *newcomers] if answer.broken]})


async def _newcomers(http: aiohttp.ClientSession, server: Server, asked: float) -> list[Answer]:
    """Sends a new request every 50 ms until the server has exited."""
    await asyncio.sleep(0.1)  # until the signal has arrived
    tasks = []
    while server.process.poll() is None and time.perf_counter() - asked < SHUTDOWN + 6 * SPARE:
        tasks.append(asyncio.create_task(ask(http, server, {"prompt": [5], "max_tokens": 1})))
        await asyncio.sleep(0.05)
    return [await task for task in tasks]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
