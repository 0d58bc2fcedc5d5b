"""The front door: the state of a router in front of several replicas, and its metrics.

Metrics of all replicas stand under the same address, each sample with its label `replica`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

from slotwise.api.generate.context import Clients
from slotwise.api.generate.request_log import RequestLog
from slotwise.api.http.api_errors import ApiError
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.core.routing.fleet import Fleet, Shed
from slotwise.core.routing.prompt import RoutedRequest
from slotwise.core.routing.replica import Report
from slotwise.core.transfer.kv_transfer_config import BOTH, CONSUMER, HOW, PRODUCER
from slotwise.engine.refusals import ADAPTER_LOADING
from slotwise.errors import printable
from slotwise.fleet.replica_adapters import ReplicaAdapters
from slotwise.fleet.replicas import Replicas
from slotwise.fleet.upstream import RoutedPrompt, end, no_replica

PREFIX = "slotwise:"
FAMILIES = {
    "replicas": ("gauge", "Replicas by state: up, draining, or down."),
    "router_predicted_wait_seconds": ("gauge", "Least predicted seconds to the first output of a short request."),
    "router_requests_total": ("counter", "Requests sent to each replica."),
    "router_rerouted_requests_total": ("counter", "Requests that went elsewhere because their replica failed."),
    "router_shed_requests_total": ("counter", "Requests that no replica was predicted to serve in time."),
    "router_replica_losses_total": ("counter", "Replicas that died, or were given up."),
    "router_prefills_total": ("counter", "Prompts that a replica was sent to compute for another one."),
    "router_failed_prefills_total": ("counter", "Those of them that it did not compute, so the other one did.")}
MAX_REPLICAS = 256
DRAINED = 0.05  # seconds between two looks whether all requests have ended
logger = logging.getLogger(__name__)


# -- metrics -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DoorMetrics:
    routed: Counter[str] = field(default_factory=Counter)  # by replica
    rerouted: int = 0
    shed: int = 0
    prefills: Counter[str] = field(default_factory=Counter)  # by replica
    failed_prefills: int = 0
    lost: Counter[str] = field(default_factory=Counter)  # by replica

    def exposition(self, fleet: Fleet) -> str:
        """Returns the door's metrics in Prometheus' text format."""
        states = Counter("draining" if one.is_draining else "up" if one.is_up else "down" for one in fleet.replicas)
        values: dict[str, list[str]] = {
            "replicas": [f'{{state="{state}"}} {states[state]}' for state in ("up", "draining", "down")],
            "router_predicted_wait_seconds": [f" {fleet.predicted_wait():.6g}"],
            "router_requests_total": _labeled(self.routed),
            "router_rerouted_requests_total": [f" {self.rerouted}"],
            "router_shed_requests_total": [f" {self.shed}"],
            "router_replica_losses_total": _labeled(self.lost),
            "router_prefills_total": _labeled(self.prefills),
            "router_failed_prefills_total": [f" {self.failed_prefills}"]}
        lines = []
        for name, (kind, meaning) in FAMILIES.items():
            lines += [f"# HELP {PREFIX}{name} {meaning}", f"# TYPE {PREFIX}{name} {kind}"]
            lines += [f"{PREFIX}{name}{value}" for value in values[name]]
        return "\n".join(lines) + "\n"


def _labeled(counts: Mapping[str, int]) -> list[str]:
    return [f'{{replica="{name}"}} {count}' for name, count in sorted(counts.items())]


def merged(expositions: Iterable[tuple[str, str]]) -> str:
    """Returns the metrics of replicas, (name, exposition) each, as one exposition whose samples have their names."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for name, exposition in expositions:
        family: tuple[list[str], list[str]] = ([], [])
        for line in exposition.splitlines():
            if line.startswith("#"):
                _, word, about = line.split(" ", 2)
                family = families.setdefault(about.split(" ", 1)[0], ([], []))
                if not any(known.startswith(f"# {word} ") for known in family[0]):
                    family[0].append(line)
            elif line:
                family[1].append(_with_label(line, name))
    return "".join(f"{line}\n" for comments, samples in families.values() for line in (*comments, *samples))


def _with_label(sample: str, replica: str) -> str:
    """A sample with the label `replica` put first."""
    series, _, value = sample.rpartition(" ")
    name, brace, labels = series.partition("{")
    rest = f",{labels}" if brace else "}"
    return f'{name}{{replica="{replica}"{rest} {value}'


# -- the door ----------------------------------------------------------------------------------------------------------


class PrefillQueue:
    """The prompts that each prefill replica was sent and has not computed, the oldest first."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, dict[str, asyncio.Event]] = defaultdict(dict)

    def join(self, name: str, request_id: str) -> asyncio.Event:
        """A prompt is sent.  Returns what is set when it is the oldest, or is computed."""
        turns = self._turns[name]
        turns[request_id] = turn = asyncio.Event()
        if len(turns) == 1:
            turn.set()
        return turn

    def leave(self, name: str, request_id: str) -> None:
        """A prompt is computed, or is no longer wanted."""
        turns = self._turns[name]
        turns.pop(request_id).set()
        if turns:
            next(iter(turns.values())).set()


class Door:
    """Args: settings: of the service in front; replicas have their own."""

    def __init__(self, settings: ServerSettings, fleet: Fleet) -> None:
        self.settings, self.fleet = settings, fleet
        self.clients = Clients(settings)
        self.request_log = RequestLog(settings)
        self.metrics = DoorMetrics()
        self.adapters = ReplicaAdapters(fleet)
        self.num_exchanges = 0
        self.replicas: Replicas  # set before anything is served
        self.is_draining = False
        self.prompts = PrefillQueue()
        self.subscriptions: set[asyncio.Timeout] = set()  # to events of replicas, which have no end of their own
        self.is_fixed = False  # the number of replicas stays as it is
        self._has_warned = False
        self._ids = itertools.count()
        self._secret = blake2b("\0".join(sorted({*settings.all_keys, settings.admin_api_key})).encode()).digest()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def hopeless(self) -> asyncio.Event:
        """Set when no replica can be started."""
        return self.replicas.hopeless

    def request_of(self, prompt: RoutedPrompt, request_id: str) -> RoutedRequest:
        """What the router knows of a request."""
        told = [one.report.piece_tokens for one in self.fleet.replicas if one.report.piece_tokens]
        return prompt.request(request_id, sum(told) / len(told) if told else 0.0,
                              self.fleet.adapters | self.adapters.wanted)

    @property
    def may_transfer(self) -> bool:
        """Whether prompts may travel between replicas; warns once where only the secret is missing."""
        if not self.settings.kv_transfer_secret and not self._has_warned:
            self._has_warned = True
            logger.warning("replicas have roles, and this router no transfer secret, so each computes its own prompts: "
                           "%s", HOW)
        return bool(self.settings.kv_transfer_secret)

    def next_id(self) -> str:
        return str(next(self._ids))

    def salt(self, headers: Mapping[bytes, bytes]) -> str:
        """What the prompts of one key begin with: the same at every door with the same keys; "" without keys."""
        if not self.clients.keys.needed:
            return ""
        given = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        return blake2b(given.rpartition(b" ")[2], key=self._secret, digest_size=16).hexdigest()

    def refused(self, kind: str) -> None:
        self.metrics.shed += kind == "shed"

    def shed(self, shed: Shed, adapter: str = "") -> ApiError:
        """The error of a request that no replica serves in time, which is counted."""
        if not shed.wait and adapter and self.fleet.usable():
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"no replica has the adapter {printable(adapter)!r} now; "
                            "try again later", "model", ADAPTER_LOADING)
        if not shed.wait:
            return no_replica()
        self.refused("shed")
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "every replica is busy: the first output is predicted after "
                        f"{shed.wait:.0f} s", code="queue_full", retry_after=shed.retry_after)

    def check_open(self) -> None:
        """Raises ApiError while the door is being closed."""
        if self.is_draining:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down", code="draining")

    async def drain(self) -> None:
        """Refuses new requests, waits for unfinished ones until the shutdown timeout, and ends streams of events."""
        self.is_draining = True
        ends = asyncio.get_running_loop().time() + self.settings.shutdown_timeout
        while self.num_unfinished and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(DRAINED)
        for scope in list(self.subscriptions):
            end(scope)

    @property
    def num_unfinished(self) -> int:
        return sum(one.num_sent for one in self.fleet.replicas)

    def resize(self, number: int) -> None:
        """Starts replicas, or drains the last ones, so that there are `number`."""
        names = self.replicas.names
        for name in names[number:]:
            task = asyncio.create_task(self.replicas.leave(name, self.settings.shutdown_timeout))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        used = {one.name for one in self.fleet.replicas}
        unused = (str(index) for index in itertools.count() if str(index) not in used)
        for _ in range(number - len(names)):
            self.replicas.add(next(unused))

    def described(self) -> list[dict[str, Any]]:
        """All replicas, for GET /replicas."""
        return [{
            "name": one.name, "url": self.replicas.url_of(one.name), "is_up": one.is_up,
            "is_draining": one.is_draining, "role": _role(one.report), "num_sent": one.num_sent,
            "num_running": one.report.num_running,
            "num_waiting": one.report.num_waiting, "num_cached_pieces": one.num_pieces,
            "adapters": sorted(one.adapters), "refused_adapters": self.adapters.refused(one.name),
            "prefill_tokens_per_second": round(one.report.prefill_rate, 1)} for one in self.fleet.replicas]


def _role(report: Report) -> str:
    """What a replica does for others, in vLLM's words; "" for one that works alone."""
    roles = {(True, False): PRODUCER, (False, True): CONSUMER, (True, True): BOTH}
    return roles.get((report.sends_prompts, report.receives_prompts), "")
