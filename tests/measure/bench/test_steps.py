"""`slotwise bench steps`: its loads have steps of all sizes, and its log is a machine of the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.virtual import stand

from slotwise.cli import main
from slotwise.core.record import StepRecord
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import Work
from slotwise.measure.bench.steps import MOST, loads, run_steps
from slotwise.measure.simulate.recorded import read_recording
from slotwise.observe.log_file import read_file


def limits(slots: int, longest: int = 4096) -> SchedulerLimits:
    return SchedulerLimits(
        max_model_len=longest, num_blocks=1000, block_size=16, max_num_seqs=slots, max_num_batched_tokens=512)


def test_loads_fit_the_engine_and_have_one_user_to_as_many_as_slots():
    users = {recipe.arrivals.users for recipe in loads(limits(16))}
    assert users == {1, 2, 4, 8, 16}
    assert all(recipe.num_requests * recipe.inputs.longest <= MOST for recipe in loads(limits(16)))
    assert max(recipe.inputs.longest for recipe in loads(limits(16, longest=100))) == 64
    assert not list(loads(limits(4, longest=30)))


def test_loads_run_until_the_time_is_over_and_then_no_other_begins():
    passed: list[float] = []
    result = run_steps(stand({"max_num_seqs": 4}, counting=True), 20.0, passed.append)
    assert result["status"] == "completed" and result["steps"] == len(passed)
    assert passed == sorted(passed) and 20.0 <= passed[-1] == result["seconds"] < 60.0
    with pytest.raises(ValueError, match="no load"):
        run_steps(stand({"max_num_seqs": 4}, num_blocks=1), 1.0, passed.append)


def test_the_log_is_a_machine_whose_steps_take_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
):
    path = tmp_path / "steps"
    arguments = ["--max-num-seqs", "4", "--max-model-len", "256", "--kv-cache-memory", "64M"]
    assert main(["bench", "steps", "--seconds", "1", "--event-log", str(path), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "decode, 4 rows" in shown and "decode, 16 rows" not in shown and "prompt of 64 tokens" in shown
    setup, _ = read_recording(read_file(path))
    steps = [entry for entry in read_file(path) if isinstance(entry, StepRecord)]
    assert {len(step.plan.slots) for step in steps} >= {1, 2, 4}
    assert setup.limits.max_num_seqs == 4 and 0 < setup.pace.step(Work(4, 4, 256, 0.0)) < 1
    assert main(["simulate", "--machine", str(path), "--num-prompts", "5", "--input-lengths", "fixed:20",
                 "--output-lengths", "fixed:4"]) == 0
