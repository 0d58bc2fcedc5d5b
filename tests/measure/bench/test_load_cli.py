"""`slotwise bench` as its users run it: tables, files, refusals, Ctrl-C, and a real server at the other end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from support.fake_server import Behavior, fake_server
from support.live import cli, serving

from slotwise.cli import main
from slotwise.measure.workload import chats


def serve(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    return cli("bench", "serve", "--base-url", url, *words)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command says which does not even begin."""
    assert main(["bench", *words]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_a_run_prints_a_table_and_writes_what_it_measured(tmp_path: Path) -> None:
    path, saved = tmp_path / "result.json", tmp_path / "workload.jsonl"
    with fake_server(Behavior(ttft=0.02, itl=0.01)) as url:
        words = ("--num-prompts", "6", "--output-lengths", "fixed:5", "--seed", "3", "--goodput", "ttft:5000", "e2el:1")
        run = serve(url, *words, "--result-filename", str(path), "--save-workload", str(saved))
        again = serve(url, "--workload", str(saved))
    assert run.returncode == again.returncode == 0, run.stderr + again.stderr
    for words in ("6 of 6 completed", "30 out", "time to first token", "longest gap", "p99", "0.000 requests/s within"):
        assert words in run.stdout
    assert "6 of 6 completed" in again.stdout
    result = json.loads(path.read_text())
    assert (result["status"], result["seed"], result["model_id"]) == ("completed", 3, "fake")
    assert result["environment"]["commit"] and result["environment"]["machine"]
    assert result["output_lens"] == [5] * 6
    assert all(len(itls) == 4 for itls in result["itls"])
    assert result["request_goodput"] == 0.0


def test_a_run_of_which_nothing_came_back_fails_and_says_why() -> None:
    with fake_server(Behavior(kinds=["busy"])) as url:
        run = serve(url, "--num-prompts", "3", "--num-warmups", "0")
    assert run.returncode == 1
    assert "3 rejected" in run.stdout
    assert "3 × 429: this is busy" in run.stdout


def wait_until(url: str, count: int) -> None:
    """Until the fake server has seen so many requests."""
    for _ in range(300):
        with urllib.request.urlopen(f"{url}/seen", timeout=120) as response:
            if len(json.load(response)["bodies"]) >= count:
                return
        time.sleep(0.1)
    raise AssertionError(f"{count} requests never came")


def test_an_interrupted_run_keeps_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with fake_server(Behavior(ttft=0.1, itl=0.02)) as url:
        words = ["--base-url", url, "--num-prompts", "500", "--max-concurrency", "2", "--output-lengths", "fixed:4",
                 "--result-filename", str(path)]
        process = subprocess.Popen(
            [sys.executable, "-m", "slotwise.cli", "bench", "serve", *words], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True)
        wait_until(url, 8)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "(interrupted)" in stdout and "unfinished" in stdout
    assert "Traceback" not in stderr
    result = json.loads(path.read_text())
    assert result["status"] == "interrupted"
    assert 3 <= result["completed"] < 500
    assert result["unfinished"] == 2
    assert result["total_output_tokens"] == 4 * result["completed"]
    assert result["mean_ttft_ms"] >= 99


@pytest.mark.parametrize(("words", "says"), [
    (("serve", "--goodput", "speed:5"), "ttft:MS"),
    (("serve", "--base-url", "localhost"), "http://"),
    (("serve", "--max-concurrency", "4", "--request-rate", "2"), "--max-concurrency"),
    (("serve", "--max-concurrency", "4", "--arrivals", "at-once"), "--max-concurrency"),
    (("serve", "--hidden-lengths", "--no-ignore-eos"), "--ignore-eos"),
    (("serve", "--result-filename", "/nowhere/at/all.json"), "/nowhere/at/all.json"),
    (("serve", "--workload", "/nowhere.jsonl"), "/nowhere.jsonl"),
    (("serve", "--input-lengths", "short"), "fixed:TOKENS"),
    (("throughput", "--output-json", "/nowhere/at/all.json"), "/nowhere/at/all.json"),
    (("throughput", "--model", "/nowhere"), "/nowhere"),
])
def test_what_cannot_be_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str,
) -> None:
    line = refusal(capsys, *words)
    assert line.startswith("slotwise bench: ") and says in line


@pytest.mark.parametrize("command", [("bench",), ("bench", "serve"), ("bench", "throughput"), ("bench", "latency")])
def test_help_reads_well(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert f"usage: slotwise {' '.join(command)}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_throughput_of_the_built_in_model(tmp_path: Path, batching: str) -> None:
    path = tmp_path / "result.json"
    words = ("--num-prompts", "10", "--output-lengths", "uniform:2:20", "--max-num-seqs", "4", "--batching", batching,
             "--device", "reference", "--output-json", str(path))
    assert main(["bench", "throughput", *words]) == 0
    result = json.loads(path.read_text())
    assert (result["status"], result["completed"]) == ("completed", 10)
    assert result["total_output_tokens"] == result["workload"]["output_tokens"]
    assert result["settings"]["batching"] == batching
    assert result["output_tokens_per_second"] == pytest.approx(result["total_output_tokens"] / result["elapsed_time"])


@pytest.mark.slow
def test_latency_of_the_built_in_model(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ("--batch-size", "2", "--output-len", "5", "--num-iters", "3", "--num-iters-warmup", "1")
    assert main(["bench", "latency", *words, "--output-json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 3 and min(result["latencies"]) > 0


@pytest.mark.slow
def test_a_real_server_is_measured_end_to_end(tmp_path: Path) -> None:
    """The built-in model behind `slotwise serve`: every token asked for is counted, whatever text it makes."""
    path = tmp_path / "result.json"
    words = ("--num-prompts", "12", "--input-lengths", "uniform:5:40", "--output-lengths", "uniform:1:30",
             "--arrivals", "gamma:40:2", "--hidden-lengths", "--max-tokens", "64", "--result-filename", str(path))
    with serving(log=tmp_path / "server.log") as live:
        run = serve(live.url, *words)
        chat = serve(live.url, "--endpoint", "/v1/chat/completions", "--num-prompts", "3", "--max-concurrency", "2",
                     "--output-lengths", "fixed:6")
    assert run.returncode == chat.returncode == 0, run.stderr + chat.stderr
    assert "3 of 3 completed" in chat.stdout and "18 out" in chat.stdout
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"], result["rejected"]) == (12, 0, 0)
    assert result["total_output_tokens"] == result["workload"]["output_tokens"] < 12 * 64
    assert result["total_input_tokens"] == result["workload"]["prompt_tokens"]
    assert result["workload"]["max_tokens"] == 64
    assert all(0 < ttft <= e2el for ttft, e2el in zip(result["ttfts"], result["e2els"], strict=True))


def test_chats_are_sent_as_conversations_that_the_model_ends(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with fake_server(Behavior()) as url:
        run = serve(url, "--dataset-name", "chats", "--num-prompts", "5", "--max-tokens", "7", "--seed", "2",
                    "--result-filename", str(path))
        with urllib.request.urlopen(f"{url}/seen", timeout=120) as response:
            warmup, *bodies = json.load(response)["bodies"]
    assert run.returncode == 0, run.stderr
    sent = [[(one["role"], one["content"]) for one in body["messages"]] for body in bodies]
    assert sorted(sent) == sorted(list(one) for one in chats.draw(5, 2))
    assert all(body["max_tokens"] == 7 and "ignore_eos" not in body for body in bodies)
    assert [tuple(one.values()) for one in warmup["messages"]] not in sent, "no measured chat may be cached already"
    result = json.loads(path.read_text())
    assert result["endpoint_type"] == "/v1/chat/completions"
    assert result["workload"]["prompt_tokens"] == sum(result["input_lens"])
    assert result["workload"]["output_tokens"] == sum(result["output_lens"])


@pytest.mark.parametrize("words", [
    ("--endpoint", "/v1/completions"), ("--hidden-lengths",), ("--text-prompts",), ("--vocab-size", "100")])
def test_options_without_effect_on_chats_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"leave out {words[0]}" in refusal(capsys, "serve", "--dataset-name", "chats", *words)
