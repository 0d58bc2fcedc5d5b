"""Rows that take turns under a cap of context: nobody rests for ever, short rows never rest, the cap is held."""

from __future__ import annotations

from dataclasses import replace

from crowds import ROOMY, Comer, crowd, play, running
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Driver, alone

from slotwise.core.reasons import STEP_CONTEXT
from slotwise.core.request import Request
from slotwise.core.terms import Terms, Tier
from slotwise.core.turns import ALL, SHORT, resting

CAPS = st.dictionaries(st.sampled_from((ALL, "gold", "bulk")), st.integers(1, 300), min_size=1)
ROW = st.tuples(st.integers(1, 400), st.sampled_from(("gold", "bulk", "")))


def row(number: int, context: int, tier: str) -> Request:
    made = crowd([Comer(0, 1, 1, Terms(tier=tier))])[0][1]
    made.request_id, made.arrival = f"r{number}", number
    made.start_from(context - 1)
    return made


def is_short(request: Request, caps: dict[str, int]) -> bool:
    names = [name for name in (ALL, request.terms.tier) if name in caps]
    return all((request.num_scheduled + 1) * SHORT < caps[name] for name in names)


@given(CAPS, st.lists(ROW, min_size=1, max_size=12), st.integers(0, 5))
def test_the_cap_is_held_by_all_but_one_row_alone_and_short_rows(caps, rows, step):
    made = [row(number, *each) for number, each in enumerate(rows)]
    rest = resting(made, caps, step)
    assert len(rest) < len(made)
    for name, cap in caps.items():
        counted = [one for one in made if one.request_id not in rest and name in (ALL, one.terms.tier)]
        long = [one.num_scheduled + 1 for one in counted if not is_short(one, caps)]
        short = [one.num_scheduled + 1 for one in counted if is_short(one, caps)]
        assert sum(long) <= cap or len(long) == 1 or sum(long) - max(long) + min(max(long), cap) <= cap + sum(short)
    assert not any(is_short(one, caps) for one in made if one.request_id in rest)


@given(CAPS, st.lists(ROW, min_size=1, max_size=8), st.integers(0, 2))
def test_nobody_rests_longer_than_there_are_others_even_while_newcomers_come(caps, rows, newcomers):
    made = [row(number, *each) for number, each in enumerate(rows)]
    rested = dict.fromkeys((one.request_id for one in made), 0)
    for step in range(40):
        fresh = [row(1000 + 10 * step + number, 390, "") for number in range(newcomers)]
        rest = resting([*made, *fresh], caps, step)
        for name in rested:
            rested[name] = rested[name] + 1 if name in rest else 0
            assert rested[name] <= len(made) + newcomers


def test_two_long_rows_alternate_beside_a_short_one():
    made = [row(0, 600, ""), row(1, 600, ""), row(2, 30, "")]
    rests = [sorted(resting(made, {ALL: 1000}, step)) for step in range(4)]
    assert rests == [["r1"], ["r0"], ["r1"], ["r0"]]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60),
       st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=10))
def test_turns_change_no_tokens_and_every_rest_is_named(cap, gold_cap, rows):
    tiers = (Tier("gold", max_step_context=gold_cap),)
    limits = replace(ROOMY, max_step_context=cap, tiers=tiers, max_num_seqs=6)
    people = crowd([Comer(*each, Terms(tier="gold" if number % 2 else "")) for number, each in enumerate(rows)])
    driver = Driver(limits)

    def look(driver, plan):
        named = {decision.request_id for decision in plan.refused if decision.reason == STEP_CONTEXT}
        missing = {one.request_id for one in running(driver)} - set(plan.request_ids)
        assert missing == named

    play(driver, people, look)
    assert driver.output == {one.request_id: alone(one, limits) for _, one in people}
