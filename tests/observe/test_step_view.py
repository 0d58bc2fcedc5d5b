"""One step: everybody alive is accounted for."""

from __future__ import annotations

import pytest
from support.played import Play

from slotwise.core.record import StepRecord
from slotwise.observe.event_log import LogError
from slotwise.observe.fold import gather
from slotwise.observe.step_view import step_view, times_of


def test_whoever_lives_ran_or_is_told_why_not() -> None:
    play = Play(11).run(120, leaving=0.0)
    entries = play.entries
    timelines, times = gather(entries), times_of(entries)
    kinds, states = set(), set()
    for step in (entry for entry in entries if isinstance(entry, StepRecord) and entry.step >= 0):
        shown = step_view(entries, step.step, times)
        assert shown.step is step and [row.number for row in shown.rows] == list(step.plan.request_ids)
        living = {number for number, one in timelines.items()
                  if one.taken_ns < step.started_ns < one.ended_ns and number not in step.plan.request_ids}
        known = {one.number: one for one in shown.left_out if one.state != "arriving"}
        gone = {end.request_id for end in step.ended}  # who was too late was not even looked at
        assert living - gone == known.keys() - gone
        assert all(one.reason for one in shown.left_out)
        kinds.update(row.what for row in shown.rows)
        states.update(one.state for one in shown.left_out)
        joined = {row.number: row.cached for row in shown.rows if row.cached >= 0}
        assert joined == {one.request_id: one.num_cached for one in step.admitted}
        if step.plan.request_ids and step.step > 100:
            assert shown.predicted * 1e9 == pytest.approx(step.ended_ns - step.started_ns, rel=0.25)
    assert kinds == {"prefill", "decode", "recompute"} and states == {"waiting", "preempted", "arriving"}


def test_a_step_that_is_not_there_is_said_so() -> None:
    play = Play(1).run(3)
    with pytest.raises(LogError, match="there is no step 9999; the last is"):
        step_view(play.entries, 9999, times_of(play.entries))
    with pytest.raises(LogError, match="there are no steps"):
        step_view(play.entries[:1], 0, times_of([]))
