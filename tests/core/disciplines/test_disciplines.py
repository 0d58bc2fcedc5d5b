"""Each discipline by hand: who runs beside whom, who waits for what, what is computed for nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.toy import Driver, request

from slotwise.core.disciplines.disciplines import Chunked, Dynamic, Inline, OneAtATime, Orca, PromptsAlone, Static
from slotwise.core.reasons import BATCH_RUNNING, NO_BLOCKS, ONE_AT_A_TIME, PROMPTS_ALONE, WINDOW_OPEN
from slotwise.core.record import StepPlan
from slotwise.core.scheduler_limits import SchedulerLimits


def limits(**changes: int) -> SchedulerLimits:
    numbers = {"max_model_len": 64, "num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return SchedulerLimits(**{**numbers, **changes})


def lasting(name: str, num_prompt: int, num_output: int):
    return request(name, [1] * num_prompt, num_output, ignore_eos=True)


def rows(plan: StepPlan) -> dict[str, int]:
    return dict(zip(plan.request_ids, plan.counts, strict=True))


def step(driver: Driver) -> StepPlan:
    plan = driver.plan()
    driver.commit()
    return plan


def test_one_at_a_time_gives_the_machine_to_whoever_came_first():
    driver = Driver(limits(), OneAtATime())
    for name in "ab":
        driver.add(lasting(name, 3, 2))
    first = step(driver)
    assert rows(first) == {"a": 3} and first.stop[:2] == (ONE_AT_A_TIME, "b")
    assert rows(step(driver)) == {"a": 1}
    assert rows(step(driver)) == {"b": 3}


def test_a_static_batch_is_padded_to_its_longest_prompt_and_exceeds_the_budget_of_a_step():
    driver = Driver(limits(), Static(3))
    for name, num_prompt in (("a", 2), ("b", 9), ("c", 5), ("d", 1)):
        driver.add(lasting(name, num_prompt, 3))
    plan = step(driver)
    assert rows(plan) == {"a": 2, "b": 9, "c": 5} and plan.padding == (7, 0, 4) and plan.num_tokens == 27
    assert plan.stop[:2] == (BATCH_RUNNING, "d")
    assert step(driver).padding == ()


def test_a_static_batch_returns_as_one_and_computes_who_has_ended_until_then():
    driver = Driver(limits(), Static(2))
    driver.add(lasting("short", 3, 1))
    driver.add(lasting("long", 3, 3))
    driver.add(lasting("next", 3, 1))
    assert step(driver).held == ()
    plan = step(driver)
    held = plan.request_ids.index("short")
    assert rows(plan) == {"short": 1, "long": 1} and plan.held == (held,)
    assert (plan.starts[held], plan.starts[1 - held]) == (2, 3), "a held row computes its last place again"
    assert driver.ended == {} and driver.output == {}, "nothing is told before the batch has drained"
    step(driver)
    assert driver.ended == {"short": "length", "long": "length"}
    assert [len(driver.output[name]) for name in ("short", "long")] == [1, 3]
    assert rows(step(driver)) == {"next": 3}


def test_an_aborted_member_leaves_at_once_and_the_batch_goes_on():
    driver = Driver(limits(), Static(2))
    for name in ("gone", "stays"):
        driver.add(lasting(name, 3, 3))
    step(driver)
    driver.finish("gone")
    assert rows(step(driver)) == {"stays": 1}
    driver.run()
    assert driver.ended == {"gone": "abort", "stays": "length"} and "gone" not in driver.output


def test_the_last_one_running_may_leave_those_who_are_held():
    driver = Driver(limits(), Static(2))
    driver.add(lasting("held", 3, 1))
    driver.add(lasting("long", 3, 9))
    step(driver)
    driver.finish("long")
    driver.run()
    assert driver.ended == {"long": "abort", "held": "length"} and len(driver.output["held"]) == 1


def test_a_dynamic_batch_starts_when_it_is_full():
    driver = Driver(limits(), Dynamic(2, max_wait=10.0))
    driver.add(lasting("a", 3, 1))
    waiting = driver.plan()
    assert rows(waiting) == {} and waiting.stop == (WINDOW_OPEN, "a", 0, 10.0)
    driver.add(lasting("b", 3, 1))
    driver.commit()
    assert rows(driver.plan()) == {"a": 3, "b": 3}


def test_a_dynamic_batch_starts_when_its_first_request_has_waited_long_enough():
    driver = Driver(limits(), Dynamic(3, max_wait=10.0))
    driver.add(lasting("a", 3, 1))
    driver.now = 9.0
    driver.add(lasting("b", 3, 1))
    assert rows(step(driver)) == {}
    driver.now = 10.0
    assert rows(step(driver)) == {"a": 3, "b": 3}


def test_orca_reserves_for_the_longest_answer_and_keeps_others_out():
    few = limits(num_blocks=4, max_model_len=17)  # sixteen places
    for discipline, joined in ((Orca(), {"a"}), (Inline(), {"a", "b"})):
        driver = Driver(few, discipline)
        driver.add(lasting("a", 4, 8))
        driver.add(lasting("b", 4, 8))
        plan = driver.plan()
        assert set(plan.request_ids) == joined
        assert (plan.stop is not None and plan.stop.reason == NO_BLOCKS) == (len(joined) == 1)


def test_orca_is_never_preempted_where_pages_are():
    few = limits(num_blocks=4, max_model_len=17)
    preempted = []
    for discipline in (Orca(), Inline()):
        driver = Driver(few, discipline)
        for name in "ab":
            driver.add(lasting(name, 4, 12))
        driver.run()
        preempted.append(len(driver.preempted))
    assert preempted[0] == 0 < preempted[1]


def test_a_prompt_beside_decode_in_pieces_whole_or_alone():
    shapes = {}
    for discipline in (Chunked(), Inline(), PromptsAlone()):
        driver = Driver(limits(max_num_batched_tokens=8), discipline)
        driver.add(lasting("decodes", 2, 9))
        step(driver)
        driver.add(lasting("prompt", 12, 2))
        plan = driver.plan()
        shapes[type(discipline)] = rows(plan)
        assert bool(plan.refused) == (type(discipline) is PromptsAlone)
    assert shapes == {
        Chunked: {"decodes": 1, "prompt": 7}, Inline: {"decodes": 1, "prompt": 12}, PromptsAlone: {"prompt": 12}}
    assert plan.refused == (("decodes", PROMPTS_ALONE),)


def test_whole_prompts_end_admission_once_the_budget_is_spent():
    driver = Driver(limits(max_num_batched_tokens=8), Inline())
    for name in "abcd":
        driver.add(lasting(name, 5, 2))
    assert rows(driver.plan()) == {"a": 5, "b": 5}


def test_a_batch_that_was_static_is_told_when_the_discipline_changes():
    driver = Driver(limits(), Static(2))
    driver.add(lasting("short", 3, 1))
    driver.add(lasting("long", 3, 9))
    driver.add(lasting("waits", 3, 1))
    step(driver)
    assert driver.output == {}
    driver.configure(Chunked(), 4, 12)
    plan = step(driver)
    assert "waits" in plan.request_ids, "the first plan after the change obeys it"
    assert driver.ended == {"short": "length", "waits": "length"} and len(driver.output["long"]) == 2


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=20)


@settings(max_examples=75, deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_static_batches_are_the_arithmetic_of_their_groups(lengths, batch_size):
    """Steps, padding and held rows from the lengths alone."""
    driver = Driver(limits(max_num_seqs=5, num_blocks=200), Static(batch_size))
    for number, (num_prompt, num_output) in enumerate(lengths):
        driver.add(lasting(f"r{number}", num_prompt, num_output))
    driver.run()
    groups = [lengths[at : at + batch_size] for at in range(0, len(lengths), batch_size)]
    longest_prompts = [max(prompt for prompt, _ in group) for group in groups]
    longest_outputs = [max(output for _, output in group) for group in groups]
    assert len(driver.plans) == sum(longest_outputs)
    assert sum(sum(plan.padding) for plan in driver.plans) == sum(
        longest - prompt for longest, group in zip(longest_prompts, groups, strict=True) for prompt, _ in group)
    assert sum(len(plan.held) for plan in driver.plans) == sum(
        longest - output for longest, group in zip(longest_outputs, groups, strict=True) for _, output in group)


def test_who_reserves_everything_fills_the_cache_to_the_last_block():
    exact = limits(num_blocks=8, max_model_len=17, max_num_batched_tokens=64, watermark_blocks=1)  # two of the longest
    for discipline, rows_joined in ((Orca(), 2), (Static(4), 2), (Inline(), 1)):
        driver = Driver(exact, discipline)
        for name in "ab":
            driver.add(lasting(name, 14, 3))
        assert driver.plan().num_rows == rows_joined


def test_smaller_requests_may_pass_one_that_waits_for_blocks_but_only_so_many_and_not_under_orca():
    for discipline, passed in ((Inline(), 2), (Orca(), 0)):
        driver = Driver(limits(num_blocks=10, max_model_len=40, max_num_batched_tokens=64, max_passes=2), discipline)
        driver.add(lasting("runs", 24, 2))
        driver.add(lasting("large", 30, 2))
        for name in "abc":
            driver.add(lasting(name, 4, 2))
        plan = driver.plan()
        assert set(plan.request_ids) - {"runs"} == set("abc"[:passed])
        driver.run()
        assert set(driver.ended.values()) == {"length"}
