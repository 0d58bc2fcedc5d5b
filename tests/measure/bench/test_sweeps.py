"""Sweeps on engines without a model: measured steps are those of theory, step times those of the virtual engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.lengths import drawn
from support.virtual import ROW_NS, STEP_NS, TOKEN_NS, stand

from slotwise.measure.bench import sweeps
from slotwise.measure.bench.offline_run import Stand


def counting(settings: Mapping[str, Any]) -> Stand:
    return stand(settings, counting=True, num_blocks=32 * 256)


def series(sweep: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    return {one["label"]: one["points"] for one in sweep["series"]}


def test_output_cv_measures_what_theory_says() -> None:
    told: list[str] = []
    sweep = sweeps.output_cv(counting, slots=8, num_requests=60, mean=24, on_point=told.append)
    found = series(sweep)
    assert found["steps, measured"] == found["steps, theory"]
    assert found["steps, measured"][0] == [0.0, 1.0]
    assert found["time, measured"][0] == [0.0, pytest.approx(1.0)]
    variations = [at for at, _ in found["steps, measured"]]
    assert variations == sorted(variations)
    assert variations[-1] > 0.8
    assert found["steps, measured"][-1][1] > 1.5
    assert len(told) == len(variations)
    assert any("the control" in note and "1.00x the steps" in note for note in sweep["notes"])


def test_slots_measures_what_theory_says_and_its_control() -> None:
    lengths = [max(1, length // 4) for length in drawn("exponential mean 128, at most 512", 96)]
    sweep = sweeps.number_of_slots(counting, lengths, on_point=lambda what: None)
    found = series(sweep)
    assert [at for at, _ in found["steps, measured"]] == list(sweeps.SLOTS)
    assert found["steps, measured"] == found["steps, theory"]
    assert found["steps, fixed lengths (control)"] == [[slots, 1.0] for slots in sweeps.SLOTS]
    assert all(steps > 1.2 for _, steps in found["steps, measured"])
    assert all("control" in note and "1.00x the steps" in note for note in sweep["notes"])


@pytest.mark.parametrize(("wanted", "max_model_len", "mean"), [(48.2, 4096, 48), (500.0, 1024, 63), (3.0, 10, 1)])
def test_means_are_cut_to_what_a_sequence_holds(wanted: float, max_model_len: int, mean: int) -> None:
    assert sweeps.fitting_mean(wanted, max_model_len) == mean


def test_rows_find_the_knee() -> None:
    """A step of the virtual engine takes 10 ms and 1 ms a row: 10 rows are level with it."""
    sweep = sweeps.rows(counting, on_point=lambda what: None)
    found = series(sweep)
    assert f"knee is at a/b = {STEP_NS // ROW_NS} rows" in sweep["notes"][0]
    for rows, tokens_per_second in found["decode, all users"]:
        assert tokens_per_second == pytest.approx(rows / ((STEP_NS + ROW_NS * rows) * 1e-9))
    assert found["decode, each user"][0] == found["decode, all users"][0]
    alone = sweeps.ROW_PROMPT / ((STEP_NS + ROW_NS + TOKEN_NS * (sweeps.ROW_PROMPT - 1)) * 1e-9)
    prompts = found[f"prefill, prompts of {sweeps.ROW_PROMPT} tokens"]
    assert prompts[0] == [1, pytest.approx(alone)]
    decode = found["decode, all users"]
    assert prompts[-1][1] / prompts[0][1] < decode[-1][1] / decode[0][1] / 2


def test_prefill_modes_beside_each_other() -> None:
    """Whole prompts make long steps, pieces short ones; where decode pauses, streams wait longest."""
    sweep = sweeps.prefill(stand, on_point=lambda what: None)
    found = series(sweep)
    assert list(found) == ["alone", "inline", "chunked"]
    longest = {mode: points[-1][1] for mode, points in found.items()}
    whole = (STEP_NS + TOKEN_NS * sweeps.LONG_PROMPT) * 1e-6  # milliseconds
    pieces = (STEP_NS + ROW_NS * 10 + TOKEN_NS * sweeps.STEP_TOKENS) * 1e-6
    assert longest["alone"] > 0.99 * whole
    assert longest["inline"] > 0.99 * whole
    assert longest["chunked"] < pieces
    assert [note.split(":")[0] for note in sweep["notes"]] == ["alone", "inline", "chunked"]
    assert all(points[0][0] == 50 and points[-1][0] == 100 for points in found.values())
