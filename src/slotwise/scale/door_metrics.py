"""Metrics of the front door, and of all replicas under the same address, each with its label `replica`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slotwise.routing.fleet import Fleet

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
            "router_requests_total": _labelled(self.routed),
            "router_rerouted_requests_total": [f" {self.rerouted}"],
            "router_shed_requests_total": [f" {self.shed}"],
            "router_replica_losses_total": _labelled(self.lost),
            "router_prefills_total": _labelled(self.prefills),
            "router_failed_prefills_total": [f" {self.failed_prefills}"]}
        lines = []
        for name, (kind, meaning) in FAMILIES.items():
            lines += [f"# HELP {PREFIX}{name} {meaning}", f"# TYPE {PREFIX}{name} {kind}"]
            lines += [f"{PREFIX}{name}{value}" for value in values[name]]
        return "\n".join(lines) + "\n"


def _labelled(counts: Mapping[str, int]) -> list[str]:
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
