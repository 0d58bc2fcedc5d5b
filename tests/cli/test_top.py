"""`slotwise top` against a server that is none of ours."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from slotwise.cli import main


@pytest.fixture
def endless() -> Iterator[str]:
    """A server whose first line of events has no end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_send_without_end, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)


def _send_without_end(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        connection.recv(65_536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n")
        for _ in range(100):
            connection.sendall(b"a" * (1 << 20))


def test_a_line_without_end_is_one_line(endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", endless, "--once"]) == 1
    assert capsys.readouterr() == ("", f"slotwise top: {endless}/events sends a line of more than 16 MB: "
                                       "it is no slotwise server\n")
