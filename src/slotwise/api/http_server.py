"""Runs the application until a signal, then drains it.

SIGTERM, SIGINT, SIGHUP (a terminal that is gone) or an engine that cannot be restarted: new requests get 503 while
running ones may finish within the shutdown timeout; then connections are closed.  A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from slotwise.api.asgi import ADMIN, App
from slotwise.api.http.connection import Connection
from slotwise.api.http.listener import (
    BACKLOG,
    HANDSHAKES_AT_ONCE,
    MOST_TLS,
    Acceptor,
    Connections,
    Tls,
    backlog_within,
    context_of,
    most_within,
    plain,
    raise_file_limit,
)
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.errors import printable

FLUSH = 5  # seconds for responses that are written but not yet sent; then what clients have not read is dropped
ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to listen on, each with one that a client may connect to
LISTENS = "0A"  # a state in /proc/net/tcp
EXPIRE_EVERY = 0.25  # seconds between two checks for connections past their deadline

logger = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Args: tls: None: without."""

    def __init__(self, config: uvicorn.Config, tls: Tls | None) -> None:
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections through `acceptor`, for uvicorn would accept all that wait at once."""
        for listener in sockets or []:
            listener.listen(self.config.backlog)
        self.servers = [cast(asyncio.Server, self._acceptor(listener)) for listener in sockets or []]
        self.started = True

    def _acceptor(self, listener: socket.socket) -> Acceptor:
        factory = cast(Callable[..., Connection], self.config.http_protocol_class)
        protocol = partial(factory, config=self.config, server_state=self.server_state, app_state={})
        if (tls := self._tls) is None:
            return Acceptor(listener, plain(protocol))
        return Acceptor(listener, lambda loop, accepted: tls.connect(loop, protocol(), accepted), HANDSHAKES_AT_ONCE)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled in this module: uvicorn would stop accepting before requests could be refused."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 chooses any free one.

    Raises:
        OSError: the address cannot be bound; one line that names the option.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(_why_not_bound(error, host, port)) from error


def _why_not_bound(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        who = f"process {holder} listens on it" if holder else f"`ss -ltnp sport = :{port}` says which process listens"
        return f"--port {port} is in use: {who}; end it, or choose another port (--port 0: any free one)"
    if error.errno == errno.EACCES:
        return f"--port {port} needs a privilege that this process does not have: choose one from 1024 on"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine (0.0.0.0: all that it has)"
    return f"--host {host}: {str(error.strerror or error).partition(' (while')[0]}"


def holder_of(port: int) -> str:
    """The id and the name of the process that listens on a TCP port; "" if it is another user's, or unknown."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{words[9]}]")
    for opened in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if os.readlink(opened) in sockets:
                return f"{opened.parts[2]} ({Path('/proc', opened.parts[2], 'comm').read_text().strip()})"
    return ""


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Returns the address by which programs on this machine reach the server."""
    host, port = listener.getsockname()[:2]
    host = ALL_ADDRESSES.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def greeting(url: str, settings: ServerSettings, seconds: float) -> str:
    """Returns the first lines of a service that is ready: its page for a browser, its API, its model.

    Args:
        url: as `serve` passes it.
        seconds: since the start.
    """
    others = ", and on this machine's other addresses" if settings.host in ALL_ADDRESSES else ""
    return (f"Ready after {seconds:.1f} s on {url}  (open it in a browser{others})\n"
            f"OpenAI's API: {url}/v1, model {printable(settings.served_model_name)}")


async def serve(app: App[Any], listener: socket.socket, on_listening: Callable[[str], None] = lambda url: None) -> None:
    """Serve on `listener` until a signal; closes it at the end.

    Args:
        on_listening: receives the URL once requests are accepted.
    """
    app.api.clients.browsers.listens_on(listener.getsockname()[0])
    settings, file_limit = app.api.settings, raise_file_limit()
    tls, most = _tls(settings), most_within(file_limit)
    connections = Connections(min(most, MOST_TLS) if tls else most)
    protocol = partial(Connection, among=connections, header_timeout=settings.header_timeout,
                       body_timeout=settings.body_timeout, unread_timeout=settings.unread_timeout)
    config = uvicorn.Config(
        app, http=cast(type[asyncio.Protocol], protocol), ws="none", lifespan="off", log_config=None,
        access_log=False, proxy_headers=False, server_header=False, backlog=backlog_within(file_limit),
        timeout_keep_alive=settings.keep_alive_timeout, timeout_graceful_shutdown=FLUSH + 1)
    server = _Server(config, tls)
    loop = asyncio.get_running_loop()
    stopping: set[asyncio.Task[None]] = set()

    def stop() -> None:
        if stopping:
            server.should_exit = server.force_exit = True
        else:
            stopping.add(loop.create_task(_drain(app, server, connections)))

    stops = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        stops.append(signal.SIGHUP)
    for number in stops:
        loop.add_signal_handler(number, stop)
    scheme = "https" if tls else "http"
    beside = [loop.create_task(_announce(server, settings, lambda: on_listening(url_of(listener, scheme)))),
              loop.create_task(_without_hope(app, stop)), loop.create_task(_expire(connections))]
    try:
        await server.serve([listener])
    finally:
        for number in stops:
            loop.remove_signal_handler(number)
        for task in (*stopping, *beside):
            task.cancel()


async def _drain(app: App[Any], server: uvicorn.Server, connections: Connections) -> None:
    await app.api.drain()
    server.should_exit = True
    await asyncio.sleep(FLUSH)
    connections.abort()


async def _without_hope(app: App[Any], stop: Callable[[], None]) -> None:
    await app.api.hopeless.wait()
    stop()


async def _expire(connections: Connections) -> None:
    while True:
        await asyncio.sleep(EXPIRE_EVERY)
        connections.expire(asyncio.get_running_loop().time())
async def _announce(server: uvicorn.Server, settings: ServerSettings, tell: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    for line in (*settings.notices, *_about_admin(settings)):
        logger.info(line)
    tell()


def _about_admin(settings: ServerSettings) -> list[str]:
    """Returns a line about who may use the routes that change the server."""
    if settings.admin_api_key:
        return []
    clients = "no client" if settings.all_keys else "clients on this machine only"
    return [f"{', '.join(ADMIN[:-1])} and {ADMIN[-1]} answer {clients}: --admin-api-key opens them to one key"]


def _tls(settings: ServerSettings) -> Tls | None:
    if not settings.ssl_certfile:
        return None
    context = context_of(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    return Tls(context, settings.header_timeout)
