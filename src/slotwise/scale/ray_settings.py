"""What the application on Ray Serve is built with, from a config file or `serve run slotwise.scale:app NAME=VALUE`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from slotwise.neutral import nearest
from slotwise.routing.routers import ROUTERS


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
