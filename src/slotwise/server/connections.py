"""Bounds connections, so that idle ones shut no client out and the listener never runs out of files.

    ├─────── open to all, shared by TenantCapacity ───────────────────┤─ reserve ─┤── own files, backlog ──┤
    0                                                                                         file limit

A connection beyond its client's share goes to the reserve, where only the routes of `ALWAYS` are answered, quickly
or not at all.  When the reserve is full, the connection in it that has sent nothing for longest is closed.
"""

from __future__ import annotations

import logging
import os
import resource
from ipaddress import IPv6Address, ip_address
from typing import Protocol

from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.throttled_warning import ThrottledWarning

ALWAYS = ("/health", "/ping", "/metrics")  # paths answered on connections of the reserve
MOST = 16_384  # connections, whatever the file limit: some hundred MB
OWN_FILES = 48  # files the process may open later: an engine's sockets and pipes, logs, collectors
RESERVE = 64  # at most, and at most an eighth of all
RESERVE_TIMEOUT = 2.0  # seconds for the head of a request in the reserve
BACKLOG = 2048  # connections not yet accepted, at most an eighth of the file limit

logger = logging.getLogger(__name__)


class Timed(Protocol):
    """A connection as `Connections` sees it."""

    deadline: float  # of the loop's clock: when it is closed without progress; inf: never
    unread_deadline: float  # when it is closed if what was written is not read; inf: never

    def refuse(self) -> None: ...
    def time_out(self, now: float) -> None: ...


class Connections:
    """All open connections.  Args: most: connections, the reserve included."""

    def __init__(self, most: int) -> None:
        reserve = min(RESERVE, most // 8)
        self._most_reserved = reserve
        self._capacity = TenantCapacity("connections are open", most - reserve, includes_reserve=True)
        self._clients: dict[Timed, str] = {}
        self._reserved: dict[Timed, None] = {}  # in order of arrival
        self._refusals, self._invalid = ThrottledWarning(logger), ThrottledWarning(logger)

    def enter(self, connection: Timed, address: str) -> bool:
        """Admit a connection.  False: it is in the reserve, or was refused at once."""
        client = client_of(address)
        if not (objection := self._capacity.objection(client, 1)):
            self._capacity.acquire(client, 1)
            self._clients[connection] = client
            return True
        self._refusals.warn(f"too many connections: {objection}; only {', '.join(ALWAYS)} are answered on further ones")
        if len(self._reserved) >= self._most_reserved:
            silent = next((one for one in self._reserved if one.deadline < float("inf")), connection)
            self._reserved.pop(silent, None)
            silent.refuse()
            if silent is connection:
                return False
        self._reserved[connection] = None
        return False

    def leave(self, connection: Timed) -> None:
        self._reserved.pop(connection, None)
        if (client := self._clients.pop(connection, None)) is not None:
            self._capacity.release(client, 1)

    def expire(self, now: float) -> None:
        """Time out connections with a deadline before `now`."""
        late = [one for one in (*self._clients, *self._reserved) if min(one.deadline, one.unread_deadline) < now]
        for connection in late:
            connection.time_out(now)

    def abort(self) -> None:
        """Close all connections at once; written but unsent bytes are dropped."""
        for connection in (*self._clients, *self._reserved):
            connection.refuse()

    def malformed(self, message: str) -> None:
        """Counts a request that is not HTTP."""
        self._invalid.warn(message)


def client_of(address: str) -> str:
    """The key that counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return parsed.packed[:8].hex()
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one.  Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # a kernel with a lower limit of its own
            logger.warning("at most %d files may be open: %s", soft, error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else soft


def backlog_within(file_limit: int) -> int:
    return max(1, min(BACKLOG, file_limit // 8))


def most_within(file_limit: int) -> int:
    """Connections that leave files for this process, and as many as the backlog for those being set up or closed."""
    try:
        open_now = len(os.listdir("/dev/fd"))
    except OSError:  # Linux without /proc, to which it is a link
        open_now = OWN_FILES
    return max(16, min(MOST, file_limit - open_now - OWN_FILES - backlog_within(file_limit)))
