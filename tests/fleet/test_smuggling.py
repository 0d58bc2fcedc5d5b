"""What a replica receives of heads that are meant to be read differently by the front door and by it."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from support.live_server import Server, eventually
from support.scale_door import door_of

from slotwise.api.admin.replica_state import ReplicaState
from slotwise.api.generate.prompt_transfer import HEADER

STATE = ReplicaState("i", 1, True, [], [], True, 4, 512, 0, 0, 0.0, 4.0, None)
KEY = "clé"
EVIL = b"GET /evil HTTP/1.1\r\nHost: x\r\n\r\n"


class Front(NamedTuple):
    door: Server
    heads: list[bytes]  # that the replica has received, as they were
    log: Path  # of the door

    def send(self, line: bytes, headers: bytes = b"", body: bytes = b'{"prompt": "a"}', length: bool = True) -> bytes:
        """The answer of the door, whose connection is closed then."""
        host, port = self.door.url.removeprefix("http://").split(":")
        head = (line + b"\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
                b"Authorization: Bearer " + KEY.encode() + b"\r\n" + headers)
        with socket.create_connection((host, int(port)), 60) as stream:
            stream.sendall(head + b"Content-Length: %d\r\n" % len(body) * length + b"\r\n" + body)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while part := stream.recv(65536):
                    received += part
        return received


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with before(STATE, folder=tmp_path_factory.mktemp("log")) as found:
        yield found


@contextlib.contextmanager
def before(*states: ReplicaState, folder: Path, arguments: tuple[str, ...] = ()) -> Iterator[Front]:
    """A door before replicas which tell these states, and answer everything."""
    heads: list[bytes] = []
    urls: list[str] = []
    with contextlib.ExitStack() as stack:
        for state in states:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=_accept, args=(listener, state, heads), daemon=True).start()
            urls += ["--replica-url", f"http://127.0.0.1:{listener.getsockname()[1]}"]
        log = folder / "door"
        door = stack.enter_context(door_of(*urls, "--api-key", KEY, *arguments, log=log))
        headers = {"Authorization": f"Bearer {KEY}".encode()}
        eventually(lambda: sum(one["is_up"] for one in door.client.get(
            door.url + "/replicas", headers=headers).json()["replicas"]) == len(states))
        yield Front(door, heads, log)


def _accept(listener: socket.socket, state: ReplicaState, heads: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=_answer, args=(listener.accept()[0], state, heads), daemon=True).start()


def _answer(stream: socket.socket, state: ReplicaState, heads: list[bytes]) -> None:
    received = b""
    while part := stream.recv(65536):
        received += part
        while b"\r\n\r\n" in received:
            head, _, rest = received.partition(b"\r\n\r\n")
            found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            if len(rest) < (length := int(found[1]) if found else 0):
                break
            received = rest[length:]
            polls = head.startswith(b"GET /replica?")
            if not polls:
                heads.append(head + b"\r\n\r\n" + rest[:length])
            if b"do_remote_prefill" in rest[:length]:  # an answer would end the request for its prompt
                eventually(lambda: any(b"do_remote_decode" in one for one in heads))
            body = msgspec.json.encode(state) if polls else b"{}"
            stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
                           b"%d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize("target", [
    b"/v1/models/../../admin/scheduling", b"/v1/models/%2e%2e/%2e%2e/evil", b"/v1/models/..%2f..%2fevil",
    b"/v1/models/a%3fb?x=%26y", b"/v1/models//a/./b"])
def test_a_replica_receives_the_path_that_was_checked(front: Front, target: bytes) -> None:
    front.heads.clear()
    front.send(b"GET " + target + b" HTTP/1.1", body=b"")
    assert [head.split(b"\r\n")[0] for head in front.heads] == [b"GET " + target + b" HTTP/1.1"]


@pytest.mark.parametrize(("headers", "body", "length"), [
    (b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n" + EVIL, True), (b"Transfer-Encoding: x\r\n", EVIL, True),
    (b"Content-Length: 3\r\n", EVIL, True), (b"Content-Length: +35\r\n", EVIL, False),
    (b"Content-Length : 3\r\n", EVIL, True), (b"X-A: b\r\n X-B: c\r\n", b"{}", True),
    (b"X-A: b\nX-B: c\r\n", b"{}", True), (b"X-A: b\rX-B: c\r\n", b"{}", True),
    (b"X-A: b\0c\r\n", b"{}", True), (b"Host: evil\r\n", b"{}", True)])
def test_an_ambiguous_head_reaches_no_replica(front: Front, headers: bytes, body: bytes, length: bool) -> None:
    front.heads.clear()
    assert front.send(b"POST /v1/completions HTTP/1.1", headers, body, length).startswith(b"HTTP/1.1 400 ")
    assert front.heads == []


def test_what_only_a_door_may_say_is_dropped_and_keys_arrive_whole(front: Front) -> None:
    front.heads.clear()
    mine = HEADER.encode() + b": of a client\r\n"
    trailer = b"4\r\n{}  \r\n0\r\n" + mine + b"\r\n"
    for headers, body, length in ((mine + b"X-Slotwise-Prefix: 1:2\r\n", b"{}", True),
                                  (b"Transfer-Encoding: chunked\r\n", trailer, False)):
        assert front.send(b"POST /v1/completions HTTP/1.1", headers, body, length).startswith(b"HTTP/1.1 200 ")
    assert len(front.heads) == 2
    for head in front.heads:
        assert b"of a client" not in head and b"1:2" not in head
        assert b"Bearer " + KEY.encode() in head


ROLES = (msgspec.structs.replace(STATE, sends_prompts=True, kv_host="10.0.0.1", kv_port=9000),
         msgspec.structs.replace(STATE, receives_prompts=True))
LONG = b'{"prompt": "%s"}' % (b"a" * 40_000)


def test_prompts_travel_with_the_doors_secret_alone(tmp_path: Path) -> None:
    secret = "0123456789abcdef"
    (tmp_path / "secret").write_text(secret)
    mine = HEADER.encode() + b": of a client\r\n"
    with before(*ROLES, folder=tmp_path, arguments=("--kv-transfer-secret-file", str(tmp_path / "secret"))) as front:
        assert front.send(b"POST /v1/completions HTTP/1.1", mine, LONG).startswith(b"HTTP/1.1 200 ")
        assert len(front.heads) == 2 and all(b"kv_transfer_params" in one for one in front.heads)
        for one in front.heads:
            assert f"{HEADER}: {secret}".encode() in one and b"of a client" not in one
        front.heads.clear()
        named = LONG[:-1] + b', "kv_transfer_params": {"do_remote_decode": true}}'
        front.send(b"POST /v1/completions HTTP/1.1", mine, named)
        (one,) = front.heads  # what a client names is the client's own: the replica refuses it
        assert HEADER.encode() not in one and HEADER.lower().encode() not in one and b"do_remote_decode" in one


def test_a_door_without_a_secret_lets_no_prompt_travel_and_says_so_once(tmp_path: Path) -> None:
    with before(*ROLES, folder=tmp_path) as front:
        for _ in range(2):
            assert front.send(b"POST /v1/completions HTTP/1.1", body=LONG).startswith(b"HTTP/1.1 200 ")
        assert len(front.heads) == 2 and not any(b"kv_transfer_params" in one for one in front.heads)
        assert front.log.read_text().count("SLOTWISE_KV_TRANSFER_SECRET") == 1
