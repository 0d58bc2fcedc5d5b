"""How many connections there may be, so that silent ones shut no one out and the listener never runs out of files.

    ├────────── open to all, clients share it (engine.room) ──────────┤─ reserve ─┤── own files, backlog ──┤
    0                                                                                         file limit

A connection beyond its client's share gets a place of the reserve, where only the routes of `ALWAYS` are answered, soon
or not at all.  Beyond the reserve the connection there that has sent nothing for longest is closed for the next.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from ipaddress import IPv6Address, ip_address
from typing import Protocol

from slotwise.engine.tenant_capacity import TenantCapacity

ALWAYS = ("/health", "/ping", "/metrics")  # paths that are answered on connections of the reserve
MOST = 16_384  # connections, however many files there may be: some hundred MB
OWN_FILES = 48  # that the process may open later: an engine's sockets and pipes, logs, collectors
RESERVE = 64  # at most, and an eighth of all
RESERVE_TIMEOUT = 2.0  # seconds that a connection of the reserve has for its request's head
BACKLOG = 2048  # connections not yet accepted, and at most an eighth of the file limit: they are accepted all at once
TOLD_EVERY = 60.0  # seconds

logger = logging.getLogger(__name__)


class Timed(Protocol):
    """A connection."""

    deadline: float  # of the loop's clock: when it is closed if it does not go on; inf: never

    def refuse(self) -> None: ...
    def time_out(self) -> None: ...


class Connections:
    """
    Args:
        most: connections, the reserve included.
    """

    def __init__(self, most: int) -> None:
        reserve = min(RESERVE, most // 8)
        self._open, self._most_reserved = most - reserve, reserve
        self._room = TenantCapacity("connections are open")
        self._clients: dict[Timed, str] = {}
        self._reserved: dict[Timed, None] = {}  # in order of arrival
        self._told = -TOLD_EVERY

    def enter(self, connection: Timed, address: str) -> bool:
        """Whether it has a place of its own; else it is one of the reserve, or refused at once."""
        client = client_of(address)
        if not (objection := self._room.objection(client, 1, self._open)):
            self._room.take(client, 1)
            self._clients[connection] = client
            return True
        self._tell(objection)
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
            self._room.give(client, 1)

    def expire(self, now: float) -> None:
        """Close those that are late."""
        for connection in [one for one in (*self._clients, *self._reserved) if one.deadline < now]:
            connection.time_out()

    def _tell(self, objection: str) -> None:
        if (now := time.monotonic()) > self._told + TOLD_EVERY:
            self._told = now
            logger.warning("too many connections: %s; only %s are answered on further ones", objection,
                           ", ".join(ALWAYS))


def client_of(address: str) -> str:
    """What counts as one client: an address, of IPv6 the network of 64 bits that one client has."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return parsed.packed[:8].hex()
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; what it is then."""
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
    """Connections that leave room for the files of this process, and for what is accepted at once."""
    open_now = len(os.listdir("/dev/fd"))
    return max(16, min(MOST, file_limit - open_now - OWN_FILES - backlog_within(file_limit)))
