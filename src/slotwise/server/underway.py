"""The requests under way, by the names their clients know, so that they can be found and aborted from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from slotwise.server.choice import Choice
from slotwise.server.errors import bad_request, from_decoding

MAX_ABORTS = 4096  # requests named at once


class AbortRequest(msgspec.Struct, kw_only=True):
    """Either one name or several: of `X-Request-Id`, of `request_id`, or the `id` of a response."""

    request_id: str | None = None
    request_ids: list[str] | None = None

    @classmethod
    def decode(cls, body: bytes) -> AbortRequest:
        """Raises ApiError for a body that names nobody, or too many."""
        try:
            request = msgspec.json.decode(body, type=cls)
        except (ValueError, RecursionError) as error:
            raise from_decoding(error, body) from error
        if (request.request_id is None) == (request.request_ids is None):
            raise bad_request("give either request_id or request_ids", "request_ids")
        if len(request.names) > MAX_ABORTS:
            raise bad_request(f"request_ids: at most {MAX_ABORTS} at once", "request_ids")
        return request

    @property
    def names(self) -> list[str]:
        return [self.request_id] if self.request_id is not None else self.request_ids or []


class Life(NamedTuple):
    """A request under way."""

    abort: Callable[[], None]
    choices: Sequence[Choice]
    tier: str


class Underway:
    """Ids for tracing may repeat, so a name may be several requests'.  Tenants do not see each other's."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, str], list[Life]] = {}

    @contextmanager
    def listed(self, tenant: str, names: Sequence[str], life: Life) -> Iterator[None]:
        """A request, known by `names` for as long as it runs."""
        keys = [(tenant, name) for name in dict.fromkeys(names)]
        for key in keys:
            self._lives.setdefault(key, []).append(life)
        try:
            yield
        finally:
            for key in keys:
                self._lives[key] = [other for other in self._lives[key] if other is not life]
                if not self._lives[key]:
                    del self._lives[key]

    def named(self, tenant: str, name: str) -> tuple[Life, ...]:
        """All who have this name."""
        return tuple(self._lives.get((tenant, name), ()))

    def abort(self, tenant: str, name: str) -> bool:
        """End whoever has this name: whether there was anyone."""
        found = self.named(tenant, name)
        for life in found:
            life.abort()
        return bool(found)
