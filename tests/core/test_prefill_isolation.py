"""Rows that rest while somebody of a tenant far behind begins: never long, never for nothing, never their own fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crowds import ROOMY, Comer, Priced, comers, crowd, play, running, slo
from support.toy import Driver, alone

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.policies.fair import Fair
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.prefill_isolation import MAX_ISOLATED_STEPS, SHORT
from slotwise.core.reasons import FIRST_TOKEN, OUTRANKED, SHORT_STEP
from slotwise.core.record import StepPlan
from slotwise.core.scheduler_limits import SLO

WIDE = replace(ROOMY, max_num_seqs=8, max_num_batched_tokens=12)
FLOOD, LIGHT = SLO("flood"), SLO("light")


def rests(plan: StepPlan) -> set[str]:
    return {name for name, reason in plan.refused if reason == FIRST_TOKEN}


class Rests:
    """Of each request, for how many plans in a row it stood back; looks at every plan."""

    def __init__(self) -> None:
        self.in_a_row: Counter[str] = Counter()
        self.longest = self.total = 0

    def look(self, driver: Driver, plan: StepPlan) -> None:
        names = rests(plan)
        self.in_a_row = Counter({name: self.in_a_row[name] + 1 for name in names})
        self.longest = max([self.longest, *self.in_a_row.values()])
        self.total += len(names)
        tenants = {one.request_id: one.spec.slo.tenant for one in driver.scheduler.requests()}
        fresh = {name for name, start in zip(plan.request_ids, plan.starts, strict=True) if not driver.output.get(name)}
        for name in names:
            assert any(tenants[other] != tenants[name] for other in fresh), "nobody rests for nothing"
            assert name not in plan.request_ids


CROWD = comers(slo(tenants=("flood", "flood", "flood", "flood", "light", "other")), max_prompt=40, max_size=60)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from((Batching(), Batching(long_prefill_token_threshold=3), Batching("orca"))),
       st.sampled_from((8, 12, 30)), st.sampled_from((30, 512)), CROWD)
def test_nobody_rests_long_or_for_nothing_and_tokens_are_the_same(batching, budget, blocks, coming):
    limits = replace(WIDE, max_num_batched_tokens=budget, num_blocks=blocks + 10)
    driver, seen, people = Driver(limits, batching.discipline(8), Fair({})), Rests(), crowd(coming)
    play(driver, people, seen.look)
    assert seen.longest <= MAX_ISOLATED_STEPS
    for _, one in people:
        assert driver.output[one.request_id] == alone(one, limits)


def flooded(*light: Comer) -> list[Comer]:
    return [Comer(0, 2, 60, FLOOD)] * 30 + list(light)


def steps_to_first_token(policy: FirstComeFirstServed, coming: list[Comer]) -> list[StepPlan]:
    """The plans from the arrival of the last of them to the one that samples its first token."""
    driver, last, plans = Driver(WIDE, policy=policy), f"r{len(coming) - 1}", []

    def look(driver: Driver, plan: StepPlan) -> None:
        if any(one.request_id == last for one in driver.scheduler.requests()) and not driver.output.get(last):
            plans.append(plan)

    play(driver, crowd(coming), look)
    return plans


def test_a_light_tenant_has_the_step_for_itself_and_takes_a_place_where_none_is_free():
    plans = steps_to_first_token(Fair({}), flooded(Comer(12, 30, 4, LIGHT)))
    assert [plan.counts for plan in plans] == [(12,), (12,), (6,)]
    assert all(plan.request_ids == ("r30",) and len(rests(plan)) >= 7 for plan in plans)
    assert [one.reason for one in plans[0].preempted] == [OUTRANKED]
    everyone = steps_to_first_token(FirstComeFirstServed(), flooded(Comer(12, 30, 4, LIGHT)))
    assert len(everyone) > 30


def test_a_long_prompt_lets_the_others_on_after_so_many_steps():
    plans = steps_to_first_token(Fair({}), flooded(Comer(12, 60, 4, LIGHT)))
    assert [bool(rests(plan)) for plan in plans][: MAX_ISOLATED_STEPS + 2] == [*[True] * MAX_ISOLATED_STEPS, False,
                                                                               True]


@pytest.mark.parametrize(("prompt", "counts"), [(80, [80]), (200, [90])])  # 27 milliseconds a stall, four in a row
def test_those_who_rest_do_so_in_one_long_step_rather_than_in_several_short_ones(prompt, counts):
    limits = replace(WIDE, max_num_batched_tokens=300, max_model_len=400, num_blocks=1000, max_stall_ms=30.0)
    driver, plans = Driver(limits, policy=Fair({}), times=Priced()), []

    def look(driver: Driver, plan: StepPlan) -> None:
        if driver.output.get("r7") is None and "r7" in plan.request_ids:
            plans.append(plan)

    play(driver, crowd([Comer(0, 2, 60, FLOOD)] * 7 + [Comer(12, prompt, 4, LIGHT)]), look)
    resting = [plan for plan in plans if rests(plan)]
    assert [plan.counts[0] for plan in resting[: len(counts)]] == counts
    assert len(plans) == len(counts) or not rests(plans[1]), "four stalls are four stalls, in however many steps"


def test_a_few_tokens_go_before_a_long_prompt_under_way_of_one_who_was_served_more():
    """Nobody is far ahead: the giant goes on with what is left."""
    driver, plans = Driver(WIDE, policy=Fair({})), []
    coming = [Comer(0, 1, 30, LIGHT), Comer(0, 40, 1, FLOOD), Comer(0, 90, 2, FLOOD), Comer(14, 3, 2, LIGHT)]
    play(driver, crowd(coming), lambda driver, plan: plans.append(plan))
    (number,) = [number for number, plan in enumerate(plans)
                 if any(join.request_id == "r3" for join in plan.new_requests)]
    first, before = plans[number], plans[number - 1]
    assert first.request_ids[-2:] == ("r3", "r2") and first.counts[-2] == 3
    assert sum(first.counts) == sum(before.counts), "nothing is left empty"


def test_a_third_ones_long_prompt_does_not_keep_a_newcomer_from_beginning():
    """Others rest for it, too, but it is of a tenant that was served more."""
    driver, plans = Driver(WIDE, policy=Fair({})), []
    third = SLO("third")
    coming = [Comer(0, 2, 60, FLOOD)] * 6 + [Comer(0, 90, 1, third), Comer(17, 90, 2, third), Comer(6, 3, 2, LIGHT)]
    play(driver, crowd(coming), lambda driver, plan: plans.append(plan))
    (number,) = [number for number, plan in enumerate(plans)
                 if any(join.request_id == "r8" for join in plan.new_requests)]
    first = plans[number]
    assert first.now == 23.0, "it comes then"
    assert dict(zip(first.request_ids, first.counts, strict=True)) == {"r8": 3, "r7": 9}
    assert len(rests(first)) >= 5 and rests(first).isdisjoint(first.request_ids)


def test_one_who_was_served_more_makes_nobody_rest():
    greedy = [Comer(0, 120, 1, LIGHT)] * 8
    driver = Driver(WIDE, policy=Fair({}, credit=0.0))
    seen, resting = Rests(), []

    def look(driver: Driver, plan: StepPlan) -> None:
        seen.look(driver, plan)
        resting.append(bool(rests(plan)))

    play(driver, crowd([*flooded(), Comer(12, 120, 1, LIGHT), *greedy]), look)
    first = resting.index(True)
    assert sum(resting[first : first + 60]) < 40, "half of the service is the flood's"


def test_equals_do_not_rest_for_each_other():
    driver, seen = Driver(WIDE, policy=Fair({})), Rests()
    play(driver, crowd([Comer(n % 3, 9, 9, SLO("ab"[n % 2])) for n in range(60)]), seen.look)
    assert not driver.preempted and seen.total < 40


def test_a_tenant_that_is_alone_never_rests():
    driver, seen = Driver(WIDE, policy=Fair({})), Rests()
    play(driver, crowd([Comer(0, 30, 9, FLOOD)] * 20), seen.look)
    assert not seen.total and not driver.preempted
    assert not running(driver)


def test_a_step_stays_short_for_one_who_may_come_back_while_it_runs():
    prompts = [Comer(2, 40, 1, FLOOD)] + [Comer(0, 40, 1, FLOOD)] * 9

    def steps(*before: Comer) -> list[StepPlan]:
        driver = Driver(replace(WIDE, max_num_seqs=2), policy=Fair({}))
        play(driver, crowd([*before, *prompts]))
        return [plan for plan in driver.plans if "r0" not in plan.request_ids or not before]

    assert max(sum(plan.counts) for plan in steps()) == 12
    short = steps(Comer(0, 1, 1, LIGHT))
    assert max(sum(plan.counts) for plan in short) <= 12 // SHORT + 2
    assert SHORT_STEP in {plan.stop.reason for plan in short if plan.stop}


def test_who_goes_before_the_others_is_not_cut_short_for_those_who_may_come():
    """Its tenant has too many rows for others to rest, and was served less all the same."""
    driver = Driver(replace(WIDE, max_num_batched_tokens=30), policy=Fair({}))
    flood, light = [Comer(0, 2, 60, FLOOD)] * 4, [Comer(12, 2, 60, LIGHT)] * 2
    play(driver, crowd([*flood, *light, Comer(4, 60, 2, LIGHT), Comer(2, 60, 2, FLOOD)]))
    first = {name: next(plan for plan in driver.plans if name in plan.request_ids) for name in ("r6", "r7")}
    assert not rests(first["r6"]) and not rests(first["r7"])
    assert sum(first["r6"].counts) == 30 and sum(first["r7"].counts) <= len(first["r7"].counts) + 30 // SHORT


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_the_shortest_step_gets_on(budget):
    driver = Driver(replace(WIDE, max_num_seqs=1, max_num_batched_tokens=budget), policy=Fair({}))
    play(driver, crowd([Comer(0, 9, 2, LIGHT), Comer(0, 9, 2, FLOOD), Comer(3, 9, 2, LIGHT)]))
    assert len(driver.ended) == 3
