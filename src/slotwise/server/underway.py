"""The requests under way, by the names their clients know, so that they can be found and aborted from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from slotwise.server import outline
from slotwise.server.choice import Choice
from slotwise.server.errors import bad_request, from_decoding


class AbortRequest(msgspec.Struct, kw_only=True):
    """Either one name or several: of `X-Request-Id`, of `request_id`, or the `id` of a response."""

    request_id: str | None = None
    request_ids: list[str] | None = None

    @classmethod
    def decode(cls, body: bytes) -> AbortRequest:
        """Raises ApiError for a body that names nobody, or too many."""
        try:
            whole = outline.trimmed(cls, body) if len(body) > outline.LARGE else body
            request = msgspec.json.decode(whole, type=cls)
        except (ValueError, RecursionError) as error:
            raise from_decoding(error, body) from error
        if (request.request_id is None) == (request.request_ids is None):
            raise bad_request("give either request_id or request_ids", "request_ids")
        if len(request.names) > outline.MAX_ABORTS:
            raise bad_request(f"request_ids: at most {outline.MAX_ABORTS} at once", "request_ids")
        return request

    @property
    def names(self) -> list[str]:
        return [self.request_id] if self.request_id is not None else self.request_ids or []


class Life(NamedTuple):
    """A request under way."""

    tenant: str
    abort: Callable[[], None]
    choices: Sequence[Choice]
    tier: str


class Underway:
    """Ids for tracing may repeat, so a name may be several requests'.

    `scope` is the tenant whose requests are looked for; "": those of all (see `Keys.scope_of`).
    """

    def __init__(self) -> None:
        self._lives: dict[str, list[Life]] = {}

    @contextmanager
    def listed(self, names: Sequence[str], life: Life) -> Iterator[None]:
        """A request, known by `names` for as long as it runs."""
        keys = list(dict.fromkeys(names))
        for key in keys:
            self._lives.setdefault(key, []).append(life)
        try:
            yield
        finally:
            for key in keys:
                self._lives[key] = [other for other in self._lives[key] if other is not life]
                if not self._lives[key]:
                    del self._lives[key]

    def named(self, scope: str, name: str) -> tuple[Life, ...]:
        """All requests of this name."""
        return tuple([life for life in self._lives.get(name, ()) if scope in ("", life.tenant)])

    def abort(self, scope: str, name: str) -> bool:
        """End all requests of this name: whether there were any."""
        found = self.named(scope, name)
        for life in found:
            life.abort()
        return bool(found)
