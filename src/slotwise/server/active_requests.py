"""Requests in progress, by the names their clients use, to be found and aborted from other connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from slotwise.server.choice import Choice


class ActiveRequest(NamedTuple):
    """A request in progress."""

    tenant: str
    abort: Callable[[], None]
    choices: Sequence[Choice]
    tier: str


class ActiveRequests:
    """Requests in progress by name.  Tracing ids may repeat, so a name may stand for several requests.

    `scope` is the tenant whose requests are searched; "": those of all tenants (see `Keys.scope_of`).
    """

    def __init__(self) -> None:
        self._active: dict[str, list[ActiveRequest]] = {}

    @contextmanager
    def listed(self, names: Sequence[str], request: ActiveRequest) -> Iterator[None]:
        """Register a request under `names` for the duration of the context."""
        keys = list(dict.fromkeys(names))
        for key in keys:
            self._active.setdefault(key, []).append(request)
        try:
            yield
        finally:
            for key in keys:
                self._active[key] = [other for other in self._active[key] if other is not request]
                if not self._active[key]:
                    del self._active[key]

    def named(self, scope: str, name: str) -> tuple[ActiveRequest, ...]:
        """All requests of this name within the scope."""
        return tuple([request for request in self._active.get(name, ()) if scope in ("", request.tenant)])

    def abort(self, scope: str, name: str) -> bool:
        """Abort all requests of this name.  Returns whether there were any."""
        found = self.named(scope, name)
        for request in found:
            request.abort()
        return bool(found)
