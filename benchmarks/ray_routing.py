"""Routers compared on Ray Serve: four replicas whose steps sleep, so that this machine's cores do not decide.

    trace ─► prompts with synthesised prefixes ─► handle ─► Ray's or this package's request router ─► actor: Sleeping

Scheduler, prefix cache and what replicas tell are a server's own; a step takes what a step-time model that was learned
on a real server says (`slotwise bench steps --event-log LOG`).  Beside each figure stands the simulator's for the same
requests.  For an environment with `ray[serve]`; Ray's routers are used as they are installed.  The prefix-aware one is
imported from where it is written, for its public name in `ray.serve.llm` asks for more packages.

usage: python -m benchmarks.ray_routing LOG --trace CSV --json FILE [--loads shared:2.5 own:2] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import string
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
from benchmarks.routing import GROUPS, SHARED, load_of, served, window, with_prefixes
from benchmarks.sleeping import SleepingServer
from ray import serve
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from slotwise.bench.measures import percentile
from slotwise.bench.results import environment, write_json
from slotwise.core.params import SamplingParams
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add
from slotwise.observe.event_log import read_file
from slotwise.scale.ray_app import MAX_ONGOING, STATS_EVERY
from slotwise.scale.ray_router import ASKED_AT, STATE, RoutingOnRay
from slotwise.scale.upstream import RoutedPrompt, prompt_of
from slotwise.simulate.pace import LearnedPace
from slotwise.simulate.recorded import read_recording
from slotwise.simulate.simulator import Setup, traffic_of
from slotwise.workload.workloads import Workload

REPLICAS = 4
CHARACTERS = 4  # of a token
CACHE_TOKENS = 50_000  # of a replica: less than the prefixes need together
LOADS = ("shared:2.5", "shared:3.5", "own:2", "own:2.5")  # prompts; requests a second and replica
FIRST = 8  # short requests with which routers and replicas begin, not measured
SETTLE = 3.0  # seconds until replicas have told of themselves
ROUTERS: dict[str, tuple[RequestRouterConfig, str]] = {  # with the name of the same rule in the simulator
    "product": (RequestRouterConfig(request_router_class=RoutingOnRay, request_router_kwargs={"router": "product"},
                                    request_routing_stats_period_s=STATS_EVERY), "product"),
    "ray's default": (RequestRouterConfig(), "power-of-two"),
    "ray's prefix-aware": (RequestRouterConfig(request_router_class=PrefixCacheAffinityRouter), "prefix-aware")}


class Call(NamedTuple):
    """A request as a replica gets it."""

    prompt: str  # its text, which Ray's prefix-aware router reads
    command: Add


class Sleeping:
    """A replica."""

    def __init__(self, setup: Setup) -> None:
        self._outputs: dict[str, asyncio.Queue[bool]] = {}
        self._server = SleepingServer(setup, self._told)
        self._loop: asyncio.AbstractEventLoop

    def _told(self, request_id: str, is_end: bool) -> None:
        self._loop.call_soon_threadsafe(self._outputs[request_id].put_nowait, is_end)

    async def forward(self, prompt: RoutedPrompt, call: Call, without: frozenset[str]) -> AsyncIterator[str]:
        """Yields its name with the first output, and nothing more."""
        self._loop = asyncio.get_running_loop()
        outputs = self._outputs[call.command.request_id] = asyncio.Queue()
        self._server.submit(call.command, (prompt.num_bytes, prompt.pieces))
        has_ended = await outputs.get()
        yield serve.get_replica_context().replica_id.unique_id
        while not has_ended:
            has_ended = await outputs.get()
        del self._outputs[call.command.request_id]

    async def record_routing_stats(self) -> dict[str, Any]:
        asked_at = time.time()
        return {STATE: msgspec.json.encode(self._server.state()).decode(), ASKED_AT: asked_at}

    async def lateness(self) -> float:
        return self._server.lateness


# -- the driver --------------------------------------------------------------------------------------------------------


def calls_of(workload: Workload) -> list[tuple[float, RoutedPrompt, Call]]:
    """Returns each request with its seconds of arrival; texts are shared as far as tokens are."""
    found = []
    for request, (at, command) in zip(workload.requests, traffic_of(workload), strict=True):
        assert isinstance(command, Add)
        text = _letters(f"prefix {request.prefix}", request.num_prefix)
        text += _letters(f"own {request.number}", request.num_prompt - request.num_prefix)
        found.append((at, prompt_of(msgspec.json.encode({"prompt": text}), "", {}), Call(text, command)))
    return found


def _letters(seed: str, tokens: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=tokens * CHARACTERS))


async def measured(setup: Setup, workload: Workload, router: str) -> dict[str, Any]:
    """Returns the figures of a workload on fresh replicas behind one of `ROUTERS`."""
    name = f"run-{time.monotonic_ns()}"
    replicas = serve.deployment(
        num_replicas=REPLICAS, max_ongoing_requests=MAX_ONGOING, ray_actor_options={"num_cpus": 0.1},
        request_router_config=ROUTERS[router][0], logging_config={"enable_access_log": False})(Sleeping)
    handle = serve.run(replicas.bind(setup), name=name, route_prefix=None)
    parts = handle.options(stream=True, method_name="forward")
    await _begin(parts)
    loop = asyncio.get_running_loop()
    began, used = loop.time(), time.process_time()
    places, lags = Counter[str](), list[float]()

    async def one(at: float, prompt: RoutedPrompt, call: Call) -> float:
        await asyncio.sleep(began + at - loop.time())
        sent = loop.time()
        lags.append(sent - began - at)
        outputs = parts.remote(prompt, call, frozenset())
        places[await anext(outputs)] += 1
        seconds = loop.time() - sent
        async for _ in outputs:
            pass
        return seconds

    found = await asyncio.gather(*[one(*call) for call in calls_of(workload)])
    lateness = max([await handle.lateness.remote() for _ in range(2 * REPLICAS)])
    serve.delete(name)
    return {"ttft_mean": statistics.fmean(found), "ttft_p50": percentile(found, 50), "ttft_p99": percentile(found, 99),
            "requests": len(found), "by_replica": sorted(places.values()), "lateness": lateness,
            "worst_lag": max(lags), "driver_cpu_share": (time.process_time() - used) / (loop.time() - began)}


async def _begin(parts: DeploymentHandle) -> None:
    """Lets the router, what it starts, and all connections begin, and waits until replicas have told of themselves."""
    for number in range(FIRST):
        text = _letters(f"first {number}", 16)
        command = Add(f"first {number}", RequestSpec([number] * 16, SamplingParams(max_tokens=1)))
        async for _ in parts.remote(prompt_of(msgspec.json.encode({"prompt": text}), "", {}), Call(text, command),
                                    frozenset()):
            pass
    await asyncio.sleep(SETTLE)


def setup_from(log: str) -> Setup:
    """Returns the setup of an event log's engine: its steps take their predicted times, and the cache is smaller."""
    found, _ = read_recording(read_file(log))
    assert isinstance(found.pace, LearnedPace)
    limits = replace(found.limits, num_blocks=CACHE_TOKENS // found.limits.block_size, enable_prefix_caching=True)
    return replace(found, limits=limits, pace=LearnedPace(found.pace.times, found.pace.gap), depth=0)


async def compared(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    setup = setup_from(asked.log)
    for kind, rate in asked.loads:
        for seed in asked.seeds:
            workload = window(asked.trace, asked.requests, rate * REPLICAS, seed, asked.length_scale)
            if kind == "shared":
                workload = with_prefixes(workload, SHARED, GROUPS, seed)
            for router in asked.routers:
                found = await measured(setup, workload, router)
                simulated = served(workload, REPLICAS, ROUTERS[router][1], setup)
                rows.append({"prefixes": kind, "rate": rate, "seed": seed, "router": router, **found,
                             "simulated": {name: simulated[name] for name in ("ttft_mean", "ttft_p50", "ttft_p99")}})
                print(rows[-1], flush=True)
                write_json(asked.json, {
                    "version": 1, "environment": environment() | {"ray": ray.__version__}, "replicas": REPLICAS,
                    "length_scale": asked.length_scale, "shared": SHARED, "groups": GROUPS,
                    "cache_tokens": CACHE_TOKENS, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("log", help="an event log, whose steps say how long one takes")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--json", required=True, help="rows that it has already are kept")
    parser.add_argument("--loads", nargs="+", type=load_of, default=[load_of(one) for one in LOADS],
                        help="shared:RATE or own:RATE, prompts' prefixes and requests a second and replica")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--routers", nargs="+", choices=tuple(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--length-scale", type=float, default=0.25)
    asked = parser.parse_args()
    rows = json.loads(Path(asked.json).read_text())["rows"] if Path(asked.json).exists() else []
    ray.init(num_cpus=REPLICAS, include_dashboard=False, logging_level="warning")
    serve.start(proxy_location="Disabled")
    try:
        asyncio.run(compared(asked, rows))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
