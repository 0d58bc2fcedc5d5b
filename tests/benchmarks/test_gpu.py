"""The check for GPUs, where there is none: it says so, and rehearses all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.records import record_of
from test_imports import SERVER

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `benchmarks` is run from the repository's root and never installed

from benchmarks.gpu import machine, parts  # noqa: E402
from benchmarks.gpu.__main__ import SECONDS, main  # noqa: E402
from benchmarks.gpu.figures import judged  # noqa: E402
from benchmarks.gpu.setup import FULL, REHEARSAL  # noqa: E402
from benchmarks.gpu.steps import Span, idle_share, shares  # noqa: E402

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--output", str(folder / "check.json"), *arguments]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_that_is_no_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", command(tmp_path)[2:])
    assert main() == 0
    result = json.loads((tmp_path / "check.json").read_text())
    assert capsys.readouterr().out.startswith("skipped: ")
    assert result["status"] == "skipped" and "no GPU" in result["why"]


BARE = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


FORKED = """
import os, runpy, sys
import torch
import slotwise.compose.engine_builder
from benchmarks.gpu import __main__ as check
from benchmarks.gpu import parts

def finished(arguments, output, budget):
    child = os.fork()
    if child:
        return parts.OK if os.waitpid(child, 0)[1] == 0 else parts.FAILED
    status = 1
    try:
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)

parts._finished = finished
sys.exit(check.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_it_can_be_rehearsed_where_little_but_torch_is_installed(tmp_path):
    """The parts are forked from a process that has imported torch, so that not each of them imports it.

    As processes of their own they are tested below, and so is a check that is killed.
    """
    (tmp_path / "sitecustomize.py").write_text(BARE.format(absent=(*SERVER, "psutil", "opentelemetry")))
    arguments = command(tmp_path, "--rehearse", "--seconds", "3000")
    arguments[1:3] = "-c", FORKED
    run = subprocess.run(arguments, cwd=ROOT, env=PARTS_ENVIRONMENT | {
        "PYTHONPATH": f"{PARTS_ENVIRONMENT['PYTHONPATH']}{os.pathsep}{tmp_path}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True)
    result = json.loads((tmp_path / "check.json").read_text())
    assert run.returncode == 0 and run.stdout.startswith("kernels: ok"), run.stdout + run.stderr
    assert result["status"] == "completed" and result["environment"]["packages"]["torch"]
    assert result["targets"] == [], "nobody is to take a rehearsal for a measurement"
    found = {name: part["figures"] for name, part in result["parts"].items()}
    assert list(found) == ["kernels", "parity", "serve", "ranks", "shares", "steps", "trace", "peer", "start", "vllm"]
    assert "skipped" in found["serve"]["server"] and "skipped" in found["ranks"]["ranks"]  # packages are hidden here
    assert all(figures["seconds"] > 0 for figures in found["shares"]["shares"].values())
    assert found["kernels"]["tests"]["passed"] and found["parity"]["tests"]["passed"]
    assert list(found["steps"]["decode"]) == [str(rows) for rows in REHEARSAL.rows]
    assert 0 <= found["steps"]["idle"]["share"] < 1
    assert found["trace"]["trace"]["output_tokens"] == found["peer"]["transformers"]["output_tokens"]
    assert found["vllm"]["vllm"]["output_tokens"] == found["trace"]["trace"]["output_tokens"]
    assert found["start"]["start"]["ready_seconds"] < found["start"]["start"]["recorded_seconds"]
    graphs = found["start"]["graphs"]
    assert graphs["captured"] == found["start"]["start"]["sizes"] == 4  # of 1, 2, 4 and 8 rows
    assert graphs["measured_bytes"] == graphs["predicted_bytes"] > 0 and "4 graphs: predicted" in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_parts_of_the_server_and_of_ranks():
    found = [parts.run(replace(part, seconds=400.0), rehearse=True, time_left=400.0)  # a busy machine's
             for part in parts.PARTS if part.name in ("serve", "ranks")]
    assert [part["status"] for part in found] == [parts.OK] * 2, found
    server, ranks = found[0]["figures"]["server"], found[1]["figures"]["ranks"]
    assert server["streams"] == 48 and server["left"] == 16 and server["preemptions"] > 0
    assert ranks["by"] == "gloo" and ranks["with_the_same_tokens"] == ranks["requests"] == 8


CHECK = """
import sys
from types import SimpleNamespace
sys.modules["benchmarks.gpu.machine"] = SimpleNamespace(facts=lambda: {"commit": ""})  # which would import torch
from benchmarks.gpu import __main__ as check
from benchmarks.gpu.parts import Part

log, seconds = sys.argv[1:3]
code = "import os, time; print(%r, os.getpid(), file=open({log!r}, 'a')); time.sleep({seconds})".format(**globals())
check.PARTS = [Part(name, (), ("-c", code % name), 100.0) for name in ("first", "second", "third")]
sys.argv[1:] = sys.argv[3:]
sys.exit(check.main())
"""


def test_a_check_that_is_killed_again_and_again_ends(tmp_path):
    """After a part, after the next, and in the last: no part whose line was printed runs again, and none outlives the
    check that began it.
    """
    log, output = tmp_path / "log", tmp_path / "check.json"
    log.touch()

    def begin(seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHECK, str(log), str(seconds), "--rehearse", "--output", str(output),
                   "--commit", "of the test"]  # git may answer late beside other tests
        return subprocess.Popen(command, cwd=ROOT, env=PARTS_ENVIRONMENT, stdout=subprocess.PIPE, text=True)

    said: list[str] = []
    for hangs in (False, False, True):
        log.write_text("")
        with begin(600.0 if hangs else 0.0) as process:
            if hangs:
                wait_until(lambda: log.read_text().endswith("\n"))
            else:
                said += [next(line for line in process.stdout if "already" not in line).partition(":")[0]]
            process.kill()
        wait_until(lambda: not any(is_running(line) for line in log.read_text().splitlines()))
        assert set(said) <= json.loads(output.read_text())["parts"].keys()
    log.write_text("")
    with begin(0.0) as process:
        assert process.wait(100) == 0
    after = [line.split()[0] for line in log.read_text().splitlines()]
    result = json.loads(output.read_text())
    assert result["status"] == "completed" and list(result["parts"]) == ["first", "second", "third"]
    assert not set(said) & set(after)
    with begin(0.0) as process:
        assert process.stdout.readline().startswith("first: ok after"), "a completed check begins anew"


PARTS_ENVIRONMENT = ENVIRONMENT | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def wait_until(holds) -> None:
    ends = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def is_running(line: str) -> bool:
    """Whether the process of a part, by its line in the log, is there and not a zombie."""
    stat = Path(f"/proc/{line.split()[1]}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("code", "budget", "status"), [
    ("pass", 60.0, parts.OK), ("raise SystemExit(3)", 60.0, parts.FAILED),
    ("import time; print('FIGURES {\"a\": 1}', flush=True); time.sleep(600)", 6.0, parts.OUT_OF_TIME)])
def test_a_part_ends_by_itself_or_by_the_clock(code, budget, status):
    part = parts.Part("any", ("-c", code), (), budget)
    found = parts.run(part, rehearse=False, time_left=600.0)
    assert found["status"] == status
    assert found["figures"] == ({"a": 1} if status == parts.OUT_OF_TIME else {})


def test_a_part_is_not_begun_when_little_time_is_left():
    found = parts.run(parts.PARTS[0], rehearse=False, time_left=parts.WORTHWHILE - 1)
    assert found["status"] == parts.SKIPPED and "4 s" in found["why"]


def test_all_parts_fit_the_time_of_the_check():
    *timed, last = parts.PARTS
    assert sum(part.seconds for part in timed) <= SECONDS and last.name == "vllm", "which takes what is left"


def test_idle_is_what_no_span_covers():
    spans = [Span("a", 0, 4), Span("b", 2, 3), Span("a", 6, 8), Span("b", 7, 10)]
    assert idle_share(spans) == pytest.approx(0.2)
    assert shares(spans) == [{"name": "a", "share": 0.6}, {"name": "b", "share": 0.4}]
    with pytest.raises(ValueError, match="saw no work"):
        idle_share([])


def test_targets_are_judged_by_what_was_measured():
    figures = {"decode": {"1": {"of_roofline": 0.9}, "16": {"of_roofline": 0.7}}, "idle": {"share": 0.01},
               "trace": {"output_tokens_per_second": 90.0}}
    met = [target["met"] for target in judged({"steps": {"figures": figures}, "peer": {"status": parts.FAILED}})]
    assert met == [True, False, None, None, None, True, None, None, None]
    others = {"transformers": {"output_tokens_per_second": 20.0}, "vllm": {"output_tokens_per_second": 100.0}}
    met = judged({"a": {"figures": figures}, "b": {"figures": others}})
    assert met[6]["met"] and met[6]["found"] == 4.5 and not met[7]["met"]


def test_a_step_costs_its_weights_and_its_rows_contexts():
    """Llama-3.1-8B: 8.03 billion weights with the table, 128 KiB of cache a token."""
    bounds = machine.Bounds(FULL.model)
    empty = bounds.bytes(record_of(0, 0, 0))
    assert empty == 2 * (8_030_261_248 - 128_256 * 4096)
    record = record_of(0, 0, 0, starts=(1023, 0), counts=(1, 10), tokens=((5,), ()))
    assert bounds.bytes(record) - empty == 1034 * 131_072
    inner = 2 * 11 * FULL.model.layer_weights + 2 * 4096 * 128_256
    assert bounds.operations(record) == inner + (1024 + 55) * 4 * 32 * 4096
