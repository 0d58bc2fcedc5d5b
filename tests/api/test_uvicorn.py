"""What `api/http/connection.py` and `api/http_server.py` assume of uvicorn's internals, on a real connection.

Each failure names the assumption: before uvicorn's range in pyproject.toml is widened, these must hold.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import tomllib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

REQUEST = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /0 HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
OVERRIDDEN = {  # methods that `Connection` overrides, with their parameters
    "connection_made": ["transport"], "connection_lost": ["exc"], "data_received": ["data"], "eof_received": [],
    "pause_writing": [], "resume_writing": [], "on_message_begin": [], "on_headers_complete": [],
    "on_header": ["name", "value"], "on_body": ["body"], "on_message_complete": [], "on_response_complete": [],
    "send_400_response": ["msg"], "_unset_keepalive_if_required": []}
READ = {  # attributes of a connection that has read a request
    "loop": asyncio.AbstractEventLoop, "parser": object, "flow": object, "transport": asyncio.Transport,
    "pipeline": deque, "cycle": RequestResponseCycle, "headers": list, "url": bytes, "scope": dict, "scheme": str,
    "timeout_keep_alive": (int, float)}
OF_A_CYCLE = {"response_started": bool, "response_complete": bool, "more_body": bool, "keep_alive": bool,
              "disconnected": bool, "message_event": asyncio.Event, "scope": dict}
OF_A_SERVER = ("config", "server_state", "servers", "started", "should_exit", "force_exit")


def played(play: Callable[[HttpToolsProtocol, socket.socket, asyncio.Event], Any]) -> None:
    """Plays over a connection of uvicorn's own; the event lets its application answer, or says that the client left."""

    async def whole() -> None:
        may_answer = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.disconnect":
                may_answer.set()
                return
            await may_answer.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        config = uvicorn.Config(app, lifespan="off", access_log=False, log_config=None)
        protocol = HttpToolsProtocol(config=config, server_state=ServerState(), app_state={})
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, theirs)
            await play(protocol, ours, may_answer)
            transport.abort()
            await asyncio.sleep(0)

    asyncio.run(whole())


async def settled() -> None:
    """Until all that is ready has run: no pass of the event loop waits."""
    for _ in range(100):
        await asyncio.sleep(0)


async def sent(ours: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(ours, data)
    await settled()


def test_the_installed_version_is_one_that_was_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (found,) = [one for one in project["dependencies"] if re.match(r"uvicorn\b", one)]
    least, bound = re.findall(r"(\d+)\.(\d+)", found)
    installed = tuple(map(int, uvicorn.__version__.split(".")[:2]))
    assert tuple(map(int, least)) <= installed < tuple(map(int, bound)), f"{uvicorn.__version__} is not within {found}"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_methods_have_the_parameters_that_connections_override(name: str) -> None:
    method = getattr(HttpToolsProtocol, name, None)
    assert method is not None, f"uvicorn's HttpToolsProtocol has no {name}: see api/http/connection.py"
    assert [*inspect.signature(method).parameters][1:] == OVERRIDDEN[name], f"{name} has other parameters"


def test_a_connection_and_its_requests_have_the_attributes_that_are_read() -> None:
    async def play(protocol: HttpToolsProtocol, ours: socket.socket, _: asyncio.Event) -> None:
        await sent(ours, REQUEST % 0)
        for owner, expected in ((protocol, READ), (protocol.cycle, OF_A_CYCLE)):
            for name, kind in expected.items():
                value = getattr(owner, name, None)
                assert isinstance(value, kind), f"{type(owner).__name__}.{name} is a {type(value).__name__}"
        assert protocol.client is None or isinstance(protocol.client[0], str)
        assert {"pause_reading", "resume_reading", "read_paused"} <= set(dir(protocol.flow))

    played(play)


def test_requests_behind_one_in_progress_wait_in_the_pipeline_the_last_one_first() -> None:
    async def play(protocol: HttpToolsProtocol, ours: socket.socket, may_answer: asyncio.Event) -> None:
        await sent(ours, b"".join([REQUEST % number for number in range(3)]))
        assert [cycle.scope["path"] for cycle, _ in protocol.pipeline] == ["/2", "/1"], "pipeline has another order"
        assert protocol.cycle.scope["path"] == "/2", "cycle is not the request read last"
        may_answer.set()
        await settled()
        assert not protocol.pipeline, "the pipeline is not emptied as responses complete"
        assert protocol.cycle.response_complete

    played(play)


def test_a_request_has_more_body_until_all_of_it_was_read() -> None:
    async def play(protocol: HttpToolsProtocol, ours: socket.socket, _: asyncio.Event) -> None:
        await sent(ours, POST)
        assert protocol.cycle.more_body, "a request whose body is to come has no more_body"
        await sent(ours, b"body")
        assert not protocol.cycle.more_body, "a request that was read whole has more_body"

    played(play)


def test_a_response_says_that_its_connection_will_be_closed() -> None:
    async def play(protocol: HttpToolsProtocol, ours: socket.socket, may_answer: asyncio.Event) -> None:
        await sent(ours, REQUEST % 0)
        protocol.cycle.keep_alive = False  # as on a connection of the reserve
        may_answer.set()
        await settled()
        head = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
        assert b"connection: close" in head.lower(), "a response without keep_alive does not say connection: close"

    played(play)


def test_a_lost_connection_wakes_its_request_with_a_disconnect() -> None:
    async def play(protocol: HttpToolsProtocol, ours: socket.socket, has_noticed: asyncio.Event) -> None:
        await sent(ours, POST)
        assert not has_noticed.is_set()
        ours.close()
        await settled()
        assert protocol.cycle.disconnected and has_noticed.is_set(), "a request is not told that its client has left"

    played(play)


def test_a_server_has_what_serving_overrides() -> None:
    server = uvicorn.Server(uvicorn.Config(lambda: None))
    server.servers = []  # set by `startup`, which is overridden
    missing = [name for name in OF_A_SERVER if not hasattr(server, name)]
    assert not missing, f"uvicorn.Server has no {', '.join(missing)}: see server/serve.py"
    assert [*inspect.signature(uvicorn.Server.startup).parameters] == ["self", "sockets"]
    assert hasattr(uvicorn.Server, "capture_signals"), "signals are handled elsewhere"
    assert hasattr(server.config, "http_protocol_class") or not server.config.loaded
