"""What a real server writes to stderr: one form for every line of every process, and the lines about requests."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.live import Live, cli, serving
from support.live_server import children, eventually

TEXT_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR|CRITICAL) \S|    ).*")
SECRET = "class Secret:\n    password"
BODY = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
LOGGER = "slotwise.api.generate.request_log"


def exchanges(live: Live) -> None:
    """A whole response, a stream, one that its client leaves, two that are refused, a probe, and a path of its own."""
    post = live.client.post
    assert post("/v1/completions", json=BODY | {"prompt": SECRET}, headers={"X-Request-Id": "whole"}).status_code == 200
    assert post("/v1/completions", json=BODY | {"prompt": [SECRET, "def f"], "n": 2},
                headers={"X-Request-Id": "many"}).status_code == 200
    chat = BODY | {"messages": [{"role": "user", "content": SECRET}], "stream": True}
    assert "[DONE]" in post("/v1/chat/completions", json=chat, headers={"X-Request-Id": "stream"}).text
    with live.client.stream("POST", "/v1/completions", json=BODY | {
            "prompt": SECRET, "stream": True, "max_tokens": 400}, headers={"X-Request-Id": "left"}) as left:
        next(left.iter_lines())
    eventually(lambda: live.client.get("/load").json()["server_load"] == 0)  # it has noticed
    assert post("/v1/completions", json=BODY | {"prompt": SECRET, "n": 0},
                headers={"X-Request-Id": "wrong"}).status_code == 400
    assert post("/v1/completions", json=BODY | {"prompt": ["a"] * 9, "n": 128},
                headers={"X-Request-Id": "refused"}).status_code == 400
    assert live.client.get("/health", headers={"X-Request-Id": "probe"}).status_code == 200
    assert live.client.get("/nowhere%0AINFO%20forged", headers={"X-Request-Id": "path"}).status_code == 404


def engine_of(live: Live) -> list[int]:
    return children(live.process.pid, b"slotwise.compose.engine_process")


def lose_engine(live: Live) -> None:
    """Kill the engine process, and wait for the next one."""
    (engine,) = engine_of(live)
    os.kill(engine, signal.SIGKILL)
    eventually(lambda: engine_of(live) not in ([], [engine]) and live.client.get("/health").status_code == 200)


@contextmanager
def logged(folder: Path, *arguments: str) -> Iterator[Path]:
    """The log of a server that has ended, after some exchanges and the loss of its engine."""
    log = folder / "log"
    with serving(*arguments, "--max-model-len", "512", "--max-num-seqs", "4", log=log) as live:
        exchanges(live)
        lose_engine(live)
    yield log


@pytest.fixture(scope="module")
def as_json(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("json")
    with logged(folder, "--log-format", "json", "--enable-log-requests", "--access-log") as log:
        yield [json.loads(line) for line in log.read_text().split("\n")[:-1]]


def named(lines: list[dict[str, Any]], request_id: str) -> dict[str, Any]:
    """The one line of an exchange."""
    (line,) = [line for line in lines if line.get("request_id") == request_id]
    assert line["logger"] == LOGGER and line["level"] == "info" and line["client"] == "127.0.0.1"
    return line


def test_every_line_is_an_object_of_one_form(as_json: list[dict[str, Any]]) -> None:
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in as_json)
    loggers = {line["logger"] for line in as_json}
    assert {LOGGER, "uvicorn.error", "slotwise.engine.supervisor"} <= loggers, "libraries and the supervisor, too"
    assert SECRET.splitlines()[1].strip() not in json.dumps(as_json), "no prompt, and no part of one"


def test_a_request_has_a_line_with_its_id_tokens_status_and_times(as_json: list[dict[str, Any]]) -> None:
    whole = named(as_json, "whole")
    assert {name: whole[name] for name in (
        "id", "method", "path", "status", "stream", "output_tokens", "finish_reasons")} == {
        "id": "cmpl-whole", "method": "POST", "path": "/v1/completions", "status": 200, "stream": False,
        "output_tokens": 4, "finish_reasons": {"length": 1}}
    assert whole["prompt_tokens"] > 3 and whole["cached_tokens"] >= 0 and "prompts" not in whole
    assert 0 < whole["read_s"] < whole["first_token_s"] < whole["seconds"]
    assert f"id whole; {whole['prompt_tokens']} prompt tokens" in whole["message"]
    many = named(as_json, "many")
    assert many["output_tokens"] == 16 and many["finish_reasons"] == {"length": 4}
    stream = named(as_json, "stream")
    assert (stream["path"], stream["status"], stream["stream"]) == ("/v1/chat/completions", 200, True)


def test_a_request_without_an_answer_has_a_line_too(as_json: list[dict[str, Any]]) -> None:
    left = named(as_json, "left")
    assert left["finish_reasons"] == {"abort": 1} and 0 < left["output_tokens"] < 400
    wrong = named(as_json, "wrong")
    assert wrong["status"] == 400 and "output_tokens" not in wrong
    refused = named(as_json, "refused")
    assert (refused["status"], refused["output_tokens"], refused["finish_reasons"], refused["first_token_s"]) == (
        400, 0, {}, None)
    assert "0 output tokens, none begun" in refused["message"]


def test_other_exchanges_have_a_line_in_the_access_log(as_json: list[dict[str, Any]]) -> None:
    probe, path = named(as_json, "probe"), named(as_json, "path")
    assert (probe["method"], probe["path"], probe["status"]) == ("GET", "/health", 200) and probe["seconds"] > 0
    assert (path["path"], path["status"]) == ("/nowhere%0AINFO%20forged", 404)


def test_every_line_of_text_has_one_form_and_prompts_where_they_are_wanted(tmp_path: Path) -> None:
    with logged(tmp_path, "--enable-log-requests", "--max-log-len", "26") as log:
        lines = log.read_text().split("\n")[:-1]
    assert not [line for line in lines if not TEXT_LINE.fullmatch(line)]
    requests = [line for line in lines if " POST /v1/" in line]
    assert len(requests) == 6 and not [line for line in lines if "/health" in line or "nowhere" in line]
    (whole,) = [line for line in requests if "; id whole;" in line]
    assert re.search(r" 200 after \d+\.\d{3} s; .* 4 output tokens, 1 length; .*first token after \d+\.\d{3} s", whole)
    assert whole.endswith('; prompts ["<|begin|>class Secret:\\n   "]'), "26 characters, on one line"
    (many,) = [line for line in requests if "; id many;" in line]
    assert many.endswith('; prompts ["<|begin|>class Secret:\\n   "]'), "of all prompts together"
    assert not [line for line in lines if "password" in line]


def test_without_the_options_no_exchange_is_logged_and_a_refused_start_has_the_form(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving("--disable-log-requests", "--disable-uvicorn-access-log", "--max-log-len", "9", log=log) as live:
        exchanges(live)
    text = log.read_text()
    assert "POST" not in text and "Secret" not in text
    for name, needed in (("--disable-log-requests", "--enable-log-requests"),
                         ("--max-log-len", "--enable-log-requests"),
                         ("--disable-uvicorn-access-log", "--access-log")):
        (line,) = [line for line in text.splitlines() if f" {name} has no effect" in line]
        assert needed in line
    refused = cli("serve", str(tmp_path / "nothing"), "--log-format", "json")
    (line,) = refused.stderr.splitlines()
    assert refused.returncode == 1 and json.loads(line)["level"] == "critical"
    assert json.loads(line)["message"].startswith("slotwise serve: ")
