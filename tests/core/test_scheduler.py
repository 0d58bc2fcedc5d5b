"""The scheduler, one behavior at a time."""

from __future__ import annotations

import pytest
from support.toy import EOS, Driver, alone, next_token, request

from slotwise.core.cache_groups import STATE_WINDOW
from slotwise.core.disciplines.disciplines import Chunked
from slotwise.core.reasons import NO_BLOCKS, NO_SLOT, TOKEN_BUDGET
from slotwise.core.record import RowKind, StepResult
from slotwise.core.request import IllegalTransition, State
from slotwise.core.scheduler_limits import SchedulerLimits


def limits(**changes: object) -> SchedulerLimits:
    numbers = {
        "max_model_len": 64, "num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return SchedulerLimits(**(numbers | changes))


def lasting(name: str, num_prompt: int = 3, max_tokens: int = 8):
    """A request that only its length ends."""
    return request(name, [1 + i % 7 for i in range(num_prompt)], max_tokens, ignore_eos=True)


def test_a_freed_slot_is_refilled_at_the_very_next_step():
    driver = Driver(limits(max_num_seqs=2))
    for name, length in (("short", 2), ("long", 9), ("next", 3)):
        driver.add(lasting(name, max_tokens=length))
    driver.plan()
    driver.commit()
    driver.plan()
    driver.commit()
    assert driver.ended == {"short": "length"}
    plan = driver.plan()
    assert plan.request_ids == ("long", "next")
    assert plan.new_requests[0].slot == 0 and plan.released_slots == (0,)


def test_decode_rows_and_a_chunk_of_a_long_prompt_share_a_step():
    driver = Driver(limits(max_num_batched_tokens=8, max_num_seqs=4))
    driver.add(lasting("decoding"))
    driver.plan()
    driver.commit()
    driver.add(lasting("long", num_prompt=20))
    plan = driver.plan()
    assert plan.counts == (1, 7) and plan.num_logits == (1, 0) and plan.kinds == (RowKind.DECODE, RowKind.PREFILL)
    driver.commit()
    driver.add(lasting("behind"))
    counts = [driver.plan().counts]
    driver.commit()
    counts.append(driver.plan().counts)
    assert counts[0] == (1, 7), "the budget is spent; the newcomer waits"
    assert counts[1] == (1, 6, 1)


def test_a_threshold_cuts_long_prompts_so_that_others_join_beside_them():
    driver = Driver(limits(), Chunked(5))
    driver.add(lasting("long", num_prompt=20))
    driver.add(lasting("short", num_prompt=4))
    assert driver.plan().counts == (5, 4)


def test_a_long_prompt_never_stalls_rows_behind_it():
    driver = Driver(limits(max_num_batched_tokens=8, max_num_seqs=4), Chunked(6))
    driver.add(lasting("first", num_prompt=40))
    driver.add(lasting("second", num_prompt=2))
    driver.plan()
    driver.commit()
    driver.add(lasting("third", num_prompt=30))
    driver.plan()
    driver.commit()
    plan = driver.plan()
    assert dict(zip(plan.request_ids, plan.counts, strict=True)) == {"first": 6, "second": 1, "third": 1}


@pytest.mark.parametrize(("changes", "blocker", "reason"), [
    ({"max_num_seqs": 1}, 3, NO_SLOT),
    ({"max_num_batched_tokens": 4}, 4, TOKEN_BUDGET),
    ({"num_blocks": 4, "block_size": 2, "max_model_len": 9}, 5, NO_BLOCKS),
])
def test_whoever_waits_is_told_why(changes, blocker, reason):
    driver = Driver(limits(**changes))
    driver.add(lasting("blocker", num_prompt=blocker, max_tokens=2))
    driver.add(lasting("blocked", num_prompt=4, max_tokens=2))
    driver.add(lasting("behind", num_prompt=1, max_tokens=2))
    plan = driver.plan()
    assert plan.stop == (reason, "blocked", 1, None)
    assert plan.refused == (("blocked", reason),)


def test_a_preempted_request_keeps_what_it_sampled_and_computes_it_again():
    driver = Driver(limits(num_blocks=5, block_size=2, max_model_len=11))
    first, second = lasting("first", 3, 6), lasting("second", 3, 6)
    driver.add(first)
    driver.add(second)
    driver.run()
    assert driver.preempted.count("second") >= 1 and "first" not in driver.preempted
    assert driver.output["first"] == alone(first, driver.limits)
    assert driver.output["second"] == alone(second, driver.limits)
    rejoined = [join for plan in driver.plans for join in plan.new_requests if join.request_id == "second"][1]
    assert len(rejoined.tokens) > rejoined.num_prompt == 3


def test_a_preempted_row_in_flight_keeps_the_token_it_sampled():
    driver = Driver(limits(num_blocks=5, block_size=2, max_model_len=11))
    driver.add(lasting("first", 3, 6))
    driver.add(lasting("second", 3, 6))
    driver.plan()
    while not driver.preempted:
        driver.plan()
        if not driver.preempted:
            driver.commit()
    before = len(driver.output["second"])
    driver.commit()
    assert len(driver.output["second"]) == before + 1
    driver.run()
    assert len(driver.output["second"]) == 6


def test_a_row_that_ends_while_planned_again_is_void_and_counted():
    driver = Driver(limits())
    prompt = next([a, b] for a in range(1, 23) for b in range(23) if next_token([a, b]) == EOS)
    driver.add(request("ends", prompt, 8))
    driver.plan()
    driver.plan()
    driver.commit()
    assert driver.ended == {"ends": "stop"}
    outcome = driver.scheduler.commit(driver.flying.pop(0), driver.executor.collect(), 2.0)
    assert outcome.tokens == ((),), "its token is dropped"


def test_rows_certain_to_end_by_length_are_not_planned_again():
    driver = Driver(limits())
    driver.add(lasting("one", max_tokens=1))
    driver.plan()
    plan = driver.plan()
    assert plan.num_rows == 0 and plan.refused == (("one", "ending"),)


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "in flight", "preempted"])
def test_an_abort_in_any_state_gives_everything_back(when):
    driver = Driver(limits(num_blocks=5, block_size=2, max_model_len=11), Chunked(2))
    driver.add(lasting("other", 3, 6))
    driver.add(lasting("aborted", 3, 6))
    if when != "waiting":
        driver.plan()
        if when != "in flight":
            driver.commit()
    for _ in range({"decoding": 2, "preempted": 50}.get(when, 0)):
        if when == "preempted" and driver.preempted:
            break
        driver.plan()
        driver.commit()
    driver.finish("aborted")
    assert driver.ended["aborted"] == "abort"
    driver.finish("aborted")
    driver.run()
    assert driver.ended == {"aborted": "abort", "other": "length"}
    assert driver.scheduler.num_free_blocks == 5
    assert driver.output["other"] == alone(lasting("other", 3, 6), driver.limits)


@pytest.mark.parametrize(("num_prompt", "max_tokens", "says"), [
    (0, 4, "no tokens"),
    (64, 4, "at most 64"),
    (40, 20, "cache of 40"),
])
def test_what_can_never_fit_is_refused_at_the_door(num_prompt, max_tokens, says):
    driver = Driver(limits(num_blocks=10, block_size=4))
    driver.add(lasting("impossible", num_prompt, max_tokens))
    assert driver.ended == {"impossible": "rejected"}
    assert says in driver.limits.objection(num_prompt, max_tokens)
    assert not driver.scheduler.has_work


def test_the_largest_request_that_fits_runs_to_its_end():
    driver = Driver(limits(num_blocks=10, block_size=4))
    driver.add(lasting("snug", 20, 21))
    driver.run()
    assert driver.ended == {"snug": "length"} and len(driver.output["snug"]) == 21


def test_a_name_in_use_is_refused_and_its_owner_unharmed():
    driver = Driver(limits())
    driver.add(lasting("same"))
    driver.scheduler.add(lasting("same"), 0.0)
    (rejected,) = driver.scheduler.pop_ended()
    assert "already in use" in rejected.message
    driver.run()
    assert driver.ended == {"same": "length"}


def test_a_failed_step_is_forgotten_and_its_rows_planned_again():
    driver = Driver(limits())
    driver.add(lasting("again", max_tokens=4))
    driver.plan()
    driver.commit()
    driver.plan()
    driver.plan()
    assert driver.scheduler.rollback() == ["again"]
    driver.flying.clear()
    driver.executor.collect()
    driver.executor.collect()
    driver.scheduler.check()
    driver.run()
    assert driver.output["again"] == alone(lasting("again", max_tokens=4), driver.limits)


@pytest.mark.parametrize(("windows", "lost"), [((0,), ["first"]), ((0, 8), ["first"]),
                                               ((0, STATE_WINDOW), ["first", "second"])])
def test_recurrent_states_do_not_survive_a_failed_step(windows, lost):
    """Rows of a later step alone go on, unless they have a state that may have advanced."""
    driver = Driver(limits(windows=windows, num_blocks=80, max_num_batched_tokens=4))
    driver.add(lasting("first", num_prompt=4))
    driver.plan()
    driver.add(lasting("second"))
    driver.plan()
    assert [plan.request_ids for plan in driver.plans] == [("first",), ("first", "second")]
    assert driver.scheduler.rollback() == lost


def test_steps_are_committed_in_order_and_at_most_one_is_in_flight():
    driver = Driver(limits())
    driver.add(lasting("any"))
    driver.plan()
    second = driver.plan()
    with pytest.raises(RuntimeError, match="commit a step"):
        driver.plan()
    with pytest.raises(RuntimeError, match="not the next"):
        driver.scheduler.commit(second, StepResult(second.step, ((),)), 1.0)


def test_states_change_along_the_table_only():
    ended = lasting("ended")
    ended.transition(State.RUNNING)
    ended.transition(State.FINISHED)
    with pytest.raises(IllegalTransition, match="FINISHED -> RUNNING"):
        ended.transition(State.RUNNING)


@pytest.mark.parametrize("changes", [
    {"num_blocks": 0}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 3}])
def test_limits_that_nothing_can_run_under_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        limits(**changes)
