"""Scenarios under pressure: overload, disconnects, impossible requests, lost and frozen engines, SIGTERM, mixed shapes.

Each starts `slotwise serve` as a user would, and accounts for every request it sent: one row of the table in
docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop
from benchmarks.server import MIB, Metrics, Server, serving
from tqdm import tqdm

from attacks import clients, ledger, module, module_environment
from attacks.clients import Answer, Canary, HealthWatch, LeanClient, ask, ask_briefly
from attacks.processes import resident
from slotwise import builtin
from slotwise.measure.bench.load_generator import BenchTarget, LoadRun, Phrasing, resolve
from slotwise.measure.bench.measures import COMPLETED, REJECTED, RequestOutcome, percentile
from slotwise.measure.workload.distributions import parse_arrivals, parse_lengths
from slotwise.measure.workload.workloads import Recipe, Workload, generate

FACTOR = 5
TRIAL = 10.0  # seconds of each closed loop that measures the best goodput
USERS = (64, 96)  # of the closed loops; there are 64 slots
INPUTS, OUTPUTS = parse_lengths("uniform:32:256"), parse_lengths("uniform:64:256")
MEAN_OUTPUT = 160  # tokens
RAMP = 0.2  # share of a run before which its goodput is not counted
GOOD = 0.9  # of the best goodput
FLAT = 0.03  # share of memory growth, from the first quarter to the end, that counts as none
AT_ONCE = 20.0  # milliseconds
DRAIN = 120.0  # seconds for the queue to drain


def requests(pattern: str, count: int, seed: int) -> Workload:
    return generate(Recipe(count, INPUTS, OUTPUTS, parse_arrivals(pattern)), seed)


def drive(target: BenchTarget, workload: Workload, phrasing: Phrasing, limit: float) -> list[RequestOutcome]:
    """Returns the outcomes of `workload` within `limit` seconds; active requests are aborted then."""
    load = LoadRun(workload, lambda request: phrasing.body(target, workload, request))
    replies: list[RequestOutcome] = []

    async def run() -> None:
        client = LeanClient(target, load.clock)

        async def send(body: bytes, reply: RequestOutcome) -> None:
            replies.append(reply)
            await client.complete(body, reply)

        with contextlib.closing(client), contextlib.suppress(TimeoutError):
            await asyncio.wait_for(load.run(send), limit)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the cores are the server's
        runner.run(run())
    return replies


def goodput(outcomes: Sequence[RequestOutcome], seconds: float) -> float:
    """Returns output tokens per second in the steady part of a run, of requests that are not refused.

    An event may contain several tokens; the mean is taken from completed responses.
    """
    whole = [outcome for outcome in outcomes if outcome.status == COMPLETED]
    events = sum(len(outcome.token_times) for outcome in whole)
    per_event = sum(outcome.num_output for outcome in whole) / events if events else 0.0
    began = RAMP * seconds
    steady = sum(began <= at < seconds for outcome in outcomes for at in outcome.token_times)
    return steady * per_event / (seconds - began)


def closed_loops(target: BenchTarget, phrasing: Phrasing) -> dict[int, float]:
    """Returns goodput by the number of users, each of which sends a request after the last response."""
    found = {}
    for users in USERS:
        outcomes = drive(target, requests(f"closed:{users}", 60 * users, seed=users), phrasing, TRIAL)
        found[users] = goodput(outcomes, TRIAL)
        print(f"    {users} users in a closed loop: {found[users]:,.0f} tokens/s", flush=True)
        time.sleep(1.0)
    return found


def best(before: dict[int, float], after: dict[int, float]) -> float:
    """Returns the best closed loop, each the mean of its two runs, because a shared machine's speed varies."""
    return max((before[users] + after[users]) / 2 for users in USERS)


class MemoryWatch:
    """Memory of all processes at five times of a run, including start and end."""

    def __init__(self, server: Server, seconds: float) -> None:
        self._server = server
        self._readings: list[int] = []
        self._thread = threading.Thread(target=self._read, args=(seconds,), daemon=True)
        self._thread.start()

    def _read(self, seconds: float) -> None:
        began = time.perf_counter()
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            time.sleep(max(0.0, began + share * seconds - time.perf_counter()))
            self._readings.append(self._server.memory())

    def readings(self) -> list[int]:
        self._thread.join()
        return self._readings


def stolen() -> list[int]:
    """Returns the ticks stolen by the host of this machine, and all ticks; zeros where they are not counted."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    except OSError:
        return [0, 1]
    return [ticks[7], sum(ticks)]


def latencies(milliseconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    return {"count": len(ordered), "p50": percentile(ordered, 50), "p99": percentile(ordered, 99),
            "max": max(ordered, default=0.0)}


def fate(outcome: RequestOutcome) -> str:
    """Maps the load generator's outcomes to fates; a broken stream counts as lost."""
    if outcome.status == COMPLETED:
        return ledger.COMPLETED
    if outcome.status == REJECTED:
        return ledger.REFUSED if outcome.error.startswith("503") else ledger.IMPOSSIBLE
    return ledger.FAILED if outcome.error[:3].isdigit() else ledger.LOST


def overload(seconds: float) -> ledger.Row:
    """Runs an open loop at five times the capacity, and drains its queue before accounting."""
    with serving() as server:
        target, vocab_size = resolve(BenchTarget(server.url))
        phrasing = Phrasing(vocab_size)
        before = closed_loops(target, phrasing)
        rate = FACTOR * max(before.values()) / MEAN_OUTPUT
        print(f"    open loop: {rate:.0f} requests/s for {seconds:g} s", flush=True)
        workload = requests(f"poisson:{rate:.2f}", max(2, int(rate * seconds)), seed=1)
        memory = MemoryWatch(server, seconds)
        probe = subprocess.Popen(
            [*module("probe"), server.url, str(server.process.pid), str(seconds)], stdout=subprocess.PIPE, text=True,
            env=module_environment())
        began = stolen()
        outcomes = drive(target, workload, phrasing, seconds + DRAIN)
        taken, ticks = (after - before for after, before in zip(stolen(), began, strict=True))
        probed = json.loads(probe.communicate()[0])
        most = best(before, closed_loops(target, phrasing))
        row = asyncio.run(_account(server, most, seconds, outcomes, probed, memory.readings()))
        row.seen.append(f"the host took {taken / max(1, ticks):.1%} of this machine's processors for others")
        return row


async def _account(server: Server, most: float, seconds: float, outcomes: list[RequestOutcome],
                   probed: dict[str, Any], memory: list[int]) -> ledger.Row:
    async with clients.session() as http:
        await clients.quiet(http, server)
        leaked = await clients.leaked(http, server)
    share = goodput(outcomes, seconds) / most
    offered = sum(outcome.due <= seconds for outcome in outcomes) / seconds * MEAN_OUTPUT / most
    crowd = latencies([1000 * outcome.e2el for outcome in outcomes if fate(outcome) == ledger.REFUSED])
    alone, computing = latencies(probed["refused_ms"]), latencies(probed["computing_ms"])
    late = latencies([1000 * (outcome.sent - outcome.due) for outcome in outcomes])
    why = Counter(outcome.error for outcome in outcomes if fate(outcome) == ledger.LOST)
    return ledger.Row(
        f"{offered:.1f}-fold overload, {seconds:g} s", ledger.tally([*map(fate, outcomes), *probed["fates"]]), leaked,
        {"goodput within 10% of the best": share >= GOOD,
         "memory flat once queue and log are full": ledger.drift(memory[1], memory[-1]) <= FLAT,
         "each refusal costs under 20 ms of computing": 0 < computing["max"] < AT_ONCE,
         "each refusal reaches its client within 20 ms": 0 < alone["max"] < AT_ONCE},
        [f"{len(outcomes) / seconds:.0f} requests/s; goodput {share:.0%} of the best ({most:,.0f} output tokens/s)",
         "memory " + ", ".join(f"{reading / MIB:.0f}" for reading in memory) + " MiB at the start and after each "
         "quarter (a queue that fills holds its requests, and the log its latest steps)",
         f"refusals, p50 / p99 / max: {_written(computing)} of the API process' computing, {_written(alone)} until a "
         f"client of its own has one ({alone['count']:,}), {_written(crowd)} until the load generator has "
         f"({crowd['count']:,})", *(f"lost: {count} × {error}" for error, count in why.most_common())],
        {"best_tokens_per_second": most, "offered": offered, "goodput_share": share,
         "memory_rss": memory,
         "refusal_ms": alone, "refusal_computing_ms": computing, "refusal_ms_load_generator": crowd,
         "load_generator_late_ms": late})


def _written(spread: dict[str, float]) -> str:
    return f"{spread['p50']:.1f} / {spread['p99']:.1f} / {spread['max']:.1f} ms"


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


NUM_IMPOSSIBLE = 200
NUM_POOLED = 64
POOLED_OUTPUT = 192  # tokens
SCARCITY = 20  # demand over pool size
BLOCK = 64  # tokens
F32 = 4  # bytes


# -- never fit ---------------------------------------------------------------------------------------------------


def impossible(seconds: float) -> ledger.Row:
    with serving("--dtype", "float32") as server:
        return asyncio.run(_impossible(server))


def impossible_bodies(rng: random.Random) -> list[tuple[dict[str, Any], str]]:
    """Returns requests, each with a number that its refusal must name."""
    bodies: list[tuple[dict[str, Any], str]] = []
    for number in range(NUM_IMPOSSIBLE):
        if number % 4 == 0:
            size = rng.randint(1024, 20_000)
            bodies.append(({"prompt": [7] * size, "max_tokens": 1}, str(size)))
        elif number % 4 == 1:
            asked = rng.randint(1024, 10**9)
            bodies.append(({"prompt": [7] * 10, "max_tokens": asked}, str(asked)))
        elif number % 4 == 2:
            size = rng.randint(500, 1000)
            bodies.append(({"prompt": [7] * size, "max_tokens": 1025 - size}, str(size)))
        else:
            bodies.append(({"prompt": "x = 1\n" * rng.randint(5_000, 100_000), "max_tokens": 1}, "1024"))
    return bodies


async def _impossible(server: Server) -> ledger.Row:
    bodies = impossible_bodies(random.Random(3))
    async with clients.session() as http, Canary(http, server).singing() as canary:
        answers: list[Answer] = []
        for start in range(0, len(bodies), 10):
            answers += await asyncio.gather(*(ask(http, server, body) for body, _ in bodies[start:start + 10]))
    async with clients.session() as http:
        await clients.quiet(http, server)
        status, _ = await clients.health(http, server)
        leaked = await clients.leaked(http, server)
    told = all("1024" in answer.error and named in answer.error
               for answer, (_, named) in zip(answers, bodies, strict=True))
    slowest = 1000 * max(answer.ended - answer.sent for answer in answers)
    return ledger.Row(
        f"{NUM_IMPOSSIBLE} requests of impossible size", ledger.tally(a.fate for a in [*answers, *canary.answers]),
        leaked,
        {"400 for each": all(answer.status == 400 for answer in answers), "with the numbers": told,
         "the server goes on": status == 200 and canary.unchanged},
        [f"each got 400, with the size and the limit in its message; the slowest, of up to 600 kB, took {slowest:.0f} "
         f"ms; a canary beside them gave the same tokens {len(canary.answers)} times"],
        {"slowest_ms": slowest, "example": answers[0].error, "canary": len(canary.answers)})


# -- pool --------------------------------------------------------------------------------------------------------


def block_bytes() -> int:
    """Returns the bytes of one block of the built-in model, over all layers."""
    model = json.loads((builtin.path() / "config.json").read_text())
    return 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * BLOCK * F32


def pooled_bodies() -> list[dict[str, Any]]:
    rng = random.Random(9)
    return [{"prompt": prompt(rng), "max_tokens": POOLED_OUTPUT, "temperature": 0, "ignore_eos": True}
            for _ in range(NUM_POOLED)]


def small_pool(seconds: float) -> ledger.Row:
    bodies = pooled_bodies()
    demand = sum(-(-(len(body["prompt"]) + POOLED_OUTPUT - 1) // BLOCK) for body in bodies)
    # A small cache implies a short queue; here all requests must wait.
    options = ("--dtype", "float32", "--block-size", str(BLOCK), "--max-num-queued-tokens", "100000")
    with serving(*options) as server:
        plenty, _, _ = asyncio.run(_pooled(server, bodies))
    with serving(*options, "--kv-cache-memory", str(demand // SCARCITY * block_bytes())) as server:
        answers, leaked, metrics = asyncio.run(_pooled(server, bodies))
        num_blocks = server.num_blocks
    same = sum(a.tokens == b.tokens for a, b in zip(answers, plenty, strict=True))
    again, computed = metrics["recomputed_tokens_total"], metrics["iteration_tokens_total_sum"]
    preemptions = metrics["num_preemptions_total"]
    return ledger.Row(
        f"a cache of 1/{SCARCITY} of the demand", ledger.tally(answer.fate for answer in [*plenty, *answers]), leaked,
        {"the same greedy tokens": same == len(bodies), "it was scarce": num_blocks * SCARCITY <= demand,
         "requests were preempted": preemptions > 0},
        [f"{num_blocks} blocks for {len(bodies)} requests at once that need {demand}: {same} of {len(bodies)} gave the "
         "tokens they give with a large cache (greedy, float32)",
         f"{preemptions:,.0f} preemptions, {again:,.0f} tokens computed again, {again / computed:.1%} of all computed"],
        {"num_blocks": num_blocks, "demand_blocks": demand, "same": same, "preemptions": preemptions,
         "recomputed_tokens": again, "computed_tokens": computed})


async def _pooled(server: Server, bodies: list[dict[str, Any]]) -> tuple[list[Answer], int, Metrics]:
    async with clients.session() as http:
        answers = await asyncio.gather(*(ask(http, server, body) for body in bodies))
        metrics = await Metrics.read(http, server)
        await clients.quiet(http, server)
        return answers, await clients.leaked(http, server), metrics


ENGINE_CROWD = 96  # requests at once, for 64 slots
LATER = 20  # requests after the engine has come back
BACK = 60.0  # seconds within which the engine must return
TIMEOUT = 4.0  # --engine-timeout: the shortest there may be
SLACK = 1.5  # seconds by which a watch that polls twice a second may be late on a busy machine
WHOLE_PROMPTS = 63  # that make one long step
STEP_TOKENS = 65536


def killed(seconds: float) -> ledger.Row:
    with serving() as server:
        return asyncio.run(_killed(server))


async def _killed(server: Server) -> ledger.Row:
    async with clients.session() as http, HealthWatch(http, server).watching() as watch:
        inside = await _crowd(http, server)
        os.kill(server.engine_pid, signal.SIGKILL)
        struck = time.perf_counter()
        answers = [await task for task in inside]
        told = max(answer.ended for answer in answers) - struck
        during = [await ask(http, server, {"prompt": [5], "max_tokens": 1}) for _ in range(LATER)]
        down = await watch.until(503, struck, BACK)
        back = await watch.until(200, struck + down, BACK) + down
        later, leaked = await _afterwards(http, server)
    return ledger.Row(
        "kill -9 of the engine process", ledger.tally(a.fate for a in [*answers, *during, *later]), leaked,
        {"each stream ended with an explicit error": _all(answers, ledger.FAILED),
         "/health was 503, then 200": back < BACK, "503 meanwhile": _all(during, ledger.REFUSED),
         "later requests are served": _all(later, ledger.COMPLETED)},
        [f"{len(answers)} requests ended with an error within {1000 * told:.0f} ms; /health 503 after "
         f"{1000 * down:.0f} ms, 200 again after {back:.1f} s; {LATER} requests meanwhile got 503, {LATER} afterwards "
         "were served"],
        {"error": answers[0].error, "ms_until_all_told": 1000 * told, "ms_until_503": 1000 * down,
         "seconds_until_200": back})


def frozen(seconds: float) -> ledger.Row:
    with serving("--engine-timeout", str(TIMEOUT), "--max-num-batched-tokens", str(STEP_TOKENS)) as server:
        return asyncio.run(_frozen(server))


async def _frozen(server: Server) -> ledger.Row:
    async with clients.session() as http, HealthWatch(http, server).watching() as watch:
        busy, oldest, unhealthy = await _busy(http, server, watch)
        inside = await _crowd(http, server)
        os.kill(server.engine_pid, signal.SIGSTOP)
        struck = time.perf_counter()
        down = await watch.until(503, struck, BACK)
        answers = [await task for task in inside]
        told = max(answer.ended for answer in answers) - struck
        back = await watch.until(200, struck + told, BACK) + told
        later, leaked = await _afterwards(http, server)
    states = {body.get("engine") for at, _, body in watch.seen if at >= struck}
    return ledger.Row(
        "a busy engine, then a frozen one", ledger.tally(a.fate for a in [busy, *answers, *later]), leaked,
        {"busy is healthy": not unhealthy and busy.fate == ledger.COMPLETED,
         "the step was long": oldest > TIMEOUT / 2,
         "/health told in time": down <= TIMEOUT / 2 + SLACK and "frozen" in states,
         "each stream ended with an explicit error": _all(answers, ledger.FAILED),
         "given up in time": told <= TIMEOUT + SLACK, "/health was 200 again": back < BACK,
         "later requests are served": _all(later, ledger.COMPLETED)},
        [f"busy for {oldest:.1f} s without a step's end, more than the {TIMEOUT / 2:g} s that make silence suspicious: "
         "/health stayed 200",
         f"SIGSTOP, --engine-timeout {TIMEOUT:g}: /health 503 (frozen) after {down:.1f} s, {len(answers)} requests "
         f"ended with an error after {told:.1f} s, 200 again after {back:.1f} s; {LATER} requests afterwards were "
         "served"],
        {"error": answers[0].error, "longest_step_age": oldest, "seconds_until_503": down,
         "seconds_until_told": told, "seconds_until_200": back})


async def _busy(http: aiohttp.ClientSession, server: Server, watch: HealthWatch) -> tuple[Answer, float, bool]:
    """Returns the answer of one very long step, the longest time without a step, and whether /health was ever bad."""
    rng = random.Random(8)
    await ask(http, server, {"prompt": [5], "max_tokens": 1})
    began = time.perf_counter()
    prompts = [[rng.randrange(100, 4000) for _ in range(1000)] for _ in range(WHOLE_PROMPTS)]
    answer = await ask(http, server, {"prompt": prompts, "max_tokens": 1})
    seen = [(status, body) for at, status, body in watch.seen if at >= began]
    oldest = max((body["last_step_age_s"] for _, body in seen if body.get("engine") == "busy"), default=0.0)
    return answer, oldest, any(status != 200 for status, _ in seen)


async def _crowd(http: aiohttp.ClientSession, server: Server) -> list[asyncio.Task[Answer]]:
    """Starts requests that hold every slot, and some that wait."""
    rng = random.Random(5)
    tasks = [asyncio.create_task(ask(http, server, body)) for body in _long(rng)]
    while (await Metrics.read(http, server))["num_requests_running"] < 60:
        await asyncio.sleep(0.05)
    return tasks


def _long(rng: random.Random) -> list[dict[str, Any]]:
    return [{"prompt": prompt(rng), "max_tokens": 800, "ignore_eos": True} for _ in range(ENGINE_CROWD)]


async def _afterwards(http: aiohttp.ClientSession, server: Server) -> tuple[list[Answer], int]:
    body = {"prompt": "import os", "max_tokens": 32, "ignore_eos": True}
    later = await asyncio.gather(*(ask(http, server, body) for _ in range(LATER)))
    await clients.quiet(http, server)
    return later, await clients.leaked(http, server)


def _all(answers: list[Answer], fate: str) -> bool:
    return bool(answers) and all(answer.fate == fate for answer in answers)


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
