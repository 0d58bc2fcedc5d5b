"""TLS: the server's certificate, those of its clients, and how a connection begins.

    accept ──► counted by Connections ──► handshake ──► Connection.connection_made ──► requests

A connection counts from the moment it is accepted, like one without TLS, so handshakes are bounded in number with the
connections, and shared by clients.  One that does not end within the time of a head is given up.
"""

from __future__ import annotations

import os
import ssl
from asyncio import AbstractEventLoop, CancelledError, current_task
from socket import socket
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from slotwise.server.connection import Connection

MOST = 4096  # connections: OpenSSL and the loop keep up to some hundred kB for each
AT_ONCE = 4  # connections accepted in one pass of the event loop: a handshake with RSA takes 2 ms
SHUTDOWN = 30.0  # seconds in which what is left of a response is sent, and the client takes leave
MAX_PEM = 16 << 20  # bytes of a file


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
            _check(f"--ssl-{option} {path}", path)
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


def _check(what: str, path: str) -> None:
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


class Tls:
    """Begins connections.

    Args:
        context: of `context_of`.
        timeout: seconds that a handshake may take.
    """

    def __init__(self, context: ssl.SSLContext, timeout: float) -> None:
        self._context = context
        self._timeout = timeout

    async def connect(self, loop: AbstractEventLoop, connection: Connection, accepted: socket) -> None:
        """Shake hands on an accepted socket; then the connection serves by itself.

        Raises:
            OSError: the client has left, speaks no TLS, or has no certificate that is needed.
            TimeoutError: it took too long, or gave way to another.
        """
        task = current_task()
        assert task is not None
        connection.begin_handshake(accepted.getpeername()[0], task.cancel)
        try:
            await loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=self._timeout,
                ssl_shutdown_timeout=SHUTDOWN)
        except CancelledError:  # by `Connection.refuse`, or by the acceptor, which ends
            raise TimeoutError("the handshake was given up") from None
        finally:
            connection.end_handshake()
