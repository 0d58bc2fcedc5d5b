"""`slotwise scale` as a user starts it: real engines in processes of its own, and what happens when one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.live_server import Server, children, eventually
from support.scale_door import door_of

from slotwise.cli import main
from slotwise.core.transfer.kv_transfer_config import CONSUMER, PRODUCER, KVTransferConfig
from slotwise.fleet.replicas import roles, shares

SENDS = '{"kv_connector": "TCPConnector", "kv_role": "kv_producer"}'
SMALL = ("--max-num-seqs", "4", "--max-model-len", "256", "--dtype", "float32")
ASK = {"model": "slotwise-builtin", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}


def states(door: Server) -> list[dict[str, Any]]:
    return door.get("/replicas").json()["replicas"]


def text_of(door: Server) -> str:
    answer = door.post("/v1/completions", ASK)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and b"\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_replicas_are_started_replaced_added_drained_and_ended(tmp_path: Path) -> None:
    with door_of("--replicas", "2", *SMALL, log=tmp_path / "door") as door:
        eventually(lambda: sum(one["is_up"] for one in states(door)) == 2)
        expected = text_of(door)
        pids = children(door.process.pid, b"replica_main")
        assert len(pids) == 2
        port = next(one["url"] for one in states(door) if one["name"] == "0").rpartition(":")[2].encode()
        (first,) = [pid for pid in pids if port in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        os.kill(first, signal.SIGKILL)
        for _ in range(10):
            assert text_of(door) == expected  # by the other one, while the first starts again
        eventually(lambda: 'slotwise:router_replica_losses_total{replica="0"} 1' in door.get("/metrics").text)
        eventually(lambda: sum(one["is_up"] for one in states(door)) == 2)

        assert door.client.put(door.url + "/admin/replicas", json={"replicas": 1}).status_code == 200
        eventually(lambda: len(states(door)) == 1)
        assert text_of(door) == expected
        for wrong in (0, -1, 1000, "two"):
            assert door.client.put(door.url + "/admin/replicas", json={"replicas": wrong}).status_code == 400
        left = children(door.process.pid, b"replica_main")
        engines = [engine for pid in left for engine in children(pid, b"engine_process")]
        assert len(left) == 1 and engines
    assert door.process.returncode == 0
    eventually(lambda: not any(map(is_alive, [*left, *engines])))
    told = (tmp_path / "door").read_text().splitlines()
    for name in "01":
        assert any(line.startswith(f"[replica {name}] ") and "Started server process" in line for line in told)
    assert sum("Started server process" in line and "[replica " not in line for line in told) == 1, "the router's own"


@pytest.mark.slow
def test_replicas_end_with_a_door_that_is_killed(tmp_path: Path) -> None:
    with door_of("--replicas", "1", *SMALL, log=tmp_path / "door") as door:
        pids = children(door.process.pid, b"replica_main")
        os.kill(door.process.pid, signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, pids)))


def test_a_model_that_cannot_be_served_is_an_error_and_no_loop(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-m", "slotwise.cli", "scale", str(tmp_path), "--port", "0"],
                           capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert found.stderr.startswith("slotwise scale: ") and "config.json" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(("arguments", "why"), [
    (("--event-log", "x"), "--event-log is not for replicas"), (("--cpu-bind", "0"), "--cpu-bind is not for replicas"),
    (("--cpu-threads", "1"), "--cpu-threads is not for replicas"), (("--device", "cuda"), "--replica-url"),
    (("--replica-url", "http://127.0.0.1:1", "--replicas", "2"), "--replicas is for processes"),
    (("--replica-url", "http://127.0.0.1:1", "--max-num-seqs", "2"), "--max-num-seqs is for replicas"),
    (("--replica-url", "http://127.0.0.1:1", "model"), "MODEL is for replicas"),
    (("--replica-url", "http://127.0.0.1:1", "--prefill-replicas", "1"), "--prefill-replicas is for processes"),
    (("--decode-replicas", "1"), "give both"), (("--prefill-replicas", "1", "--replicas", "2"), "without roles"),
    (("--prefill-replicas", "200", "--decode-replicas", "200"), "at most 256 together"),
    (("--prefill-replicas", "1", "--kv-transfer-config", SENDS), "sets it for each process"),
    (("--kv-transfer-config", SENDS), "use --prefill-replicas")])
def test_what_replicas_cannot_share_is_refused(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["scale", *arguments]) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "why"), [
    (("--replicas", "0"), "--replicas"), (("--router", "best"), "--router"), (("--max-wait", "0"), "--max-wait"),
    (("--replica-url", "https://x"), "--replica-url"), (("--replica-url", "http://x/path"), "--replica-url"),
    (("--kv-transfer-config", "{}"), "kv_connector is missing"), (("--prefill-replicas", "0"), "--prefill-replicas"),
    (("--max-num-sequences", "2"), "did you mean --max-num-seqs")])
def test_a_wrong_argument_is_one_line(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["scale", *arguments])
    said = capsys.readouterr().err
    assert why in said and said.startswith("slotwise scale: ") and said.count("\n") == 1


def test_roles_name_where_producers_listen() -> None:
    options = roles(2, 3)
    configs = [KVTransferConfig.of(json.loads(config)) for _, config in options]
    assert [config.kv_role for config in configs] == [PRODUCER, PRODUCER, CONSUMER]
    assert all(configs[2].accepts(config.kv_ip, config.kv_port) for config in configs[:2])
    assert configs[0].kv_port != configs[1].kv_port


def test_processors_are_divided() -> None:
    assert shares([0, 1], 1) == [[]]
    assert shares([0, 1, 2, 3, 4], 2) == [["--cpu-bind", "0,1"], ["--cpu-bind", "2,3,4"]]
    assert shares([3], 2) == [["--cpu-threads", "1", "--cpu-bind", "none"]] * 2
