"""Runs the front door and its replicas until a signal."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop

from slotwise.api.asgi import App
from slotwise.api.http_server import greeting, listen, serve
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.core.routing.fleet import Fleet
from slotwise.core.routing.routers import ROUTERS
from slotwise.fleet.door import Door
from slotwise.fleet.door_routes import ROUTES
from slotwise.fleet.replicas import Addresses, ReplicaProcess, Replicas
from slotwise.observe import lines

ENDING = 10.0  # seconds that replicas have to end, beyond the shutdown timeout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scaling:
    """What stands behind a front door: processes that it starts, or replicas at addresses."""

    launch: Callable[[str], ReplicaProcess] | None = None
    number: int = 0  # processes at the start
    urls: Sequence[str] = ()  # of replicas that others start
    router: str = "product"
    max_wait: float = 60.0  # predicted seconds to the first output beyond which requests are shed
    seed: int = 0
    num_prefill: int = 0  # of the processes, the first ones, which compute prompts for the others


def run_scale(settings: ServerSettings, scaling: Scaling) -> int:
    """Serves until a signal arrives; returns the exit status.

    Raises:
        OSError: the address cannot be bound.
        RuntimeError: no replica could be started; one line.
    """
    lines.set_up(settings.log_format)
    with listen(settings.host, settings.port) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, listener, scaling))


async def _run(settings: ServerSettings, listener: socket.socket, scaling: Scaling) -> int:
    began = time.monotonic()
    door = Door(settings, Fleet(ROUTERS[scaling.router](scaling.seed), scaling.max_wait))
    key = settings.admin_api_key or next(iter(settings.all_keys), "")
    headers = {"authorization": f"Bearer {key}"} if key else {}

    def lost(name: str) -> None:
        door.metrics.lost[name] += 1

    door.replicas = Replicas(door.fleet, door.adapters, scaling.launch, headers, lost)
    addresses = Addresses(scaling.urls, door.replicas)
    try:
        door.resize(scaling.number)
        door.is_fixed = scaling.num_prefill > 0
        addresses.begin()
        if scaling.launch is not None:
            await _first_ready(door)
        await serve(App(door, ROUTES), listener, lambda url: _greet(url, settings, scaling, time.monotonic() - began))
    finally:
        addresses.end()
        await door.replicas.close(ENDING)
    return 1 if door.hopeless.is_set() else 0


async def _first_ready(door: Door) -> None:
    """Waits until every replica serves, or one cannot.  Raises RuntimeError: one ended before any was ready."""
    while not all(one.is_up for one in door.fleet.replicas) and not door.replicas.trouble:
        door.replicas.changed.clear()
        await door.replicas.changed.wait()
    if not door.fleet.usable():
        raise RuntimeError(f"{door.replicas.trouble}: its message is above")


def _greet(url: str, settings: ServerSettings, scaling: Scaling, seconds: float) -> None:
    number = scaling.number or len(scaling.urls)
    what = f"{number} replicas" if scaling.number else f"replicas at {number} addresses"
    if scaling.num_prefill:
        what = f"{scaling.num_prefill} prefill and {number - scaling.num_prefill} decode replicas"
    if settings.log_format == lines.JSON:
        lines.tell(logger, f"ready on {url}", {"url": url, "model": settings.served_model_name, "replicas": number,
                                               "router": scaling.router, "seconds": round(seconds, 1)})
        return
    print(f"{greeting(url, settings, seconds)}\n{what} behind one address, router {scaling.router}", flush=True)
