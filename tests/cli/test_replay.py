"""A log that a real server wrote, through an abort, a change of scheduling and the loss of its engine, is replayed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.live import Live, cli, serving

from slotwise.core.record import StepRecord
from slotwise.observe import log_file

pytestmark = pytest.mark.slow
BODY = {"ignore_eos": True, "temperature": 0.8}


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")


def healthy(live: Live) -> bool:
    return live.client.get("/health").status_code == 200


def ask(live: Live, number: int) -> int:
    body = BODY | {"prompt": f"def number_{number}(self, value):", "n": 1 + number % 2, "max_tokens": 20 + 4 * number}
    return live.client.post("/v1/completions", json=body).status_code


def leave(live: Live) -> None:
    """Ask for a long answer, and go away after its beginning."""
    body = BODY | {"prompt": "class Nobody:", "stream": True, "max_tokens": 400}
    with live.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())


def kill_engine(live: Live) -> None:
    children = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(live.process.pid)], capture_output=True, text=True,
        check=True).stdout
    (found,) = re.findall(r"(\d+) .*compose\.engine_process", children)
    os.kill(int(found), signal.SIGKILL)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    path = folder / "events"
    with serving("--event-log", str(path), "--max-num-seqs", "4", "--max-model-len", "512",
                 log=folder / "stderr") as live, ThreadPoolExecutor(6) as clients:
        leave(live)
        assert set(clients.map(lambda number: ask(live, number), range(6))) == {200}
        changed = live.client.put("/admin/scheduling", json={"batching": "static", "max_num_seqs": 3})
        assert changed.status_code == 200
        assert set(clients.map(lambda number: ask(live, number), range(4))) == {200}
        kill_engine(live)
        eventually(lambda: not healthy(live))
        eventually(lambda: healthy(live))
        assert set(clients.map(lambda number: ask(live, number), range(4))) == {200}
    return path


def test_every_record_of_a_server_comes_out_again(written: Path) -> None:
    entries = list(log_file.read_file(written))
    replayed = cli("replay", str(written))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "byte for byte" in replayed.stdout
    figures = dict(re.findall(r"│ ([a-z ]+?) +│ ([\d,]+) ", replayed.stdout))
    assert figures["engines"] == "2" and figures["requests"] == "22"  # one, then 9, 6 and 6 continuations
    steps = [entry for entry in entries if isinstance(entry, StepRecord)]
    assert int(figures["identical records"].replace(",", "")) == len(steps) - 1  # one was told in a lost engine's name
    assert any(end.reason == "abort" for step in steps for end in step.ended) and any(step.plan.held for step in steps)


def test_a_log_that_was_touched_is_not_taken_for_what_it_was(written: Path, tmp_path: Path) -> None:
    lines = written.read_bytes().splitlines(keepends=True)
    index = next(index for index, line in enumerate(lines) if b'"new_blocks"' in line and index > len(lines) // 2)
    lines[index] = re.sub(rb'"num_free_blocks":\d+', b'"num_free_blocks":1', lines[index])
    touched = tmp_path / "touched"
    touched.write_bytes(b"".join(lines))
    replayed = cli("replay", str(touched))
    assert replayed.returncode == 1 and "num_free_blocks" in replayed.stdout


def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n")
    for name, says in (("text", "line 1"), ("missing", "No such file")):
        replayed = cli("replay", str(tmp_path / name))
        assert replayed.returncode == 1 and says in replayed.stderr and replayed.stderr.count("\n") == 1
