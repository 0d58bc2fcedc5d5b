"""A comparison seen by clients: what their answers add up to, and a server of one's own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.virtual import arriving

from slotwise.measure.bench import server_run
from slotwise.measure.bench.load_generator import LoadResult
from slotwise.measure.bench.measures import COMPLETED, FAILED, RequestOutcome
from slotwise.measure.bench.server_run import BenchServer, reschedule, run_online, serving


def answered(monkeypatch: pytest.MonkeyPatch, *outcomes: RequestOutcome, interrupted: bool = False) -> None:
    """Have the server and the load generator answer so."""
    monkeypatch.setattr(server_run, "reschedule", lambda target, settings: {"max_num_seqs": 4})
    monkeypatch.setattr(server_run, "resolve", lambda target: (target, 100))
    monkeypatch.setattr(
        server_run, "measure", lambda *arguments, **options: LoadResult(list(outcomes), 2.0, interrupted))


def run() -> dict[str, Any]:
    target = server_run.BenchTarget("http://localhost")
    found = run_online(target, arriving([0.0, 0.5], [3, 4]), {"batching": "static"})
    assert sum(found.lengths) == found.entry["output_tokens"]
    return found.entry


def test_answers_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer comes whole: one event with four tokens."""
    answered(
        monkeypatch, RequestOutcome(0, COMPLETED, 0.0, 0.1, (0.4, 0.5, 0.8), 0.8, 5, 3),
        RequestOutcome(1, COMPLETED, 0.5, 0.5, (2.0,), 2.0, 5, 4))
    entry = run()
    assert entry["num_slots"] == 4
    assert entry["output_throughput"] == 3.5
    assert entry["request_throughput"] == 1.0
    assert entry["ttft_values"] == pytest.approx([0.3, 1.5])
    assert entry["itl_values"] == pytest.approx([0.1, 0.3])
    assert entry["e2e"]["max"] == pytest.approx(1.5)
    assert entry["cumulative"] == [[0.0, 0.0], [0.4, 1.0], [0.5, 2.0], [0.8, 3.0], [2.0, 7.0]]
    assert entry["waste"] is entry["chart"] is entry["occupancy"] is None


def test_an_answer_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, RequestOutcome(0, FAILED, 0.0, 0.0, error="the stream broke"))
    with pytest.raises(RuntimeError, match="request 0 failed: the stream broke"):
        run()


def test_an_interrupted_run_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, RequestOutcome(0, COMPLETED, 0.0, 0.1, (0.4,), 0.4, 5, 1), interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        run()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    says = r"ended before it was ready: .*has no config\.json"
    with pytest.raises(RuntimeError, match=says), serving([str(tmp_path)]):
        pass


@pytest.mark.slow
def test_a_server_of_ones_own_obeys_and_ends() -> None:
    with serving(["--max-num-seqs", "4", "--dtype", "float32"]) as served:
        assert isinstance(served, BenchServer)
        assert served.dtype == "float32"
        lines = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert "--dtype float32 --port 0" in lines, "the whole line"
        assert served.target.api_key not in lines, "seen by all users"
        assert reschedule(served.target, {"batching": "static", "batch_size": 2})["batch_size"] == 2
        with pytest.raises(RuntimeError, match=r"the server refuses .* batch_size of 9 needs as many slots"):
            reschedule(served.target, {"batching": "static", "batch_size": 9})
    with pytest.raises(OSError):
        reschedule(served.target, {"batching": "static"})
