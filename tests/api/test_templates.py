"""Chat templates that run on, eat memory or write without end: each call is refused, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.canary import singing
from support.live_server import Server, children, counted, eventually, running
from support.toy_checkpoint import write_checkpoint

from slotwise.api.generate.checkpoint_workers import CallLimits, Template
from slotwise.text.chat_source import ChatTemplateError
from slotwise.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "endless": ENDLESS,
    "long string": "{{ 'a' * n }}",
    "centred": "{{ 'a' | center(n) }}",
    "doubled": "{% set x = namespace(s='a') %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
    "long list": "{{ ([0] * n) | length }}",
    "long number": "{{ (9 ** (n // 10)) % 7 }}",
    "formatted": "{{ '%*s' % (n, 'a') }}",
    "much written": "{% for a in range(99999) %}{% for b in range(99) %}{{ 'a' * 99 }}{% endfor %}{% endfor %}",
    "recursive": "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}",
    "failing": "{{ messages[5].x.y }}",
}
TEMPLATE = ("{% set said = messages[0].content %}{% set n = 4000000000 %}"
            + "".join(f"{{% if said == '{name}' %}}{source}{{% endif %}}" for name, source in HOSTILE.items())
            + "<{{ said }}>")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("hostile"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "engine"
    with running(hostile, log, "api_keys=one,two", "template_seconds=1") as started:
        started.client.headers["Authorization"] = "Bearer one"
        yield started


def chat(said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}], "max_tokens": 2}


def workers_of(server: Server) -> list[int]:
    return children(server.process.pid, b"slotwise.text.chat_template")


@pytest.mark.parametrize("said", HOSTILE)
def test_a_hostile_template_is_refused(server: Server, said: str) -> None:
    answer = server.post(CHAT, chat(said))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages" and error["message"].startswith("the chat template "), error
    assert len(error["message"]) < 1000
    if said == "endless":
        assert error["message"] == "the chat template took more than 1 seconds"
    assert server.post(CHAT, chat("hello")).status_code == 200, "and goes on"


def test_a_worker_that_was_killed_is_replaced_before_the_answer(server: Server) -> None:
    assert server.post(CHAT, chat("hello")).status_code == 200
    (worker,) = workers_of(server)
    os.kill(worker, signal.SIGKILL)
    assert server.post(CHAT, chat("hello")).status_code == 200
    assert workers_of(server) != [worker]


def test_workers_that_end_again_and_again_are_no_fault_of_the_client(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, CHAT, chat("endless"))
        while not asked.done():
            for worker in workers_of(server):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
    assert asked.result().status_code == 503 and asked.result().json()["error"]["code"] == "not_rendered"
    assert server.post(CHAT, chat("hello")).status_code == 200


def test_others_are_served_meanwhile(server: Server, tokenizer: Tokenizer) -> None:
    with singing(server, tokenizer.decode(counted(40, 200)), "one") as canary, httpx.Client(timeout=120) as other:
        answers: list[int] = []

        def ask(path: str) -> None:
            answers.append(server.post(path, chat("endless")).status_code)

        hostile = [threading.Thread(target=ask, args=(path,)) for path in (CHAT, "/tokenize", CHAT)]
        for thread in hostile:
            thread.start()
        eventually(lambda: bool(workers_of(server)))
        other.headers["Authorization"] = "Bearer two"
        assert other.post(server.url + CHAT, json=chat("hello")).status_code == 200
        assert len(answers) < 3, "it takes turns with them"
        assert other.post(server.url + COMPLETIONS, json={"prompt": [5], "max_tokens": 2}).status_code == 200
        for thread in hostile:
            thread.join()
        assert answers == [400] * 3
    assert canary.gap < 0.25


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_meanwhile(hostile: Path, tmp_path: Path, number: int) -> None:
    seconds = 600 if number == signal.SIGTERM else 2  # a worker whose server was killed ends at its limit
    with running(hostile, tmp_path / "engine", "shutdown_timeout=600", f"template_seconds={seconds}") as server:
        def ask() -> None:
            if number == signal.SIGTERM:
                answer = server.post(CHAT, chat("endless"))
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining", answer.text
                refused.append(answer)
                return
            with pytest.raises(httpx.HTTPError):
                server.post(CHAT, chat("endless"))

        refused: list[httpx.Response] = []
        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: server.get("/load").json()["server_load"] == 1)
        (worker,) = workers_of(server)
        server.process.send_signal(number)
        server.process.wait(120)
        asking.join()
        assert len(refused) == (number == signal.SIGTERM)
        eventually(lambda: not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text())


def test_numbers_too_long_for_a_message_are_refused(server: Server) -> None:
    for body in (chat("x") | {"chat_template_kwargs": {"n": 2**70}},
                 {"messages": [{"role": "user", "content": "x", "n": -(2**70)}], "max_tokens": 1}):
        answer = server.post(CHAT, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages", answer.text


def test_a_template_for_tools_renders_conversations_with_tools() -> None:
    async def whole() -> list[str]:
        template = Template("plain", {}, for_tools="{{ tools | length }}{{ tools | tojson }}")
        try:
            await template.check()
            return [await template.render("", [], {"tools": tools}) for tools in ([], [{}], None)] + [
                await template.render("", [], {"tools": [{}]}, "own{{ tools | tojson }}")]
        finally:
            template.close()

    assert asyncio.run(whole()) == ["plain", "1[{}]", "plain", "own[{}]"]


def checked(source: str) -> str:
    """What is said of a template at the start; "": nothing."""
    async def whole() -> str:
        template = Template(source, {"eos_token": "</s>"}, CallLimits(seconds=60.0, memory=256 << 20, answer=1 << 20))
        try:
            await template.check()
        except ChatTemplateError as error:
            return str(error)
        finally:
            template.close()
        return ""

    return asyncio.run(whole())


@pytest.mark.parametrize(("source", "says"), [
    ("{{ 9 ** (9 ** 9) }}", ""), ("{{ 'a' * 10 ** 10 }}", ""), ("{{ 2 ** 99999999 }}", ""),  # nothing is folded
    ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "does not compile"),
    ("{% if x %}" * 5000 + "{% endif %}" * 5000, "does not compile"),
    ("{{ x" + "[1]" * 20000 + " }}", "does not compile"),
    ("{{ " + "not " * 100_000 + "x }}", "does not compile"),
    ("{% for %}", "does not compile"), ("plain", "")])
def test_compiling_is_bounded(source: str, says: str) -> None:
    told = checked(source)
    assert told.startswith("the chat template ") == bool(says) and says in told, told[:200]


def test_templates_are_compiled_once(server: Server) -> None:
    assert server.post(CHAT, chat("hello")).status_code == 200
    (worker,) = workers_of(server)
    for _ in range(20):
        assert server.post(CHAT, chat("hello")).status_code == 200
    assert workers_of(server) == [worker]


def test_a_template_that_cannot_be_checked_at_the_start_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The server ends with the error in one line: the worker's end adds nothing.  Later it is logged."""
    async def checked() -> None:
        long = "{{ messages }}" * 20_000  # half a second
        template = Template(long, {}, CallLimits(seconds=0.01, memory=512 << 20, answer=1 << 20))
        try:
            with pytest.raises(ChatTemplateError, match=r"took more than 0\.01 seconds"):
                await template.check()
            assert not caplog.text
            with pytest.raises(ChatTemplateError, match=r"took more than 0\.01 seconds"):
                await template.render("", [], {})
            assert "the worker of slotwise.text.chat_template is ended" in caplog.text
        finally:
            template.close()

    asyncio.run(checked())
