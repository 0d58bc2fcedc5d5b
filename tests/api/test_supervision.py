"""Engines that die, freeze, take long or babble, behind a real server; servers that must end whatever happens."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from api.test_abort_requests import Asking
from api.test_lifecycle import COMPLETIONS, SLOW, eventually, gauge
from support.live_server import ENDLESS, ENDLESS_CONTEXT, POSTED, Server, counted, frozen, running, unanswered

from slotwise.text.tokenizer import Tokenizer

STREAM = ENDLESS | {"stream": True}
FALLING, BABBLING, BREAKING, DYING = 396, 397, 398, 399  # prompts that the toy engine takes badly


def listened(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's events, which may end in an error, and does end in [DONE]."""
    with httpx.stream("POST", server.url + COMPLETIONS, json=body | {"stream": True}, timeout=120) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.count("[DONE]") == 1 and lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class Listening:
    """Streams in threads of their own."""

    def __init__(self, server: Server, count: int) -> None:
        self.streams: list[list[dict[str, Any]]] = []
        self._threads = [
            threading.Thread(target=lambda: self.streams.append(listened(server, ENDLESS))) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        eventually(lambda: gauge(server, "num_requests_running") == count)

    def ends(self) -> list[Any]:
        """The error's code of each, or its finish reason."""
        for thread in self._threads:
            thread.join(120)
        lasts = [events[-1] for events in self.streams]
        assert len(lasts) == len(self._threads)
        assert all(sum("error" in event for event in events) <= 1 for events in self.streams)
        return [last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"] for last in lasts]


def engines(server: Server) -> list[int]:
    """Process ids of all engines so far."""
    return [int(line.split()[1]) for line in server.engine_log.read_text().splitlines() if line.startswith("start")]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def serves(server: Server, tokenizer: Tokenizer) -> bool:
    answer = server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 5})
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == tokenizer.decode(counted(40, 5))


@pytest.mark.parametrize("how", ["kill -9", "falls", "babbles", "exits"])
def test_after_its_death_the_next_engine_serves(how: str, folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "backoff=0.2", "false_starts=30") as server:
        listening = Listening(server, 3)
        changed = server.client.put(server.url + "/admin/scheduling", json={"max_num_seqs": 7})
        assert changed.status_code == 200
        (tmp_path / "broken").touch()  # no engine follows until it has been seen that there is none
        if how == "kill -9":
            os.kill(server.engine_pid, signal.SIGKILL)
        else:
            kind = {"falls": FALLING, "babbles": BABBLING, "exits": DYING}[how]
            assert server.post(COMPLETIONS, ENDLESS | {"prompt": [kind]}).status_code == 500
        assert listening.ends() == ["engine_error"] * 3
        health = server.get("/health")
        assert health.status_code == 503 and health.headers["retry-after"]
        assert health.json()["engine"] in ("down", "loading") and health.json()["num_live"] == 0
        refused = server.post(COMPLETIONS, {"prompt": [2]})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert gauge(server, "num_requests_running") == gauge(server, "kv_cache_usage_perc") == 0
        (tmp_path / "broken").unlink()
        eventually(lambda: server.get("/health").status_code == 200)
        assert server.get("/health").json() | {"last_step_age_s": 0} == {
            "status": "ok", "engine": "idle", "last_step_age_s": 0, "num_live": 0}
        assert serves(server, tokenizer)
        assert server.get("/admin/scheduling").json()["max_num_seqs"] == 7
        crowd = Asking(server, ENDLESS | {"n": 9, "request_id": "crowd"})
        eventually(lambda: gauge(server, "num_requests_running") == 7)
        server.post("/abort_requests", {"request_id": "crowd"})
        crowd.wait()
        *before, last = engines(server)
        assert before and all(map(gone, before)) and not gone(last)


def test_a_server_without_hope_ends_with_a_status(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "backoff=0.2", "false_starts=3") as server:
        (tmp_path / "broken").touch()
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process.wait(timeout=120) == 1
        assert len(engines(server)) == 4


def test_false_starts_are_forgiven(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(folder, tmp_path / "engine", "backoff=0.2", "false_starts=30") as server:
        (tmp_path / "broken").touch()
        os.kill(server.engine_pid, signal.SIGKILL)
        eventually(lambda: len(engines(server)) >= 3)
        assert server.get("/health").status_code == 503
        (tmp_path / "broken").unlink()
        eventually(lambda: server.get("/health").status_code == 200)
        assert serves(server, tokenizer)


@pytest.mark.slow
def test_a_frozen_engine_is_unhealthy_and_then_replaced(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "engine_timeout=4") as server:
        listening = Listening(server, 2)
        os.kill(server.engine_pid, signal.SIGSTOP)
        seen: list[httpx.Response] = []

        def is_frozen() -> bool:
            seen.append(server.get("/health"))
            return seen[-1].status_code == 503

        eventually(is_frozen)
        health = seen[-1].json()
        assert health["engine"] == "frozen" and health["num_live"] == 2 and health["last_step_age_s"] > 1
        assert server.post(COMPLETIONS, {"prompt": [2]}).status_code == 503
        assert listening.ends() == ["engine_error"] * 2
        eventually(lambda: server.get("/health").status_code == 200)
        assert gone(server.engine_pid) and serves(server, tokenizer)
        idle = engines(server)[-1]
        os.kill(idle, signal.SIGSTOP)  # one that has nothing to do is watched as well
        eventually(lambda: gone(idle))
        eventually(lambda: server.get("/health").status_code == 200)


@pytest.mark.slow
def test_an_engine_that_thaws_goes_on(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with running(folder, tmp_path / "engine", "seconds_per_step=0.02", "engine_timeout=24") as server:
        with frozen(server.engine_pid):
            asking = Asking(server, {"prompt": [40], "max_tokens": 200})
            eventually(lambda: server.get("/health").status_code == 503 and server.get("/health").json()["num_live"])
        eventually(lambda: server.get("/health").status_code == 200)
        assert asking.wait().json()["choices"][0]["text"] == tokenizer.decode(counted(40, 200))
        assert len(engines(server)) == 1


@pytest.mark.slow
def test_a_busy_engine_is_healthy_however_long_its_step(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "seconds_per_step=6", "engine_timeout=4") as server:
        asking = Asking(server, {"prompt": [40], "max_tokens": 1})
        eventually(lambda: server.get("/health").json()["num_live"] == 1)
        while asking.answer is None:
            health = server.get("/health")
            assert health.status_code == 200, health.text
            time.sleep(0.2)
        assert asking.wait().status_code == 200 and len(engines(server)) == 1


# -- the server's own end --------------------------------------------------------------------------------------------


def test_sigterm_with_a_frozen_engine(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "shutdown_timeout=1") as server:
        listening = Listening(server, 2)
        os.kill(server.engine_pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert listening.ends() == ["abort"] * 2
        assert server.process.wait(timeout=120) == 0
        assert gone(server.engine_pid)


@pytest.mark.slow
def test_sigterm_with_an_engine_in_a_long_step(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "seconds_per_step=600", ENDLESS_CONTEXT, "shutdown_timeout=1") as server:
        asking = Asking(server, ENDLESS)
        eventually(lambda: server.get("/health").json()["num_live"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert asking.wait().json()["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(timeout=120) == 0
        assert gone(server.engine_pid)


def test_sigterm_while_there_is_no_engine(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "backoff=600", "shutdown_timeout=60") as server:
        os.kill(server.engine_pid, signal.SIGKILL)
        eventually(lambda: server.get("/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=120) == 0 and len(engines(server)) == 1


@pytest.mark.slow
def test_sigterm_with_clients_that_do_not_read(folder: Path, tmp_path: Path) -> None:
    """Their answers fill every buffer on the way and then wait in the server."""
    with running(folder, tmp_path / "engine", "shutdown_timeout=1") as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(STREAM | {"n": 60, "logprobs": 20, "max_tokens": 510, "prompt": [2]}).encode()
        head = POSTED + b"%d\r\n\r\n" % len(body)
        deaf = []
        for _ in range(3):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(head + body)
            deaf.append(connection)
        eventually(lambda: server.get("/load").json()["server_load"] == 3)
        eventually(lambda: gauge(server, "generation_tokens_total") > 1000)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=120) == 0
        for connection in deaf:
            connection.close()


def test_sigterm_with_a_body_that_never_comes(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "shutdown_timeout=1") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(POSTED + b"50\r\n\r\n{")
            eventually(lambda: server.get("/load").json()["server_load"] == 1)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=120) == 0


def test_a_second_signal_ends_it_at_once(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "shutdown_timeout=600") as server:
        connection = httpx.Client(timeout=120)
        request = connection.build_request("POST", server.url + COMPLETIONS, json=STREAM)
        response = connection.send(request, stream=True)
        lines = response.iter_lines()  # kept: the response is closed with its iterator
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.get("/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=120)
        assert gone(server.engine_pid)
        connection.close()


@pytest.mark.slow
def test_the_engine_does_not_outlive_a_server_that_is_killed(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "seconds_per_step=600", ENDLESS_CONTEXT) as server:
        with unanswered(server, COMPLETIONS, ENDLESS):
            eventually(lambda: server.get("/health").json()["num_live"] == 1)
            server.process.kill()
        eventually(lambda: gone(server.engine_pid) or b"Z" in Path(f"/proc/{server.engine_pid}/stat").read_bytes())
