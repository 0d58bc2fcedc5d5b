"""The application on Ray Serve."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import leftovers
from support.apart import free_port
from support.live_server import children, eventually

ASK = {"model": "slotwise-builtin", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
SIGN = ": waiting"
ENGINE = b"slotwise.compose.engine_process"
ARGUMENTS = "--max-num-seqs 4 --max-model-len 512 --dtype float32"


def test_settings_are_read_from_texts_and_refused_by_name() -> None:
    from slotwise.fleet.ray_app import RaySettings  # imports Ray, which takes long: not while tests are collected

    found = RaySettings.of({"min_replicas": "2", "num_cpus": 0.5, "arguments": "--dtype 'float32'"})
    assert found.min_replicas == 2 and found.num_cpus == 0.5
    assert found.command == ["--cpu-bind", "none", "--cpu-threads", "1", "--dtype", "float32"]
    for wrong in ({"min_replica": 1}, {"min_replicas": "x"}, {"min_replicas": 5}, {"router": "best"},
                  {"target_wait_s": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RaySettings.of(wrong)


@pytest.fixture(scope="module")
def application() -> Iterator[str]:
    """Two replicas of the built-in model on a cluster of this process' own, of which no process is left afterwards."""
    before = set(leftovers.running(os.environ[leftovers.MARK]))
    # Read when it is imported.  A proxy that is not ready in 15 seconds would be killed, and none would follow.
    # Ray gives actors niceness 15, with which they would get a thirtieth of a busy core.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
                   "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120"}
    import ray
    from ray import serve

    from slotwise.fleet.ray_app import app

    folder = tempfile.mkdtemp(prefix="ray-")  # a short one: paths of sockets may have 107 bytes
    try:
        ray.init("local", num_cpus=4, include_dashboard=False, logging_level="warning", object_store_memory=100 << 20,
                 _temp_dir=folder)
        port = free_port()
        with contextlib.suppress(TimeoutError):  # of a busy machine's proxy, which Ray awaits for 60 seconds
            serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"arguments": ARGUMENTS, "min_replicas": 2, "max_replicas": 2}))
        eventually(lambda: accepts(port))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    eventually(lambda: before.issuperset(leftovers.running(os.environ[leftovers.MARK])))


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def servers() -> list[int]:
    """Processes of this cluster's servers, whose parents are actors of Ray."""
    found = []
    for pid in leftovers.running(os.environ[leftovers.MARK]):
        entry = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError, IndexError):
            if b"slotwise.cli.replica_main" in (entry / "cmdline").read_bytes():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if b"ray::" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    found.append(pid)
    return found


def _streamed(client: httpx.Client) -> str:
    with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as response:
        return _text_of(response.iter_lines())


def _text_of(lines: Iterator[str]) -> str:
    """The text of a stream, which has to end as OpenAI's do."""
    events = [line.removeprefix("data: ") for line in lines if line not in ("", SIGN)]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def _num_live(server: int) -> int:
    """Unfinished requests of a server."""
    command = Path(f"/proc/{server}/cmdline").read_text().split("\0")
    return httpx.get(f"http://127.0.0.1:{command[command.index('--port') + 1]}/health", timeout=120).json()["num_live"]


def _is_replaced(server: int) -> bool:
    """Whether two replicas serve, and a server that was lost belongs to neither."""
    from ray import serve

    states = serve.status().applications["default"].deployments["EngineReplica"].replica_states
    return states == {"RUNNING": 2} and len(servers()) == 2 and server not in servers()


def _go_on(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stream_with_only_signs_of_life_goes_to_another_replica_and_the_application_goes_on(application: str) -> None:
    with httpx.Client(base_url=application, timeout=120) as client:
        text = _streamed(client)
        engines = {server: children(server, ENGINE)[0] for server in servers()}
        with contextlib.ExitStack() as stack:
            for engine in engines.values():
                os.kill(engine, signal.SIGSTOP)
                stack.callback(_go_on, engine)
            with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as response:
                lines = response.iter_lines()
                assert next(lines) == SIGN
                (there,) = [server for server in engines if _num_live(server)]
                os.kill(there, signal.SIGKILL)
                stack.close()
                assert _text_of(lines) == text
        for _ in range(6):  # with one server, and with another one that is being started
            assert client.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == text
        eventually(lambda: _is_replaced(there))
        assert _streamed(client) == text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_application_answers_streams_and_refuses_what_would_reach_one_replica(application: str) -> None:
    with httpx.Client(base_url=application, timeout=120) as client:
        answer = client.post("/v1/completions", json=ASK)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        assert _streamed(client) == text
        assert client.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}
                           ).status_code == 400
        refused = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
        assert refused.status_code == 404 and "would reach one replica" in refused.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_that_leaves_is_aborted_in_the_engine(application: str) -> None:
    long: dict[str, Any] = ASK | {"max_tokens": 400, "ignore_eos": True, "stream": True}
    program = ("import httpx, sys; s = httpx.Client(timeout=60).stream('POST', sys.argv[1], json=eval(sys.argv[2])); "
               "r = s.__enter__(); next(r.iter_lines()); print('begun', flush=True); import os; os._exit(0)")
    found = subprocess.run([sys.executable, "-c", program, application + "/v1/completions", repr(long)],
                           capture_output=True, text=True, timeout=120)
    assert found.stdout == "begun\n", found.stderr
    from ray import serve

    handle = serve.get_deployment_handle("EngineReplica", app_name="default")

    def is_idle() -> bool:
        states = [json.loads(handle.record_routing_stats.remote().result()["state"]) for _ in range(6)]
        return all(state["num_running"] == 0 for state in states)

    eventually(is_idle)
