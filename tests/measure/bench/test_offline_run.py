"""A workload through an engine: the step counts that theory demands, arrivals by the clock, closed loops, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lengths import FIXED, SLOTS, TABLE, drawn
from support.virtual import STEP_NS, arriving, queued, stand

from slotwise.measure.bench import theory
from slotwise.measure.bench.comparison import DISCIPLINES
from slotwise.measure.bench.offline_run import objection, run_offline, warm_up
from slotwise.measure.workload.workloads import Workload, WorkRequest

REQUESTS = 42  # of a draw: the last groups are not full, at 32 slots


def decode_steps(lengths: list[int], discipline: str, slots: int, *, counting: bool = False) -> int:
    engine = stand({"batching": discipline, "max_num_seqs": slots}, counting=counting, num_blocks=32 * 256)
    entry = run_offline(engine, queued(lengths)).entry()
    assert entry["steps"] == entry["decode_steps"]
    assert entry["output_tokens"] == sum(lengths)
    return entry["decode_steps"]


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("name", TABLE)
def test_steps_are_exactly_those_of_theory(name: str, slots: int) -> None:
    lengths = drawn(name, REQUESTS)
    static = decode_steps(lengths, "static", slots, counting=True)
    continuous = decode_steps(lengths, "continuous", slots, counting=True)
    assert static == theory.static_steps(lengths, slots)
    assert continuous == theory.continuous_steps(lengths, slots)
    assert (static / continuous == 1.0) == (name == FIXED)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 5), st.sampled_from(DISCIPLINES))
def test_every_discipline_has_the_steps_of_theory(lengths: list[int], slots: int, discipline: str) -> None:
    """On the executor that checks every token it reads."""
    assert decode_steps(lengths, discipline, slots) == theory.DECODE_STEPS[discipline](lengths, slots)


def test_requests_arrive_by_the_clock() -> None:
    """The second comes long after the first has ended: nobody waits, and the time between is not measured as steps."""
    accounts = run_offline(stand({}), arriving([0.0, 5.0], [3, 3]))
    entry = accounts.entry()
    assert entry["steps"] == 6
    assert entry["ttft"]["max"] < 0.02
    assert 5.0 < entry["seconds"] < 5.1


def test_a_request_that_came_during_a_step_waited_from_then_on() -> None:
    step = STEP_NS * 1e-9
    accounts = run_offline(stand({}), arriving([0.0, step / 2], [4, 1]))
    first, second = sorted(accounts.entry()["ttft_values"])
    assert first == pytest.approx(0.011, abs=1e-4)  # one step of one row
    assert second == pytest.approx(0.011 - step / 2 + 0.012, abs=1e-4)  # the rest of that step, and one of two rows


def test_a_closed_loop_keeps_its_users_busy() -> None:
    requests = tuple(WorkRequest(number, None, 1, 4) for number in range(7))
    entry = run_offline(stand({"max_num_seqs": 4}), Workload(requests, 4, users=2)).entry()
    assert entry["max_rows"] == 2
    assert entry["steps"] == 4 * 4  # pairs of users in lockstep, and one of them a last time
    assert entry["output_tokens"] == 28


def test_a_window_is_slept_through() -> None:
    accounts = run_offline(
        stand({"batching": "dynamic", "max_wait_ms": 200.0}), arriving([0.0, 0.1], [2, 2]))
    entry = accounts.entry()
    assert entry["steps"] == 2  # both in one batch
    assert entry["ttft"]["max"] == pytest.approx(0.2 + 2 * 0.012, abs=2e-3)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_warm_engine_ends_as_it_began(discipline: str) -> None:
    workload = queued([5, 9, 2, 7, 4], [40, 3, 25, 8, 100])
    cold = run_offline(stand({"batching": discipline}), workload)
    warmed = stand({"batching": discipline})
    warm_up(warmed, workload)
    warm = run_offline(warmed, workload)
    assert warm.outputs == cold.outputs
    for measure in ("steps", "decode_steps", "occupancy", "seconds", "waste"):
        assert warm.entry()[measure] == pytest.approx(cold.entry()[measure])


def test_what_cannot_run_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"request 1 of the workload: .* cache of 64"):
        run_offline(stand({}, num_blocks=4), queued([2, 2], [10, 100]))
    limits = stand({}).limits
    assert not objection(queued([96], [4000]), limits)
    assert "exceed max_model_len 4096" in objection(queued([97], [4000]), limits)


def test_a_warm_up_leaves_nothing_of_the_workload_in_a_prefix_cache() -> None:
    workload = queued([4, 4], [64, 64])
    engine = stand({}, prefix_caching=True)
    warm_up(engine, workload)
    assert run_offline(engine, workload).prompt_times.by_x.keys() == {128}  # all prompt tokens are computed
    assert run_offline(engine, workload).prompt_times.by_x.keys() != {128}  # now they are known
