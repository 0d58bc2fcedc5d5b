"""slotwise simulate and what-if, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slotwise import builtin
from slotwise.cli import build_parser, main
from slotwise.core.record import StepRecord
from slotwise.observe.log_file import read_file

SHORT = ["--num-prompts", "30", "--input-lengths", "uniform:20:80", "--output-lengths", "uniform:4:12",
         "--arrivals", "poisson:400", "--seed", "3"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An event log; the simulator writes the same as a server."""
    path = tmp_path_factory.mktemp("log") / "events"
    assert main(["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--max-num-seqs", "4", *SHORT,
                 "--event-log", str(path)]) == 0
    return path


def test_a_machine_of_the_file_serves_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["simulate", "--machine", "epyc", "--model", str(builtin.path()), *SHORT, "--json"]
    assert main([*arguments, str(tmp_path / "one")]) == main([*arguments, str(tmp_path / "two")]) == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    result = json.loads((tmp_path / "one").read_text())
    assert result["figures"]["served"] == 30 and result["figures"]["ttft_p50"] > 0
    assert "first token, p99" in capsys.readouterr().out


def test_sessions_are_replayed_under_each_eviction_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace, result = tmp_path / "trace", tmp_path / "json"
    rows = [{"timestamp": 100 * number, "input_length": 600, "output_length": 3, "hash_ids": [number % 5, 9]}
            for number in range(30)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--enable-prefix-caching",
                 "--sessions", str(trace), "--cache-share", "0.5", "--json", str(result)]) == 0
    found = json.loads(result.read_text())["found"]
    assert found["hindsight"]["found"] > found["lru"]["found"] >= 0 and found.keys() > {"cost", "hinted", "predicted"}
    assert "hindsight" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "named"), [
    (["--sessions", "agents", "--num-prompts", "3"], "--num-prompts"),
    (["--sessions", "agents", "--ttft-ms", "3"], "--ttft-ms"), (["--sessions", "agents", "--save-workload", "f"],
                                                                "--save-workload"),
    (["--cache-share", "0.5"], "--cache-share"), (["--minutes", "5"], "--minutes")])
def test_what_sessions_or_a_workload_would_ignore_is_refused(
        arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]):
    machine = ["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--enable-prefix-caching"]
    assert main([*machine, *arguments]) == 1
    assert named in capsys.readouterr().err


def test_a_log_is_a_machine_with_its_settings(log: Path, tmp_path: Path):
    assert main(["simulate", "--machine", str(log), *SHORT, "--set", "max_num_seqs=2", "--replicas", "2",
                 "--json", str(tmp_path / "json")]) == 0
    result = json.loads((tmp_path / "json").read_text())
    assert result["settings"]["max_num_seqs"] == 2 and result["figures"]["served"] == 30


def test_a_draft_model_makes_few_streams_faster(log: Path, tmp_path: Path):
    workload = ["--num-prompts", "4", "--input-lengths", "fixed:8", "--output-lengths", "fixed:80",
                "--arrivals", "at-once"]
    machine = ["simulate", "--machine", "xeon", "--model", str(builtin.path()), *workload]
    throughput = []
    for given in ([], ["--acceptance", "0.9,0.9,0.8"], ["--acceptance", "0.9,0.9,0.8", "--draft-ms", "1"]):
        assert main([*machine, *given, "--json", str(tmp_path / "json")]) == 0
        throughput.append(json.loads((tmp_path / "json").read_text())["figures"]["output_throughput"])
    assert throughput[1] > 1.3 * throughput[0] and throughput[2] < throughput[1]
    with pytest.raises(SystemExit):
        main([*machine, "--acceptance", "2"])


def test_ranks_and_adapters_of_a_machine_of_the_file(tmp_path: Path):
    file = tmp_path / "json"
    machine = ["simulate", "--machine", "xeon", "--model", str(builtin.path()), *SHORT, "--json", str(file)]

    def first_token(*given: str) -> float:
        assert main([*machine, *given]) == 0
        found = json.loads(file.read_text())["figures"]
        assert found["served"] == 30
        return float(found["ttft_p50"])

    assert first_token("-tp", "2", "--link-us", "5000") > first_token("-tp", "2", "--link-us", "1")
    assert first_token("-pp", "2") > 0
    apart = ["--prefill-replicas", "1", "--decode-replicas", "2"]
    assert first_token(*apart, "--transfer-us", "100") > first_token(*apart)
    assert json.loads(file.read_text())["replicas"] == {"prefill": 1, "decode": 2}
    assert first_token("--adapters", "4", "--max-loras", "4", "--adapter-ms", "2") > first_token()


def test_what_if_shows_what_was_measured_replayed_and_changed(log: Path, tmp_path: Path):
    steps = [entry for entry in read_file(log) if isinstance(entry, StepRecord)]
    assert max(len(step.plan.slots) for step in steps) == 4
    assert main(["what-if", str(log), "--set", "max_num_seqs=1", "--ttft-ms", "50", "--request", "7", "--json",
                 str(tmp_path / "json")]) == 0
    answer = json.loads((tmp_path / "json").read_text())
    figures = answer["groups"]["all requests"]
    assert answer["request"]["what_if"]["first_token"] > answer["request"]["measured"]["first_token"] > 0
    assert figures["replayed"]["ttft_p50"] == pytest.approx(figures["measured"]["ttft_p50"], rel=0.1)
    assert figures["what_if"]["ttft_p99"] > figures["replayed"]["ttft_p99"]


@pytest.mark.parametrize(("arguments", "said"), [
    (["simulate", "--machine", "xeon"], "needs --model"),
    (["simulate", "--machine", "abacus", "--model", str(builtin.path())], "there is no machine"),
    (["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--arrivals", "closed:2"], "closed loop"),
    (["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--set", "slots=2"], "no scheduling setting"),
    (["simulate", "--machine", "LOG", "--draft-ms", "2"], "--acceptance describes"),
    (["simulate", "--machine", "LOG", "--max-loras", "2"], "--max-loras is of the adapters"),
    (["simulate", "--machine", "LOG", "--prefill-replicas", "2"], "go together"),
    (["simulate", "--machine", "LOG", "--transfer-us", "2"], "--transfer-us is of prompts that travel"),
    (["simulate", "--machine", "LOG", "--prefill-replicas", "2", "--decode-replicas", "2", "--replicas", "2"],
     "--replicas is not for servers with roles"),
    (["simulate", "--machine", "LOG", "--link-us", "2"], "--link-us is for a machine of the file"),
    (["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--link-us", "2"], "--link-us is between ranks"),
    (["simulate", "--machine", "LOG", "--model", str(builtin.path())], "--model is for a machine of the file"),
    (["simulate", "--machine", "LOG", "--sessions", "agents", "--replicas", "2"], "--sessions are of one server"),
    (["simulate", "--machine", "LOG", "--sessions", "LOG"], "line 1: not a request of a Mooncake trace"),
    (["what-if", "LOG", "--set", "max_num_seqs=2", "--retain", "a=60"], "the eviction policy lru obeys no retention"),
    (["what-if", "LOG"], "--set NAME=VALUE"),
    (["what-if", "--set", "max_num_seqs=2"], "either an event log or a server"),
    (["what-if", "LOG", "--set", "tiers=[]"], "changes no tiers"),
    (["what-if", "LOG", "--set", "max_num_seqs=2", "--replica", "1"], "--replica is of a router"),
    (["what-if", "--url", "http://127.0.0.1:9", "--set", "max_num_seqs=2"], "http://127.0.0.1:9 cannot be reached"),
    (["what-if", "LOG", "--set", "max_num_seqs=2", "--request", "none"], "no request"),
    (["what-if", "LOG", "--set", "scheduling_policy=slowest"], "scheduling_policy must be one of"),
])
def test_each_error_is_one_line(log: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main([str(log) if word == "LOG" else word for word in arguments]) == 1
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


MACHINE = ["--machine", "epyc", "--model", str(builtin.path()), "--max-num-seqs", "2"]


def test_capacity_names_replicas_and_what_one_more_and_one_fewer_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
):
    assert main(["capacity", *MACHINE, *SHORT, "--slo", "ttft_p95=20ms,tpot_p95=80ms", "--bootstrap", "3",
                 "--plot", str(tmp_path / "knee.svg")]) == 0
    drawn = ElementTree.parse(tmp_path / "knee.svg").getroot()
    assert len(drawn.findall("{*}polyline")) == 1 == len(drawn.findall("{*}circle")), "a curve and its knee"
    shown = capsys.readouterr().out
    assert "replicas of AMD EPYC 9654" in shown and "missed" in shown and "met" in shown


def test_tune_writes_settings_that_serve_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "tuned.yaml"
    assert main(["tune", *MACHINE, *SHORT, "--slo", "ttft_p95=20ms", "--output", str(path)]) == 0
    found = build_parser("serve").parse_args(["serve", "--config", str(path)])
    written = dict(line.split(": ") for line in path.read_text().splitlines())
    assert found.max_num_seqs == int(written["max-num-seqs"]) > 2
    assert found.scheduling_policy == written["scheduling-policy"]


def test_tune_writes_no_limit_as_serve_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "tuned.yaml"
    assert main(["tune", *MACHINE, "--max-stall-ms", "0", "--num-prompts", "1", "--slo", "ttft_p95=20ms", "--output",
                 str(path)]) == 0
    assert "max-stall-ms: 0\n" in path.read_text()
    assert build_parser("serve").parse_args(["serve", "--config", str(path)]).max_stall_ms == 0


@pytest.mark.parametrize("text", ["ttft=1s", "ttft_p99=1", "ttft_p99=1s,tpot_p50=1s", "itl_p99=1s", "ttft_p0=1s"])
def test_an_objective_that_does_not_read_is_refused(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["capacity", *MACHINE, "--slo", text])
    assert "--slo" in capsys.readouterr().err
