"""A chat in a terminal of its own: with the built-in model, with a real server, and with servers that misbehave."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.live import cli, serving
from support.terminal import Terminal

from slotwise.cli.chat import is_open, message_of

pytestmark = pytest.mark.slow
READS = "\x1b[?2004h"  # written when a message can be typed
CTRL_C, CTRL_D, ALT_ENTER, ENTER = b"\x03", b"\x04", b"\x1b\r", b"\r"


@contextlib.contextmanager
def chatting(*arguments: str, **options: Any) -> Iterator[Terminal]:
    with contextlib.closing(Terminal("chat", *arguments, **options)) as terminal:
        terminal.read(READS if terminal.is_smart else "> ")
        assert "Ctrl-D ends the chat." in terminal.shown
        yield terminal


def ask(terminal: Terminal, keys: bytes, wanted: str) -> str:
    """Presses keys at a prompt, and returns what is shown until the next prompt, `wanted` included."""
    terminal.answers(keys, wanted)
    if terminal.is_smart:
        terminal.read(READS)
    return terminal.shown


def stop(terminal: Terminal) -> None:
    """Presses Ctrl-C while an answer comes."""
    terminal.text = ""
    terminal.press(CTRL_C)
    terminal.read("(stopped; /retry asks again)")
    terminal.read(READS)


# -- a scripted server -------------------------------------------------------------------------------------------------


class Scripted(BaseHTTPRequestHandler):
    """Answers each chat with the next of `answers`: a list of deltas, or a status and a message."""

    protocol_version = "HTTP/1.1"
    answers: ClassVar[list[Any]] = []
    bodies: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []
    left: ClassVar[threading.Event] = threading.Event()

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "scripted", "max_model_len": 100}]})

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.keys.append(self.headers["Authorization"])
        answer = self.answers.pop(0) if self.answers else [{"content": "well"}]
        if isinstance(answer, tuple):
            status, message = answer
            self._json(status, {"error": {"message": message}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self._stream(answer)
        except OSError:
            self.left.set()

    def _stream(self, answer: Sequence[Any]) -> None:
        for delta in answer:
            if delta == "forever":
                while True:
                    self._event({"choices": [{"index": 0, "delta": {"content": "and on "}}]})
                    time.sleep(0.05)
            elif delta == "cut":
                return
            elif delta == "error":
                self._event({"error": {"message": "the engine was lost"}})
                return
            else:
                self._event({"choices": [{"index": 0, "delta": delta}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 7,
                                              "prompt_tokens_details": {"cached_tokens": 32}}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, said: dict[str, Any]) -> None:
        content = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def scripted() -> Iterator[str]:
    for kept in (Scripted.answers, Scripted.bodies, Scripted.keys):
        kept.clear()
    Scripted.left.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def said(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


# -- with the built-in model -------------------------------------------------------------------------------------------


def test_a_conversation_with_the_model_in_the_package(tmp_path: Path) -> None:
    with chatting("builtin", "--temperature", "0", "--max-tokens", "24") as terminal:
        banner = terminal.shown.replace("\n", " ")
        assert "slotwise-builtin in this process, on the CPU" in banner
        assert "cannot converse" in banner and "slotwise chat smollm2" in banner
        ask(terminal, b"def is_empty(self):\r", "return")
        told = ask(terminal, b"/tokens\r", "of context")
        assert "prompt 6 tokens" in told and "answer " in told and "first token after" in told
        saved = tmp_path / "kept.json"
        ask(terminal, f"/save {saved}\r".encode(), "saved in")
        messages = json.loads(saved.read_text())["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"]
        assert messages[0]["content"] == "def is_empty(self):" and "return" in messages[1]["content"]
        terminal.press(b"/exit\r")
        assert terminal.ended() == 0
        assert terminal.reads_lines, "the terminal is as it was"


def test_ctrl_c_ends_an_answer_and_twice_at_the_prompt_the_chat() -> None:
    # So hot that it goes on until the context is full, on slow kernels.
    options = ("--temperature", "9", "--max-tokens", "1000", "--device", "reference")
    with chatting("builtin", *options) as terminal:
        terminal.press(b"def f(x):\r")
        terminal.read("\x1b[?2004l")
        while len(terminal.text.partition("\x1b[?2004l")[2]) < 20:
            terminal.read_more()
        stop(terminal)
        ask(terminal, b"/tokens\r", "of 1,024 tokens of context")
        ask(terminal, CTRL_C, "Ctrl-C again, or Ctrl-D, ends the chat.")
        ask(terminal, b"/system\r", "There is no system prompt")
        ask(terminal, CTRL_C, "Ctrl-C again, or Ctrl-D, ends the chat.")
        terminal.press(CTRL_C)
        assert terminal.ended() == 130 and terminal.reads_lines


def test_a_conversation_beyond_the_context_is_a_line_and_a_full_context_says_so() -> None:
    with chatting("builtin", "--max-model-len", "64", "--temperature", "9") as terminal:
        long = b"def f(" + b", ".join(b"argument_%d" % number for number in range(40)) + b"):\r"
        told = ask(terminal, long, "64, output included")
        assert "the prompt has" in told
        ask(terminal, b"def f(x):\r", "(the context of 64 tokens is full: /clear begins a new")
        assert "answer" in ask(terminal, b"/tokens\r", "of 64 tokens")


# -- with a server -----------------------------------------------------------------------------------------------------


def test_a_chat_with_a_running_server(tmp_path: Path) -> None:
    with serving("builtin", "--api-key", "sesame", log=tmp_path / "log") as live:
        assert f"{live.url} asks for a key: give it with --api-key" in cli("chat", live.url, stdin="x\n").stderr
        with chatting(live.url, "--api-key", "sesame", "--temperature", "0", "--max-tokens", "24") as terminal:
            assert f"slotwise-builtin at {live.url}, 1,024 tokens of context." in terminal.shown.replace("\n", " ")
            ask(terminal, b"def is_empty(self):\r", "return")
            told = ask(terminal, b"/tokens\r", "of context")
            assert "prompt 6 tokens" in told and "answer " in told
            terminal.press(CTRL_D)
            assert terminal.ended() == 0
        done = cli("chat", live.url.removeprefix("http://") + "/v1", "--api-key", "sesame", "--max-tokens", "4",
                   stdin="def f(x):\n")
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_messages_go_to_the_server_as_they_were_typed(scripted: str) -> None:
    with chatting(scripted, "--system", "Be brief.", "--temperature", "0.5", "--seed", "3") as terminal:
        assert "scripted at" in terminal.shown
        ask(terminal, b"one \\\rand two\r", "well")
        ask(terminal, b'"""\rthree\r\rfour\r"""\r', "well")
        terminal.answers(b"\x1b[200~def f():\r    return 1\x1b[201~", "return 1")
        ask(terminal, ENTER, "well")
        ask(terminal, b"five" + ALT_ENTER + b"six\r", "well")
        ask(terminal, b"/etc/passwd is a path\r", "well")
        ask(terminal, b"/nonsense\r", "there is no command /nonsense: /help lists them")
    typed = [[text for role, text in said(body) if role == "user"][-1] for body in Scripted.bodies]
    assert typed == ["one \nand two", "three\n\nfour", "def f():\n    return 1", "five\nsix", "/etc/passwd is a path"]
    first, *_, last = Scripted.bodies
    assert said(first) == [("system", "Be brief."), ("user", "one \nand two")]
    assert len(said(last)) == 1 + 2 * 4 + 1
    assert {name: first[name] for name in ("model", "temperature", "seed", "stream")} == {
        "model": "scripted", "temperature": 0.5, "seed": 3, "stream": True}
    assert "max_tokens" not in first, "the server has defaults of its own"


def test_commands_change_the_conversation(scripted: str, tmp_path: Path) -> None:
    Scripted.answers[:] = [[{"content": "one"}], [{"content": "two"}], [{"content": "three"}], [{"content": "four"}]]
    with chatting(scripted) as terminal:
        ask(terminal, b"hello\r", "one")
        ask(terminal, b"/retry\r", "two")
        told = ask(terminal, b"/tokens\r", "of 100 tokens of context")
        assert "prompt 40 tokens (32 found in the cache)" in told and "answer 7 tokens" in told.replace("\n", " ")
        ask(terminal, b"/system Speak French.\r", "The system prompt holds from the next answer on.")
        ask(terminal, b"again\r", "three")
        saved = tmp_path / "chat.md"
        ask(terminal, f"/save {saved}\r".encode(), "saved in")
        ask(terminal, f"/save {Path(__file__)}\r".encode(), "choose another name")
        ask(terminal, b"/clear\r", "A new conversation")
        ask(terminal, b"fresh\r", "four")
        ask(terminal, b"/help\r", "Ctrl-D ends the chat.")
        assert "/save FILE" in terminal.shown and "/tokens" in terminal.shown
    assert [said(body) for body in Scripted.bodies] == [
        [("user", "hello")], [("user", "hello")],
        [("system", "Speak French."), ("user", "hello"), ("assistant", "two"), ("user", "again")],
        [("system", "Speak French."), ("user", "fresh")]]
    assert saved.read_text() == (
        "## system\n\nSpeak French.\n\n## user\n\nhello\n\n## assistant\n\ntwo\n\n## user\n\nagain\n\n"
        "## assistant\n\nthree\n")


def test_ctrl_c_leaves_the_stream_of_a_server_and_what_came_is_kept(scripted: str) -> None:
    Scripted.answers[:] = [["forever"], [{"content": "done"}]]
    with chatting(scripted) as terminal:
        terminal.press(b"go\r")
        terminal.read("and on and on")
        stop(terminal)
        assert Scripted.left.wait(30), "the server is told"
        ask(terminal, b"next\r", "done")
    (_, (role, kept), *_) = said(Scripted.bodies[1])
    assert role == "assistant" and kept.startswith("and on")


@pytest.mark.parametrize(("answer", "told"), [
    ((400, "This model's maximum context length is 100 tokens."), "maximum context length is 100 tokens."),
    ((503, "too many requests wait"), "too many requests wait"),
    ([{"content": "begun"}, "error"], "the engine was lost"),
    ([{"content": "begun"}, "cut"], "the stream ended before the answer did")])
def test_a_message_that_a_server_cannot_answer_is_forgotten(scripted: str, answer: Any, told: str) -> None:
    Scripted.answers[:] = [answer, [{"content": "fine"}]]
    with chatting(scripted, columns=200) as terminal:
        ask(terminal, b"first\r", told)
        ask(terminal, b"/retry\r", "fine")
    assert said(Scripted.bodies[1]) == [("user", "first")]


@pytest.mark.parametrize(("environment", "begin", "end"), [
    ({}, "\x1b[2m", "\x1b[0m"), ({"NO_COLOR": "1"}, "reasoning: ", "answer: "),
    ({"TERM": "dumb"}, "reasoning: ", "answer: ")])
def test_reasoning_is_dim_and_not_sent_again(
        scripted: str, environment: dict[str, str], begin: str, end: str) -> None:
    Scripted.answers[:] = [[{"reasoning_content": "The user "}, {"reasoning_content": "greets."}, {"content": "Hi!"}]]
    with chatting(scripted, environment=environment) as terminal:
        ask(terminal, b"hello\r", "Hi!")
        text = terminal.text.replace("\r", "")
        assert f"{begin}The user greets.{end.replace('answer: ', '')}" in text.replace("\n\nanswer: ", "")
        assert text.index("The user greets.") < text.index("Hi!")
        assert ("\x1b[2m" in text) == (begin == "\x1b[2m")
        ask(terminal, b"and?\r", "well")
    assert said(Scripted.bodies[1]) == [("user", "hello"), ("assistant", "Hi!"), ("user", "and?")]


def test_a_server_cannot_take_over_the_terminal(scripted: str) -> None:
    Scripted.answers[:] = [[{"content": "a\x1b]0;OWNED\x07b\n"}, {"reasoning_content": "\x1b[31m"}]]
    with chatting(scripted) as terminal:
        ask(terminal, b"x\r", "a\\x1b]0;OWNED\\x07b")
        assert "\x1b]0;OWNED" not in terminal.text and "\x1b[31m" not in terminal.text


# -- without a terminal ------------------------------------------------------------------------------------------------


def test_a_pipe_has_answers_alone(scripted: str) -> None:
    Scripted.answers[:] = [[{"reasoning_content": "hm"}, {"content": "one"}], [{"content": "two"}]]
    done = cli("chat", scripted, stdin="first\nsecond\n\nafter an empty line\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\ntwo\n", "")
    assert said(Scripted.bodies[1]) == [("user", "first"), ("assistant", "one"), ("user", "second")]
    Scripted.answers[:] = [(400, "no")]
    done = cli("chat", scripted, stdin="first\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "slotwise chat: no\n")


def test_the_key_comes_from_the_option_or_the_environment(scripted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("chat", scripted, stdin="x\n")
    monkeypatch.setenv("SLOTWISE_API_KEY", "first,second")
    cli("chat", scripted, stdin="x\n")
    cli("chat", scripted, "--api-key", "given", stdin="x\n")
    assert Scripted.keys == [None, "Bearer first", "Bearer given"]


@pytest.mark.parametrize(("arguments", "told"), [
    (["http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1: Connection refused; start a server with"),
    (["http://user:pass@x"], "a URL holds no user or password: give a key with --api-key"),
    (["http://"], "is not the URL of a server, such as http://127.0.0.1:8000"),
    (["http://127.0.0.1:1", "--dtype", "float32"], "--dtype is for a model in this process: leave it out"),
    (["builtin", "--api-key", "x"], "--api-key is for a server: give its URL"),
    (["builtin", "--model", "smollm2"], "builtin and --model smollm2: give one model"),
    (["nonsense"], "nonsense: give a checkpoint's folder")])
def test_what_cannot_be_is_one_line(arguments: list[str], told: str) -> None:
    done = cli("chat", *arguments, stdin="x\n")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and told in line and line.startswith("slotwise chat: ")


@pytest.mark.parametrize(("text", "goes_on", "message"), [
    ("hello", False, "hello"), ("a\\", True, ""), ("a\\\nb", False, "a\nb"), ('"""', True, ""), ('"""a\nb', True, ""),
    ('"""a\n\nb"""', False, "a\n\nb"), ('"""\na\\\n"""', False, "a\\"), ('say """', False, 'say """'),
    ('"""doc"""\nx = 1', False, '"""doc"""\nx = 1')])
def test_messages_of_several_lines(text: str, goes_on: bool, message: str) -> None:
    assert is_open(text) == goes_on
    assert goes_on or message_of(text) == message
