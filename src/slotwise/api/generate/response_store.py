"""Responses that may be fetched or continued later, in this process' memory.

    begin ──► in progress ──complete──► kept ──► SECONDS later, or when room is needed: forgotten
                   └──────drop (it failed, or its client left)

Bytes and number are bounded.  A tenant finds its own responses only; where room is needed, the oldest response of the
tenant that keeps most is forgotten.  Responses in progress stay, and tenants share the room for them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from slotwise.core.tenant_capacity import TenantCapacity

MAX_BYTES = 64 << 20
MAX_ENTRIES = 4096
MAX_SHARE = 8  # one response and its conversation have at most so large a part of the bytes
SECONDS = 86_400.0  # that a response is kept

Key = tuple[str, str]  # tenant, and id of the response


class StoreFull(Exception):
    """The response cannot be kept.  `is_too_large`: it alone; else too many are in progress."""

    def __init__(self, message: str, *, is_too_large: bool) -> None:
        super().__init__(message)
        self.is_too_large = is_too_large


@dataclass(slots=True)
class StoredResponse:
    """A response, and the conversation up to its end."""

    response: bytes  # JSON
    messages: bytes  # a chat's, as JSON; without instructions
    expires_at: float = float("inf")  # seconds; in progress: never

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """The responses of all tenants.  Times are seconds of one monotonic clock."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES) -> None:
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._largest = max_bytes // MAX_SHARE
        self._entries: dict[Key, StoredResponse] = {}  # the oldest first
        self._bytes: Counter[str] = Counter()  # by tenant
        self._bytes_begun = TenantCapacity("bytes of responses are in progress", max_bytes, includes_reserve=True)
        self._begun = TenantCapacity("responses are in progress", max_entries, includes_reserve=True)

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        """A response of this tenant; None: there is none, or its time is over."""
        self._expire(now)
        return self._entries.get((tenant, response_id))

    def begin(self, tenant: str, response_id: str, begun: StoredResponse, now: float) -> None:
        """Keep a response in progress, in the place of one with the same id.  Raises StoreFull."""
        if begun.size > self._largest:
            raise StoreFull(f"a conversation of {begun.size} bytes is more than the {self._largest} that are stored; "
                            "send store: false", is_too_large=True)
        self._expire(now)
        self.drop(tenant, response_id)
        if objection := self._bytes_begun.objection(tenant, begun.size) or self._begun.objection(tenant, 1):
            raise _full(objection)
        self._make_room(begun.size)
        self._put((tenant, response_id), begun)
        self._count_begun(tenant, begun, 1)

    def complete(self, tenant: str, response_id: str, ended: StoredResponse, now: float) -> None:
        """Keep a response that was in progress, for SECONDS from now; nothing if it was deleted, or is too large."""
        if not self.drop(tenant, response_id) or ended.size > self._largest:
            return
        try:
            self._make_room(ended.size)
        except StoreFull:
            return
        ended.expires_at = now + SECONDS
        self._put((tenant, response_id), ended)

    def drop(self, tenant: str, response_id: str) -> bool:
        """Forget a response.  Returns whether there was one."""
        entry = self._entries.pop((tenant, response_id), None)
        if entry is None:
            return False
        if entry.expires_at == float("inf"):
            self._count_begun(tenant, entry, -1)
        self._bytes[tenant] -= entry.size
        if not self._bytes[tenant]:
            del self._bytes[tenant]
        return True

    def _put(self, key: Key, entry: StoredResponse) -> None:
        self._entries[key] = entry
        self._bytes[key[0]] += entry.size

    def _count_begun(self, tenant: str, entry: StoredResponse, number: int) -> None:
        self._bytes_begun.acquire(tenant, number * entry.size)
        self._begun.acquire(tenant, number)

    def _expire(self, now: float) -> None:
        over = []
        for key, entry in self._entries.items():  # those that are kept are in the order of their ends
            if now < entry.expires_at < float("inf"):
                break
            if entry.expires_at <= now:
                over.append(key)
        for key in over:
            self.drop(*key)

    def _make_room(self, size: int) -> None:
        """Forget as many as needed.  Raises StoreFull: what is in progress leaves too little."""
        if self._fits(size):
            return
        kept: dict[str, deque[Key]] = {}
        held = Counter[str]()
        for key, entry in self._entries.items():
            if entry.expires_at != float("inf"):
                kept.setdefault(key[0], deque()).append(key)
                held[key[0]] += entry.size
        while not self._fits(size):
            if not held:
                raise _full("too many responses are in progress")
            largest = max(held, key=held.__getitem__)
            key = kept[largest].popleft()
            held[largest] -= self._entries[key].size
            self.drop(*key)
            if not kept[largest]:
                del held[largest]

    def _fits(self, size: int) -> bool:
        return self.num_bytes + size <= self._max_bytes and len(self._entries) < self._max_entries


def _full(why: str) -> StoreFull:
    return StoreFull(f"{why}; try again later, or send store: false", is_too_large=False)
