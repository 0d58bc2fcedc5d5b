"""The application on Ray Serve: `serve run slotwise.fleet:app`.

    client ─► Ray's proxy ─► Entrance ─► RoutingOnRay ─► EngineReplica ─► slotwise serve, a process of the replica
                             (retries)   (which replica)   (polls it)

A client that leaves cancels the entrance, which cancels the replica's generator, which closes its connection to the
server, which aborts the generation.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from slotwise.api.admin.replica_state import ReplicaState
from slotwise.api.asgi import ADMIN, error_format
from slotwise.api.http.api_errors import ApiError
from slotwise.core.routing.fleet import ReplicaLoad, replicas_for
from slotwise.core.routing.prompt import RoutedRequest
from slotwise.core.routing.replica import Replica
from slotwise.core.routing.routers import ROUTERS
from slotwise.errors import nearest
from slotwise.fleet.ray_router import ASKED_AT, STATE, RoutingOnRay
from slotwise.fleet.replicas import ServeProcess
from slotwise.fleet.upstream import (
    ATTEMPTS,
    ELSEWHERE,
    EVENT_STREAM,
    NOT_FORWARDED,
    NOT_RETURNED,
    Answer,
    Opening,
    RoutedPrompt,
    prompt_of,
    replica_lost,
    whole_events,
)

MAX_BODY = 4 << 20  # bytes, as a server has it
KEPT = ("content-type", "x-request-id")  # headers that are passed on, other than by a front door
MAX_ONGOING = 1024  # requests of a replica: its own admission control bounds them
STATS_EVERY = 0.5  # seconds
START = 900.0  # seconds that a replica has to load its model
LOAD = "load"  # of autoscaling statistics


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Raises ValueError for a value out of range."""

    model: str = ""  # a folder, a GGUF file or a hub id; "": the built-in model
    arguments: str = ""  # options of `slotwise serve`, as on its command line
    router: str = "product"
    min_replicas: int = 1
    max_replicas: int = 4
    num_cpus: float = 1.0  # of each replica, and its compute threads
    num_gpus: float = 0.0  # of each replica
    target_wait_s: float = 2.0  # predicted wait for a first output above which replicas are added
    shutdown_timeout_s: float = 45.0  # that the requests of a replica have to end when it is removed

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ValueError(f"router: must be one of {', '.join(ROUTERS)}, not {self.router!r:.40}")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError("min_replicas: must be at least 1 and at most max_replicas")
        if not (self.num_cpus > 0 and self.num_gpus >= 0 and self.target_wait_s > 0 and self.shutdown_timeout_s >= 0):
            raise ValueError("num_cpus, target_wait_s: must be positive; num_gpus, shutdown_timeout_s: not negative")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RaySettings:
        """Returns the settings in `given`, whose numbers may be texts.

        Raises:
            ValueError: one line that names the setting that is unknown or wrong.
        """
        kinds: dict[str, type] = {one.name: type(one.default) for one in fields(cls)}
        found: dict[str, Any] = {}
        for name, value in given.items():
            if name not in kinds:
                near = nearest(name, kinds)
                raise ValueError(f"{name}: there is no such setting" + f"; did you mean {near}?" * bool(near))
            try:
                found[name] = kinds[name](value)
            except (TypeError, ValueError):
                raise ValueError(f"{name}: must be {kinds[name].__name__}, not {value!r:.40}") from None
        return cls(**found)

    @property
    def command(self) -> list[str]:
        """The arguments of each replica's `slotwise serve`.  Ray places replicas, so threads are bound to no core."""
        cpus = ["--cpu-bind", "none", "--cpu-threads", str(max(1, int(self.num_cpus)))]
        return [*([self.model] if self.model else []), *(["--device", "cuda"] if self.num_gpus else cpus),
                *shlex.split(self.arguments)]


class ResponseHead(NamedTuple):
    """The head of a replica's response; `status` 0: its server does not answer."""

    replica: str
    status: int = 0
    headers: dict[str, str] | None = None

    @property
    def is_stream(self) -> bool:
        return (self.headers or {}).get("content-type", "").startswith(EVENT_STREAM)


class RayCall(NamedTuple):
    """A request as it is sent to a replica."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


# -- a replica ---------------------------------------------------------------------------------------------------------


class EngineReplica:
    """One `slotwise serve`, as a child of Ray's actor."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._process = ServeProcess("", settings.command)
        self._session: aiohttp.ClientSession | None = None
        self._view = Replica("this")
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        """Raises RuntimeError: the server has ended, or is not ready in time."""
        ends = time.monotonic() + START
        while time.monotonic() < ends:
            if self._process.status is not None:
                raise RuntimeError(f"slotwise serve ended with status {self._process.status}: its message is above")
            try:
                with urllib.request.urlopen(self._process.url + "/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        raise RuntimeError(f"the model was not loaded within {START:g} s")

    def __del__(self) -> None:
        if process := getattr(self, "_process", None):
            process.kill()

    async def forward(
        self, prompt: RoutedPrompt, call: RayCall, without: frozenset[str],
    ) -> AsyncIterator[ResponseHead | bytes]:
        """Sends a request to the server; yields the head of the response, then its content.

        Args:
            without: replicas that have failed it, for the router.
        """
        name = serve.get_replica_context().replica_id.to_full_id_str()
        headers = call.headers | ({"x-slotwise-prefix": prompt.header} if prompt.pieces else {})
        try:
            response = await self._http().request(call.method, self._process.url + call.target, data=call.body or None,
                                                  headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError):
            yield ResponseHead(name)
            return
        async with response:
            kept = {name.lower(): value for name, value in response.headers.items()}
            yield ResponseHead(name, response.status, {name: value for name, value in kept.items()
                                               if name in KEPT or name.encode() not in NOT_RETURNED})
            is_stream = response.content_type == EVENT_STREAM
            async for part in whole_events(response.content) if is_stream else response.content.iter_any():
                yield part

    async def check_health(self) -> None:
        """Raises RuntimeError: the server has ended, and Ray is to replace the replica."""
        if self._process.status is not None:
            raise RuntimeError(f"slotwise serve has ended with status {self._process.status}")

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Applies a `user_config`: scheduling settings, as the body of PUT /admin/scheduling."""
        if changes:
            async with self._http().put(self._process.url + "/admin/scheduling", json=dict(changes)) as response:
                if response.status != HTTPStatus.OK:
                    raise ValueError(f"user_config: {(await response.text())[:500]}")

    async def record_routing_stats(self) -> dict[str, Any]:
        asked_at = time.time()
        state = await self._state()
        return {STATE: msgspec.json.encode(state).decode(), ASKED_AT: asked_at}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load of this replica, for `ScaleByWait`."""
        report = (await self._state()).report()
        self._view.update(report, time.time())
        load = ReplicaLoad(self._view.wait(RoutedRequest("")), (report.num_running + report.num_waiting) / report.slots)
        return {"wait": load.wait, "busy": load.busy}

    async def _state(self) -> ReplicaState:
        async with self._http().get(self._process.url + "/replica") as response:
            return msgspec.json.decode(await response.read(), type=ReplicaState)

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0), auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None), skip_auto_headers=("Accept-Encoding", "User-Agent"),
                headers=_authorization())
        return self._session


def _authorization() -> dict[str, str]:
    """The key of this process' own requests; a client's own takes its place."""
    keys = os.environ.get("SLOTWISE_ADMIN_API_KEY") or os.environ.get("SLOTWISE_API_KEY", "").partition(",")[0]
    return {"authorization": f"Bearer {keys.strip()}"} if keys.strip() else {}


# -- the entrance ------------------------------------------------------------------------------------------------------


class Entrance:
    """Reads requests, and sends each to a replica: to another one if that fails before any output, as a front door."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True, method_name="forward")

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        try:
            if path.startswith(ADMIN):
                raise ApiError(HTTPStatus.NOT_FOUND, f"{path} would reach one replica: give all of them "
                               "options (arguments), or a user_config", code="not_supported")
            body = await _body(request)
        except ApiError as error:
            return _answer(error, path)
        headers = {name: value for name, value in request.headers.items() if not name.startswith("sec-fetch-")
                   and (name in KEPT or name.encode("latin-1") not in NOT_FORWARDED)}
        prompt = prompt_of(body, headers.get("authorization", ""), dict(request.headers.raw))
        query = f"?{request.url.query}" if request.url.query else ""
        parts = self._forwarded(prompt, RayCall(request.method, path + query, headers, body), path)
        head: ResponseHead = await anext(parts)
        return StreamingResponse(parts, head.status, head.headers)

    async def _forwarded(self, prompt: RoutedPrompt, call: RayCall, path: str) -> AsyncIterator[Any]:
        """Yields the head of a response, then its content; an error ends a stream whose replica is lost."""
        form, opening, is_begun = error_format(path), Opening(), False
        without: frozenset[str] = frozenset()
        lost = _answer(replica_lost(), path)
        last = ResponseHead("", lost.status_code, dict(lost.headers)), bytes(lost.body)
        for _ in range(ATTEMPTS):
            parts = self._replicas.remote(prompt, call, without)
            try:
                head: ResponseHead = await anext(parts)
                without |= {head.replica}
                if not head.status:
                    continue
                if head.status >= HTTPStatus.BAD_REQUEST:
                    last = head, b"".join([part async for part in parts])
                    if Answer(head.status, [], b"", last[1]).code in ELSEWHERE:
                        continue
                    break
                async for part in parts:
                    if opening.read(part):
                        last = head, part
                        break
                    if not is_begun:
                        is_begun = True
                        yield head
                    yield part
                else:
                    if not is_begun:
                        yield head
                    return
            except (RayError, aiohttp.ClientError, OSError):
                if not opening.is_over:
                    continue
                if not head.is_stream:
                    raise
                yield form.last(replica_lost(), "")
                return
            except (asyncio.CancelledError, GeneratorExit):
                parts.cancel()
                raise
        head, content = last
        if not is_begun:
            yield head
        yield form.events % content if is_begun and not head.is_stream else content


async def _body(request: Request) -> bytes:
    """Raises ApiError: the body is too large."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {MAX_BODY} bytes",
                               code="body_too_large")
    except ClientDisconnect:
        raise asyncio.CancelledError from None
    return bytes(body)


def _answer(error: ApiError, path: str) -> Response:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in error.headers()}
    return Response(error_format(path).body(error, ""), error.status, headers, "application/json")


# -- the application ---------------------------------------------------------------------------------------------------


class ScaleByWait:
    """An autoscaling policy of Ray Serve.  Args: target_wait_s: predicted wait above which replicas are added."""

    def __init__(self, target_wait_s: float) -> None:
        self._target = target_wait_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        waits, busy = metrics.get("wait", {}), metrics.get("busy", {})
        loads = [ReplicaLoad(waits[replica], busy[replica]) for replica in waits if replica in busy]
        wanted = replicas_for(loads, self._target) if loads else context.current_num_replicas
        return max(context.capacity_adjusted_min_replicas, min(context.capacity_adjusted_max_replicas, wanted)), {}


def app(given: Mapping[str, Any]) -> serve.Application:
    """Builds the application.  Args: given: see `ray_settings.RaySettings`.  Raises ValueError for wrong ones."""
    settings = RaySettings.of(given)
    replicas = serve.deployment(
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s, health_check_period_s=2.0,
        request_router_config=RequestRouterConfig(
            request_router_class=RoutingOnRay, request_router_kwargs={"router": settings.router},
            request_routing_stats_period_s=STATS_EVERY),
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas, max_replicas=settings.max_replicas,
            policy=AutoscalingPolicy(policy_function=ScaleByWait,
                                     policy_kwargs={"target_wait_s": settings.target_wait_s})),
    )(EngineReplica).bind(settings)
    return serve.deployment(max_ongoing_requests=8 * MAX_ONGOING)(Entrance).bind(replicas)
