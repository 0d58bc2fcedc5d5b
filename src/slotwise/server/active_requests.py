"""Requests in progress, by the names their clients use, to be found and aborted from other connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from slotwise.server import body_precheck
from slotwise.server.choice import Choice
from slotwise.server.errors import bad_request, from_decoding


class AbortRequest(msgspec.Struct, kw_only=True):
    """One name or several: an `X-Request-Id`, a `request_id`, or the `id` of a response."""

    request_id: str | None = None
    request_ids: list[str] | None = None

    @classmethod
    def decode(cls, body: bytes) -> AbortRequest:
        """Parse the body of an abort.  Raises ApiError for a body with no name, or with too many."""
        try:
            whole = body_precheck.trimmed(cls, body) if len(body) > body_precheck.LARGE else body
            request = msgspec.json.decode(whole, type=cls)
        except (ValueError, RecursionError) as error:
            raise from_decoding(error, body) from error
        if (request.request_id is None) == (request.request_ids is None):
            raise bad_request("give either request_id or request_ids", "request_ids")
        if len(request.names) > body_precheck.MAX_ABORTS:
            raise bad_request(f"request_ids: at most {body_precheck.MAX_ABORTS} at once", "request_ids")
        return request

    @property
    def names(self) -> list[str]:
        return [self.request_id] if self.request_id is not None else self.request_ids or []


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
