"""Every command that reads an event log refuses one of another format, by name, in one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.recorded import Recorded

from slotwise.cli import main
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.observe.event_log import FORMAT, Gap, encode_lines, line_of
from slotwise.observe.log_file import LogFile, check
from slotwise.version import __version__

COMMANDS = (("timeline",), ("replay",), ("explain",), ("explain", "--slowest", "3"), ("explain", "--step", "1"))


def names(command: tuple[str, ...]) -> str:
    return " ".join(command)


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return encode_lines(Recorded(3, Batching()).play(8)).splitlines(keepends=True)


def of_format(line: bytes, number: int | None, **changes: Any) -> bytes:
    """A first line with another format; None: it names none, as before there were formats."""
    head = json.loads(line) | {"format": number} | changes
    return json.dumps({name: value for name, value in head.items() if value is not None}).encode() + b"\n"


def refused(path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which `command` refuses a log."""
    assert main([command[0], str(path), *command[1:]]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert list(path.parent.iterdir()) == [path], "nothing is written"
    return printed.err.strip()


@pytest.mark.parametrize("command", COMMANDS, ids=names)
def test_this_format_is_read(
        lines: list[bytes], command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join([of_format(lines[0], FORMAT), *lines[1:]]))
    main([command[0], str(path), *command[1:]])
    printed = capsys.readouterr()
    assert printed.out and "format" not in printed.err


@pytest.mark.parametrize("command", COMMANDS, ids=names)
@pytest.mark.parametrize(("number", "changes", "told"), [
    (FORMAT + 1, {"version": "9.9"}, f"format {FORMAT + 1}, written by slotwise 9.9"),
    (FORMAT + 1, {"limits": "of another kind", "version": "9\x1b[31m\n"},
     rf"format {FORMAT + 1}, written by slotwise 9\x1b[31m\n"),
    (None, {"version": "0.0.1"}, "no format, written by slotwise 0.0.1")], ids=["later", "changed", "none"])
def test_another_format_is_refused(
        lines: list[bytes], command: tuple[str, ...], number: int | None, changes: dict[str, str], told: str,
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join([of_format(lines[0], number, **changes), *lines[1:]]))
    assert refused(path, command, capsys) == (
        f"slotwise {command[0]}: line 1: this is an event log of {told}; slotwise {__version__} reads format {FORMAT}")


@pytest.mark.parametrize("command", COMMANDS, ids=names)
def test_a_log_without_its_beginning_is_refused_for_its_format_is_unknown(
        lines: list[bytes], command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    for rest in (lines[1:], [line_of(Gap(3)), *lines]):
        path.write_bytes(b"".join(rest))
        assert refused(path, command, capsys).endswith(
            f"line 1: the beginning of this event log is missing, and its format with it; slotwise {__version__} reads "
            f"format {FORMAT}")


@pytest.mark.parametrize("command", COMMANDS, ids=names)
def test_an_engine_that_another_version_started_is_refused(
        lines: list[bytes], command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join([lines[0], of_format(lines[0], 7), *lines[1:]]))
    assert f"line 2: this is an event log of format 7, written by slotwise {__version__};" in refused(
        path, command, capsys)


@contextmanager
def another_server(line: bytes) -> Iterator[str]:
    """A server whose stream of events is one line."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(line)))
            self.end_headers()
            self.wfile.write(line)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(120)


def test_top_refuses_the_stream_of_another_version(lines: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    with another_server(of_format(lines[0], 7, version="9.9")) as url:
        assert main(["top", url, "--once"]) == 1
    assert capsys.readouterr().err == (
        f"slotwise top: this is an event log of format 7, written by slotwise 9.9; slotwise {__version__} reads format "
        f"{FORMAT}\n")


@pytest.mark.parametrize("number", [None, FORMAT + 1])
def test_a_log_of_another_format_is_replaced(lines: list[bytes], number: int | None, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(of_format(lines[0], number) + lines[1])
    check(path)
    with LogFile(path) as file:
        file.write(lines[0])
    assert path.read_bytes() == lines[0]
