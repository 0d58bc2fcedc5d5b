"""Clients that go away, engines that die, servers that are asked to stop, and doors that are locked."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import (
    ENDLESS,
    ENDLESS_CONTEXT,
    JSON,
    POSTED,
    Server,
    counted,
    eventually,
    frozen,
    running,
    unanswered,
)

from slotwise.text.tokenizer import Tokenizer
from slotwise.version import __version__

COMPLETIONS = "/v1/completions"
SLOW = ("seconds_per_step=0.02", ENDLESS_CONTEXT)


def gauge(server: Server, name: str) -> float:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(f"slotwise:{name}{{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name}")


def test_a_client_that_goes_away_frees_its_places(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW) as server:
        for stream in (True, False):
            body = ENDLESS | {"n": 3, "stream": stream, "request_id": f"gone-{stream}"}
            with unanswered(server, COMPLETIONS, body):
                eventually(lambda: gauge(server, "num_requests_running") == 3)
            eventually(lambda: gauge(server, "num_requests_running") == 0)
            assert gauge(server, "kv_cache_usage_perc") == 0
            told = [line for line in server.engine_log.read_text().splitlines() if f"gone-{stream}" in line]
            assert len(told) == 3 and all(line.endswith("abort") for line in told)
        assert 'finished_reason="abort",model_name="toy"} 6.0' in server.get("/metrics").text
        assert server.get("/load").json()["server_load"] == 0


def test_a_stop_string_ends_the_request_in_the_engine(server: Server, tokenizer: Tokenizer) -> None:
    stop = tokenizer.decode(counted(40, 10))[-2:]
    server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 400, "stop": stop, "request_id": "stopped"})
    eventually(lambda: "finish cmpl-stopped" in server.engine_log.read_text())
    (line,) = [line for line in server.engine_log.read_text().splitlines() if "stopped" in line]
    assert line.endswith(" stop")


def test_a_step_that_breaks_ends_its_requests_only(server: Server) -> None:
    response = server.post(COMPLETIONS, {"prompt": [398], "max_tokens": 5})
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error" and "cannot be computed" in error["message"]
    assert server.get("/health").status_code == 200
    assert server.post(COMPLETIONS, {"prompt": [2]}).status_code == 200


def test_the_engines_death_ends_every_stream_once(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "backoff=600") as server:
        streams: list[list[str]] = []

        def listen() -> None:
            body = ENDLESS | {"stream": True}
            with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=120) as response:
                streams.append([line for line in response.iter_lines() if line])

        listeners = [threading.Thread(target=listen) for _ in range(5)]
        for listener in listeners:
            listener.start()
        eventually(lambda: gauge(server, "num_requests_running") == 5)
        os.kill(server.engine_pid, signal.SIGKILL)
        for listener in listeners:
            listener.join()
        assert len(streams) == 5
        for lines in streams:
            *tokens, error, done = lines
            assert done == "data: [DONE]"
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_error"
            assert tokens and all('"choices"' in line for line in tokens)
        for path in ("/health", "/ping"):
            assert server.get(path).status_code == 503
        refused = server.post(COMPLETIONS, {"prompt": [2]})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "engine_dead"
        assert 'finished_reason="error",model_name="toy"} 5.0' in server.get("/metrics").text


def test_an_engine_that_dies_over_a_whole_answer(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "backoff=600") as server:
        assert server.post(COMPLETIONS, {"prompt": [399], "max_tokens": 50, "ignore_eos": True}).status_code == 500
        assert server.get("/health").status_code == 503


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_those_inside_finish(folder: Path, tmp_path: Path, tokenizer: Tokenizer,
                                           sent: signal.Signals) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "shutdown_timeout=30",
                 before=partial(signal.signal, sent, signal.SIG_DFL)) as server:  # `nohup make test` ignores SIGHUP
        events: list[dict[str, Any]] = []
        body = {"prompt": [40], "max_tokens": 150}
        listener = threading.Thread(target=lambda: events.extend(server.events(COMPLETIONS, body)))
        listener.start()
        eventually(lambda: gauge(server, "num_requests_running") == 1)
        with frozen(server.engine_pid):  # until then the stream cannot end, and the server with it
            server.process.send_signal(sent)
            eventually(lambda: server.get("/health").status_code == 503)
            refused = server.post(COMPLETIONS, {"prompt": [2]})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert refused.headers["connection"] == "close"  # the next one must not be sent to a server that is gone
        assert refused.headers["retry-after"]
        listener.join()
        assert "".join(event["choices"][0]["text"] for event in events) == tokenizer.decode(counted(40, 150))
        output, _ = server.process.communicate(timeout=120)
        assert server.process.returncode == 0 and output == "engine 0\n"
        assert server.engine_log.read_text().endswith("closed\n")


def test_a_hangup_is_ignored_where_it_was_ignored_before(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", before=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 5}).status_code == 200
        assert server.get("/health").status_code == 200


def test_sigterm_does_not_wait_for_ever(folder: Path, tmp_path: Path) -> None:
    settings = ("seconds_per_step=0.2", "shutdown_timeout=0.5", ENDLESS_CONTEXT)
    with running(folder, tmp_path / "engine", *settings) as server:
        events: list[dict[str, Any]] = []
        listener = threading.Thread(target=lambda: events.extend(server.events(COMPLETIONS, ENDLESS)))
        listener.start()
        eventually(lambda: gauge(server, "num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        listener.join()
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.process.wait(timeout=120) == 0


def test_sigterm_drops_what_a_client_does_not_read(folder: Path, tmp_path: Path,
                                                   capfd: pytest.CaptureFixture[str]) -> None:
    # The response is larger than what sockets hold.
    body = {"prompt": [list(range(2, 40))] * 60, "n": 8, "max_tokens": 1, "prompt_logprobs": 20}
    with running(folder, tmp_path / "engine", "max_choices=512") as server, \
            unanswered(server, COMPLETIONS, body) as client:
        assert client.recv(1) == b"H"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=120) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_overload_is_refused_at_once_and_whole(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "max_live=4", "max_choices=64", ENDLESS_CONTEXT) as server:
        refused = server.post(COMPLETIONS, ENDLESS | {"n": 5, "request_id": "crowd"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "queue_full"
        eventually(lambda: server.engine_log.read_text().count("finish cmpl-crowd") == 4)
        eventually(lambda: gauge(server, "num_requests_running") == 0)
        assert server.post(COMPLETIONS, {"prompt": [2], "n": 4}).status_code == 200
        assert 'admission_rejections_total{model_name="toy",reason="queue_full"} 1.0' in server.get("/metrics").text
        too_many = server.post(COMPLETIONS, {"prompt": [[2]] * 33, "n": 2})
        assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"


def test_a_key_is_taken_after_any_spelling_of_bearer_and_never_told(folder: Path, tmp_path: Path) -> None:
    """Which routes need one: see `test_keys.py`."""
    with running(folder, tmp_path / "engine", "api_keys=secret,other") as server:
        answer = server.post(COMPLETIONS, {"prompt": [2]}, Authorization="bearer secret")
        assert answer.status_code == 200
        error = server.get("/v1/models").json()["error"]
        assert error["code"] == "invalid_api_key" and "secret" not in json.dumps(error)


def test_fewer_events_with_a_longer_interval(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = ("stream_interval=10", "silence_timeout=0.3", ENDLESS_CONTEXT)
    with running(folder, tmp_path / "engine", *settings) as server:
        events = server.events(COMPLETIONS, {"prompt": [40], "max_tokens": 61})
        texts = [event["choices"][0]["text"] for event in events]
        assert "".join(texts) == tokenizer.decode(counted(40, 61)) and len(texts) <= 8
        body = ENDLESS | {"stream": True, "stream_interval": ENDLESS["max_tokens"], "return_token_ids": True}
        with server.client.stream("POST", server.url + COMPLETIONS, json=body) as response:
            lines = response.iter_lines()  # kept: without it the response is closed
            event = next(line for line in lines if line.startswith("data: "))
            (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        assert choice["finish_reason"] is None and choice["token_ids"], "the first event waits for nothing"


def test_a_slow_body_and_a_half_one(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "body_timeout=0.3") as server:
        def drip() -> Any:
            yield b'{"prompt": '
            time.sleep(1.5)
            yield b"[2]}"

        assert server.client.post(server.url + COMPLETIONS, content=drip(), headers=JSON).status_code == 408
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(POSTED + b"50\r\n\r\n{")
        eventually(lambda: server.get("/load").json()["server_load"] == 0)
        assert server.get("/health").status_code == 200


def test_metrics_tell_what_happened(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine") as server:
        server.post(COMPLETIONS, {"prompt": [2, 3, 40], "max_tokens": 20})
        server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 50, "stop_token_ids": [50]})
        text = server.get("/metrics").text
        label = '{model_name="toy"}'
        for line in (f"prompt_tokens_total{label} 4.0", f"generation_tokens_total{label} 30.0",
                     'request_success_total{finished_reason="length",model_name="toy"} 1.0',
                     'request_success_total{finished_reason="stop",model_name="toy"} 1.0',
                     f"time_to_first_token_seconds_count{label} 2.0", f"inter_token_latency_seconds_count{label} 28.0",
                     f"e2e_request_latency_seconds_count{label} 2.0", f"request_queue_time_seconds_count{label} 2.0",
                     'request_prompt_tokens_bucket{le="2.0",model_name="toy"} 1.0',
                     'request_generation_tokens_bucket{le="10.0",model_name="toy"} 1.0',
                     f"num_requests_running{label} 0.0"):
            assert f"slotwise:{line}" in text, (line, text)
        assert server.get("/version").json() == {"version": __version__}
