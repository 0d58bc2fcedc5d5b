"""Changing how an engine schedules while it runs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.core.disciplines.batching_settings import KINDS, PREFILLS, Batching
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.scheduling import Scheduling

SLOTS = SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
START = Scheduling(Batching(), max_num_seqs=8, max_num_batched_tokens=32)


def test_another_batching_lets_go_of_what_belonged_to_the_last():
    inline = START.changed({"prefill": "inline", "max_num_seqs": 4}, SLOTS)
    static = inline.changed({"batching": "static"}, SLOTS)
    assert static == Scheduling(Batching("static"), max_num_seqs=4, max_num_batched_tokens=32)
    assert static.changed({"batch_size": 2}, SLOTS).batching == Batching("static", batch_size=2)


@pytest.mark.parametrize(("changes", "says"), [
    ({"max_num_sqs": 4}, "there is no scheduling setting 'max_num_sqs'"),
    ({"batching": "static", "prefill": "inline"}, "prefill belongs to"),
    ({"batching": "static", "batch_size": 5, "max_num_seqs": 4}, "a batch_size of 5 needs"),
    ({"max_num_seqs": 9, "max_num_batched_tokens": 64}, "at most the 8 slots"),
    ({"max_num_seqs": 0}, "max_num_seqs must be a whole number from 1 to"),
    ({"max_num_batched_tokens": 4}, "must be at least max_num_seqs"),
    ({"max_num_seqs": "4"}, "max_num_seqs must be a whole number from 1 to"),
    ({"max_num_seqs": True}, "max_num_seqs must be a whole number"),
    ({"max_num_seqs": None}, "max_num_seqs must be a whole number"),
    ({"long_prefill_token_threshold": 2**70}, "long_prefill_token_threshold must be a whole number from 0 to"),
    ({"long_prefill_token_threshold": None}, "long_prefill_token_threshold must be a whole number from 0 to"),
    ({"batching": 3}, "batching must be one of"),
    ({"batching": None}, "batching must be one of"),
    ({"batching": "dynamic", "max_wait_ms": "soon"}, "max_wait_ms must be a number"),
    ({"batching": "dynamic", "max_wait_ms": float("nan")}, "max_wait_ms must be a number from 0 to"),
])
def test_what_is_wrong_changes_nothing(changes, says):
    with pytest.raises(ValueError) as caught:
        START.changed(changes, SLOTS)
    assert says in str(caught.value)


ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(-3, 70), st.floats(), st.text("ab", max_size=5),
                     st.sampled_from(KINDS + PREFILLS), st.lists(st.integers(), max_size=2))


@given(st.dictionaries(st.sampled_from([*START.as_settings(), "other"]), ANYTHING))
def test_whatever_is_asked_is_in_force_or_refused(changes):
    try:
        changed = START.changed(changes, SLOTS)
    except ValueError as refusal:
        assert "\n" not in str(refusal)
        return
    for name, value in changes.items():
        assert changed.as_settings()[name] == value
    assert changed.discipline() and changed.limits(SLOTS)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(changed), type=Scheduling) == changed, "as the engine reads it"
