"""`slotwise top`: its frames in narrow terminals, its keys, and a server that is none of ours."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice

import msgspec
import pytest
from rich.console import Console
from support.live import serving
from support.played import Play
from support.terminal import NARROW, Terminal

from slotwise.cli import main
from slotwise.cli.top import WIDTHS, ServerFrame
from slotwise.observe.event_log import Entry, RequestEntry
from slotwise.observe.live_state import LiveState

LONG = "cmpl-0123456789abcdef0123456789abcdef-0"


def states() -> Iterator[LiveState]:
    """A run, entry by entry; the names of its requests are long."""
    state = LiveState()
    for entry in Play(4).run(30).entries:
        state.apply(_named_at_length(entry))
        yield state


def _named_at_length(entry: Entry) -> Entry:
    if not isinstance(entry, RequestEntry):
        return entry
    return msgspec.structs.replace(entry, add=msgspec.structs.replace(entry.add, name=f"{entry.number}{LONG}"))


def shown(state: LiveState, width: int, rows: int = 50) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(ServerFrame(state, state.now_ns, rows, hint="q quits"))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [NARROW, 72, 80, 100, 140])
def test_a_frame_fits_its_terminal_and_cuts_off_nothing_but_the_middle_of_names(width: int) -> None:
    seen = set()
    for state in islice(states(), 0, None, 3):
        lines = shown(state, width)
        assert max(map(len, lines)) <= width
        running = state.seated()
        for line, live in zip(lines[len(lines) - len(running) - _after(lines):], running, strict=False):
            words = line.split()
            assert words[0] == str(live.slot) and words[2] == (state.reason(live) or state.phase(live))
            assert words[1].startswith(str(live.request.number)) and words[1].endswith("-0")
            assert words[-2:] == [f"{(state.now_ns - live.request.ns) * 1e-9:.1f}", "s"]
            assert words[-3] == str(live.num_sampled)
            seen.add(state.phase(live))
        text = " ".join(" ".join(lines).split())
        for phrase in ("tokens/s out", "requests/s", "of slots empty", "% wasted", "q quits"):
            assert phrase in text
        assert "…" not in text.replace("…bcdef-0", "").replace("…cdef-0", "").replace("…def-0", "")
    assert seen >= {"prefill", "decode"}


def _after(lines: list[str]) -> int:
    """Lines behind the slots: the queue."""
    return next(number for number, line in enumerate(reversed(lines), 1) if line.startswith(("waiting", "no requests")))


def test_columns_are_left_out_of_narrow_terminals_only() -> None:
    *_, state = states()
    for state in states():
        if len(state.seated()) == 6:
            break
    heads = {width: next(line.split() for line in shown(state, width) if "doing" in line) for width in (NARROW, 120)}
    assert heads == {NARROW: ["slot", "request", "doing", "output", "for"], 120: list(WIDTHS)}


def test_a_low_terminal_shows_fewer_slots_and_the_queue_all_the_same() -> None:
    for state in states():
        if state.queue() and len(state.seated()) == 6:
            break
    lines = shown(state, NARROW, rows=13)
    assert len(lines) <= 13
    slots = [line for line in lines if line.split()[0] in "012345"]
    assert 1 <= len(slots) < 6 and f"  and {6 - len(slots)} more" in lines
    assert any(line.startswith("waiting   ") for line in lines)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving("--max-num-seqs", "4", log=tmp_path_factory.mktemp("top") / "stderr") as running:
        yield running.url


@pytest.fixture
def terminal(url: str) -> Iterator[Terminal]:
    with contextlib.closing(Terminal("top", url, "--interval", "0.1")) as opened:
        opened.read("of slots empty")
        yield opened


def is_left(terminal: Terminal) -> bool:
    """Whether the terminal is as it was: its settings, its first screen, its cursor."""
    return (terminal.settings == terminal.before and terminal.reads_lines
            and terminal.text.rindex("\x1b[?1049l") > terminal.text.rindex("\x1b[?1049h")
            and terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l"))


@pytest.mark.parametrize(("keys", "status"), [(b"q", 0), (b"xQ", 0), (b"\x03", 130)], ids=["q", "Q", "Ctrl-C"])
def test_a_key_leaves_and_the_terminal_is_as_it_was(terminal: Terminal, keys: bytes, status: int) -> None:
    assert "q quits" in terminal.text and not terminal.reads_lines
    terminal.press(keys)
    assert terminal.ended() == status
    assert is_left(terminal) and "Traceback" not in terminal.text


def test_other_keys_do_nothing(terminal: Terminal) -> None:
    terminal.press(b"x\r?")
    frames = terminal.text.count("of slots empty")
    while terminal.text.count("of slots empty") < frames + 3:
        terminal.read()
        assert terminal.process.poll() is None
    terminal.press(b"q")
    assert terminal.ended() == 0


def test_a_terminated_view_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.ended() == 0 and is_left(terminal)


def test_a_lost_server_is_told_and_the_key_still_leaves(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(log=tmp_path_factory.mktemp("top") / "stderr") as running:
        view = Terminal("top", running.url, "--interval", "0.1")
        view.read("of slots empty")
    with contextlib.closing(view):
        view.read("cannot be reached")
        view.press(b"q")
        assert view.ended() == 0 and is_left(view)


@pytest.fixture
def endless() -> Iterator[str]:
    """A server whose first line of events has no end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_send_without_end, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(120)


def _send_without_end(listener: socket.socket) -> None:
    for _ in ("/replicas", "/events"):
        connection, _ = listener.accept()
        _answer_without_end(connection)


def _answer_without_end(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.recv(65_536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n")
        for _ in range(100):
            connection.sendall(b"a" * (1 << 20))


def test_a_line_without_end_is_one_line(endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", endless, "--once"]) == 1
    assert capsys.readouterr() == ("", f"slotwise top: {endless}/events sends a line of more than 16 MB: "
                                       "it is not a slotwise server\n")


class Stranger(BaseHTTPRequestHandler):
    """Answers in HTML, as servers of other programs do."""

    def do_GET(self) -> None:
        self.send_error(404, "Nothing here")

    def log_message(self, *arguments: object) -> None:
        pass


def test_an_answer_of_another_program_is_told_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            assert main(["top", url, "--once"]) == 1
        finally:
            server.shutdown()
    assert capsys.readouterr() == ("", f"slotwise top: {url}/events answers with 404 Nothing here\n")


def test_a_port_on_which_nothing_listens_is_one_line_that_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert main(["top", url, "--once"]) == 1
    assert capsys.readouterr() == ("", f"slotwise top: {url} cannot be reached (Connection refused): start a server "
                                       "there with slotwise serve, or give the URL of one: slotwise top URL\n")
