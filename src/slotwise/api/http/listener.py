"""From a listening socket to connections: how many there may be, how they are accepted, and how TLS begins on them.

    accept, a few in a pass ──► counted by Connections ──► [TLS handshake] ──► Connection.connection_made ──► requests

    ├─────── open to all, shared by TenantCapacity ───────────────────┤─ reserve ─┤── own files, backlog ──┤
    0                                                                                         file limit

A connection beyond its client's share goes to the reserve, where only the routes of `ALWAYS` are answered, quickly
or not at all.  When the reserve is full, the connection in it that has sent nothing for longest is closed.

The event loop's own server accepts all that wait in one pass: a thousand clients that connect at once would stall every
stream for as long as it takes to set up a thousand connections.  Here the rest waits in the kernel's backlog while the
loop serves those that are open.

With TLS a connection counts from the moment it is accepted, so handshakes are bounded in number with the connections.
A handshake that does not end within the time of a head is given up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address, ip_address
from typing import NoReturn, Protocol, cast

from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.errors import ThrottledWarning

ALWAYS = ("/health", "/ping", "/metrics")  # paths answered on connections of the reserve
MOST = 16_384  # connections, whatever the file limit: some hundred MB
OWN_FILES = 48  # files the process may open later: an engine's sockets and pipes, logs, collectors
RESERVE = 64  # at most, and at most an eighth of all
RESERVE_TIMEOUT = 2.0  # seconds for the head of a request in the reserve
BACKLOG = 2048  # connections not yet accepted, at most an eighth of the file limit

logger = logging.getLogger(__name__)
AT_ONCE = 16  # connections accepted in one pass: some 6 ms
RETRY_AFTER = 1.0  # seconds without accepting after the process has run out of files or memory
GRACE = 1.0  # seconds that handshakes in progress have at the end

Connect = Callable[[asyncio.AbstractEventLoop, socket.socket], Awaitable[object]]
MOST_TLS = 4096  # connections: OpenSSL and the loop keep up to some hundred kB for each
HANDSHAKES_AT_ONCE = 4  # connections accepted in one pass of the event loop: a handshake with RSA takes 2 ms
SHUTDOWN = 30.0  # seconds in which what is left of a response is sent, and the client takes leave
MAX_PEM = 16 << 20  # bytes of a file


# -- the number of connections -----------------------------------------------------------------------------------------


class TimedConnection(Protocol):
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
        self._clients: dict[TimedConnection, str] = {}
        self._reserved: dict[TimedConnection, None] = {}  # in order of arrival
        self._refusals, self._invalid = ThrottledWarning(logger), ThrottledWarning(logger)

    def enter(self, connection: TimedConnection, address: str) -> bool:
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

    def leave(self, connection: TimedConnection) -> None:
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


# -- accepting ---------------------------------------------------------------------------------------------------------


def plain(protocol: Callable[[], asyncio.Protocol]) -> Connect:
    """Returns what begins a connection without TLS.  Args: protocol: makes the protocol of a connection."""
    return lambda loop, accepted: loop.connect_accepted_socket(protocol, accepted)


class Acceptor:
    """Accepts on a listening socket until it is closed.

    Args:
        listener: listens already.
        connect: begins a connection; raises OSError where it has failed.
        at_once: connections accepted in one pass.
    """

    def __init__(self, listener: socket.socket, connect: Connect, at_once: int = AT_ONCE) -> None:
        self._listener, self._connect, self._at_once = listener, connect, at_once
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._failures = ThrottledWarning(logger)
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more.  Open connections are not affected."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait until the connections accepted before are set up.  A handshake that takes long is given up."""
        if self._connecting:
            _, late = await asyncio.wait(self._connecting, timeout=GRACE)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            task = self._loop.create_task(self._begin(accepted))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _pause(self, error: OSError) -> None:
        logger.warning("no connection can be accepted for %g s: %s", RETRY_AFTER, error)
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_AFTER, self._resume)

    async def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._connect(self._loop, accepted)
        except OSError as error:  # the client has left, or the two do not agree on TLS
            accepted.close()
            if not isinstance(error, ConnectionError):
                self._failures.warn(f"a connection could not begin: {error}")


# -- TLS ---------------------------------------------------------------------------------------------------------------


def context_of(ssl_certfile: str, ssl_keyfile: str = "", ssl_ca_certs: str = "") -> ssl.SSLContext:
    """Returns what TLS 1.2 and 1.3 are served with.

    Args:
        ssl_keyfile: of the certificate; "": the same file.
        ssl_ca_certs: of clients, which then must have a certificate; "": none needs one.

    Raises:
        ValueError: a file cannot be read or used, in one line.
    """
    for option, path in (("certfile", ssl_certfile), ("keyfile", ssl_keyfile), ("ca-certs", ssl_ca_certs)):
        if path:
            _check_file(f"--ssl-{option} {path}", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    files = f"--ssl-certfile {ssl_certfile}" + f", --ssl-keyfile {ssl_keyfile}" * bool(ssl_keyfile)
    try:
        context.load_cert_chain(ssl_certfile, ssl_keyfile or None, _refuse_to_prompt)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"{files}: no certificate in PEM with the private key that belongs to it ({error})") from error
    if ssl_ca_certs:
        try:
            context.load_verify_locations(ssl_ca_certs)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"--ssl-ca-certs {ssl_ca_certs}: no certificates in PEM ({error})") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_file(what: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror}") from error
    if size > MAX_PEM:
        raise ValueError(f"{what}: larger than {MAX_PEM} bytes")


def _refuse_to_prompt() -> NoReturn:
    """Takes the place of OpenSSL's prompt for a password, which would wait for a terminal."""
    raise ValueError("--ssl-keyfile: the private key is encrypted: decrypt it with `openssl pkey`")


class HandshakeConnection(Protocol):
    """A connection as `Tls` sees it: `Connection`."""

    def begin_handshake(self, address: str, give_up: Callable[[], object]) -> None: ...
    def end_handshake(self) -> None: ...


class Tls:
    """Begins connections.

    Args:
        context: of `context_of`.
        timeout: seconds that a handshake may take.
    """

    def __init__(self, context: ssl.SSLContext, timeout: float) -> None:
        self._context = context
        self._timeout = timeout

    async def connect(
        self, loop: asyncio.AbstractEventLoop, connection: HandshakeConnection, accepted: socket.socket,
    ) -> None:
        """Shake hands on an accepted socket; then the connection serves by itself.

        Raises:
            OSError: the client has left, speaks no TLS, or has no certificate that is needed.
            TimeoutError: it took too long, or gave way to another.
        """
        task = asyncio.current_task()
        assert task is not None
        connection.begin_handshake(accepted.getpeername()[0], task.cancel)
        try:
            await loop.connect_accepted_socket(
                lambda: cast(asyncio.Protocol, connection), accepted, ssl=self._context,
                ssl_handshake_timeout=self._timeout, ssl_shutdown_timeout=SHUTDOWN)
        except asyncio.CancelledError:  # by `Connection.refuse`, or by the acceptor, which ends
            raise TimeoutError("the handshake was given up") from None
        finally:
            connection.end_handshake()
