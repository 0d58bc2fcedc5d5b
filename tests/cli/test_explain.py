"""`slotwise explain` on a log of a real engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.played import LIMITS, Play

from slotwise.cli import main
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.record import StepRecord
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.event_log import Entry, Run, encode_lines
from slotwise.observe.fold import gather

SETTINGS = Scheduling(Batching(), max_num_seqs=LIMITS.max_num_seqs,
                      max_num_batched_tokens=LIMITS.max_num_batched_tokens)


@pytest.fixture(scope="module")
def play() -> Play:
    return Play(4).run(60)


@pytest.fixture(scope="module")
def path(play: Play, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    path.write_bytes(encode_lines(play.entries))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["explain", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def figures(line: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"[\d,]+\.\d\d(?= )", line)]


def test_a_request_by_any_of_its_names(play: Play, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, path, "r7")
    assert told(capsys, path, "cmpl-r7") == shown == told(capsys, path, "cmpl-r7-7") == told(capsys, path, 7)
    lines = [line for line in shown.splitlines() if line.startswith("│")]
    *parts, (total,) = [figures(line) for line in lines]
    assert total == pytest.approx(play.waited["cmpl-r7-7"] / 1e6, abs=0.01)
    assert sum(part for (part,) in parts) == pytest.approx(total, abs=0.01 * len(parts))
    assert "request 7 (cmpl-r7-7)" in shown and "other" not in shown.replace("others were in its steps", "")


def test_the_slowest_first(play: Play, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, path, "--slowest", 5)
    slowest = sorted(play.waited, key=play.waited.__getitem__, reverse=True)[:5]
    assert re.findall(r"cmpl-r\d+-\d+", shown) == slowest
    assert "The 5 slowest of 60 requests" in shown
    for line in shown.splitlines():
        if "cmpl-" in line:
            total, *parts = figures(line)
            assert sum(parts) == pytest.approx(total, rel=0.01)


def test_a_step(play: Play, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, path, "--step", 12)
    assert shown.startswith("Step 12: ") and "Rows" in shown and "Left out" in shown
    assert "step under way" in shown or "no slot" in shown or "no blocks" in shown or "token budget" in shown


@pytest.mark.parametrize(("arguments", "message"), [
    (["nobody"], "no request in .* is called 'nobody'"), (["--step", "99999"], "there is no step 99999"),
    (["r7", "--step", "1"], "give a request, --slowest or --step")])
def test_what_is_not_there(path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["explain", str(path), *arguments]) == 1
    assert re.search(message, capsys.readouterr().err)


def with_counts(record: StepRecord, count: int) -> StepRecord:
    return record._replace(plans=tuple([
        plan._replace(counts=(count,) * len(plan.counts)) for plan in record.plans]))


@pytest.mark.parametrize(("kind", "changes"), [
    (StepRecord, lambda entry: with_counts(entry, 0)), (StepRecord, lambda entry: with_counts(entry, -1)),
    (StepRecord, lambda entry: entry._replace(inputs=entry.inputs._replace(
        configured=replace(SETTINGS, max_num_batched_tokens=0)))),
    (Run, lambda entry: msgspec.structs.replace(entry, scheduling=replace(SETTINGS, max_num_batched_tokens=0)))])
def test_a_log_with_steps_of_no_tokens_is_refused_in_a_line(
        play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Entry],
        changes: Callable[[Any], Entry]) -> None:
    entries = [changes(entry) if isinstance(entry, kind) else entry for entry in play.entries]
    (tmp_path / "log").write_bytes(encode_lines(entries))
    for arguments in ([], ["7"], ["--step", "3"]):
        assert main(["explain", str(tmp_path / "log"), *arguments]) == 1
        assert re.fullmatch(r"slotwise explain: line \d+: .* no tokens\)\n", capsys.readouterr().err)


def test_a_file_that_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("hello\n")
    assert main(["explain", str(tmp_path / "x")]) == 1 and "is not an entry" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "y")]) == 1
    assert len(gather([])) == 0


def test_when_its_first_token_would_have_come_under_other_settings(
    play: Play, path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    shown = told(capsys, path, "r7", "--set", "scheduling_policy=shortest", "--set", "max_num_seqs=2")
    assert shown.startswith(told(capsys, path, "r7").rpartition("step times")[0])
    found = re.search(r"had cmpl-r7-7 arrived under scheduling_policy shortest, max_num_seqs 2: its first token after "
                      r"([\d.]+) (ms|s) instead of after ([\d.]+) (ms|s)", " ".join(shown.split()))
    assert found is not None, shown
    request = next(one for one in gather(play.entries).values() if one.request.id == "cmpl-r7-7").request
    first = next(entry.ended_ns for entry in play.entries if isinstance(entry, StepRecord) and any(
        tokens for number, tokens in zip(entry.plan.request_ids, entry.tokens,
                                         strict=False) if number == request.number))
    scale = {"ms": 1e-3, "s": 1.0}
    assert float(found[3]) * scale[found[4]] == pytest.approx((first - request.ns) * 1e-9, rel=0.01)
    assert float(found[1]) > 0


def test_a_counterfactual_is_of_one_request(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(path), "--set", "max_num_seqs=2"]) != 0
    assert "name one" in capsys.readouterr().err
