"""Damaged logs: an error that names the line, or an answer; never anything else."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.recorded import Recorded

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.record import NO_STEP, StepRecord
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.measure.simulate.replay import ReplayError, replay
from slotwise.observe import event_log, log_file
from slotwise.observe.event_log import Entry, LogError
from slotwise.observe.explain import explain
from slotwise.observe.fold import gather
from slotwise.observe.live_state import LiveState
from slotwise.observe.step_view import step_view, times_of

VALUES: list[Any] = [0, 1, 2, 3, -1, 7, 99, 2**31, 2**53, 2**62, 2**63, 2**70, -(2**63), 1e300, -0.5, "", "stop", None,
                     True, [], [0], [1, 1], [[0]], {}, [2**62] * 5]  # fmt: skip


@lru_cache
def recorded() -> list[Any]:
    """A log with a step-time model in its first entry."""
    times = StepTimeModel()
    for tokens in range(1, 9):
        times.learn(Work(tokens, tokens, 10 * tokens, 0.0, 3), 0.01 * tokens)
    played = Recorded(3, Batching(), depth=1).play(12)
    lines: list[Any] = [json.loads(event_log.encode(entry)) for entry in played]
    lines[0]["learned"] = json.loads(msgspec.json.encode(times.learned()))
    return lines


def lines_of(content: list[Any]) -> list[bytes]:
    return [json.dumps(line).encode() + b"\n" for line in content]


def looked_at(lines: list[bytes]) -> None:
    """All that reads a log reads this one."""
    entries: list[Entry] = list(log_file.read(lines))
    times, timelines = times_of(entries), gather(entries)
    for timeline in timelines.values():
        if timeline.ended:
            explain(timeline, entries, times)
    state = LiveState()
    for entry in entries:
        state.apply(entry)
    for one in [*state.seated(), *state.queue()]:
        assert state.phase(one) is not None and state.reason(one) is not None
    state.rates(state.now_ns)
    for number in {entry.step for entry in entries if isinstance(entry, StepRecord) and entry.step != NO_STEP}:
        if number % 7 == 0:
            step_view(entries, number, times)


def played_again(lines: list[bytes]) -> None:
    replay(log_file.read(lines))


def places(value: Any) -> list[tuple[Any, ...]]:
    """The paths of all values within."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, ...]] = [()]
    for key, one in inner:
        found += [(key, *path) for path in places(one)]
    return found


def changed(line: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    line = deepcopy(line)
    inner = line
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return line


@st.composite
def damaged(draw: st.DrawFn) -> list[Any]:
    """The log with lines changed, left out, repeated and moved."""
    lines = list(recorded())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        what = draw(st.sampled_from(["change", "change", "change", "change", "drop", "repeat", "move"]))
        if what == "drop" and len(lines) > 1:
            del lines[at]
        elif what == "repeat":
            lines.insert(at, lines[draw(st.integers(0, len(lines) - 1))])
        elif what == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        else:
            path = draw(st.sampled_from(places(lines[at])))
            lines[at] = changed(lines[at], path, draw(st.sampled_from(VALUES)))
    return lines


def test_the_log_itself_is_read_and_replayed() -> None:
    looked_at(lines_of(recorded()))
    assert replay(log_file.read(lines_of(recorded()[:1]))).difference is None


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged())
def test_a_damaged_log_is_an_error_or_an_answer(lines: list[Any]) -> None:
    for read in (looked_at, played_again):
        try:
            read(lines_of(lines))
        except (LogError, ReplayError) as error:
            assert str(error).isprintable()


def with_fields(**fields: Any) -> dict[str, Any]:
    """A step of two rows."""
    plan = {"step": 3, "request_ids": [0, 1], "slots": [0, 1], "starts": [0, 0], "counts": [1, 1], "kinds": [1, 1]}
    result = {"step": 3, "tokens": [[1], [2]]}
    for name, value in fields.items():
        (result if name in ("tokens", "failed") else plan)[name] = value
    return {"kind": "step", "started_ns": 5, "ended_ns": 9, "plans": [plan], "result": result}


@pytest.mark.parametrize(("product", "total"), [(1e-300, 1e59), (1e-200, 1e50), (1e-20, 1e10)])
def test_learned_sums_that_give_no_step_times(product: float, total: float) -> None:
    """Of the tokens: each sum alone is valid, and their quotient is a coefficient beyond all measurements."""
    run = deepcopy(recorded()[0])
    sums = {"weight": 1.0, "products": [0.0] * 21, "totals": [1.0, 0.0, total, 0.0, 0.0, 0.0]}
    sums["products"][5] = product
    run["learned"] = {"sizes": {"prompts-1": sums}}
    with pytest.raises(LogError, match=r"line 1: .*its step times cannot be fitted"):
        looked_at(lines_of([run, *recorded()[1:]]))
    sums["products"][5] = total
    looked_at(lines_of([run, *recorded()[1:]]))


@pytest.mark.parametrize(("fields", "told"), [
    ({"slots": []}, "columns of step 3 differ in length"),
    ({"request_ids": [0, 1, 2, 3]}, "columns of step 3 differ in length"),
    ({"tokens": [[1]]}, "columns of step 3 differ in length"),
    ({"padding": [1]}, "columns of step 3 differ in length"),
    ({"request_ids": [1, 1]}, "two rows of one request"),
    ({"counts": [1, 0]}, "a row of step 3 has no tokens"),
    ({"counts": [1, 2**62]}, "out of range"),
    ({"starts": [-1, 0]}, "out of range"),
    ({"held": [2]}, "names a row that it does not have"),
    ({"failed": [9]}, "names a row that it does not have"),
    ({"stop": ["no_slot", 95, 3]}, "stops at a request that it does not name"),
])
def test_a_step_that_contradicts_itself(fields: dict[str, Any], told: str) -> None:
    lines = lines_of([recorded()[0], with_fields()])
    assert len(list(log_file.read(lines))) == 2
    with pytest.raises(LogError, match=f"^line 2: this is not an entry of an event log .*{told}"):
        list(log_file.read(lines_of([recorded()[0], with_fields(**fields)])))


def test_rows_of_many_tokens_are_explained_in_bounded_time() -> None:
    lines = deepcopy(recorded())
    for plan in [plan for line in lines for plan in line.get("plans", ())]:
        plan["counts"] = [2**31] * len(plan.get("counts", ()))
    looked_at(lines_of(lines))


def test_a_line_without_an_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_LINE", 1 << 16)
    log = tmp_path / "log"
    log.write_bytes(lines_of(recorded())[0] + b" " * (1 << 17))
    with pytest.raises(LogError, match="line 2: more than 65536 bytes"):
        list(log_file.read_file(log))


@pytest.mark.parametrize(("name", "value"), [
    ("num_blocks", 10**12), ("num_blocks", 3 * 10**8), ("num_host_blocks", 10**12), ("max_num_seqs", 10**10)])
def test_an_engine_too_large_to_be_replayed(name: str, value: int) -> None:
    run = deepcopy(recorded()[0])
    run["limits"][name] = value
    run["limits"]["max_num_batched_tokens"] = max(value, 64) if name == "max_num_seqs" else 64
    with pytest.raises(LogError, match=f"^line 1: .*{name} (is {value}, more than|must be .*, not {value})"):
        replay(log_file.read(lines_of([run])))
