"""Each policy starts requests in exactly the order in which a naive scheduler of its documented rule does."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from support.crowds import ROOMY, Comer, KnownTimes, comers, crowd, play, slo
from support.naive import Naive, NaiveDeadline, NaiveFair, NaiveOracle, NaivePriority, NaiveProgram, NaiveShortest, One
from support.toy import Driver, alone

from slotwise.core.interfaces import Policy
from slotwise.core.policies.deadline import Deadline
from slotwise.core.policies.fair import Fair
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.policies.priority import Priority
from slotwise.core.policies.program import LeastServedProgram
from slotwise.core.policies.shortest import Shortest

SLOTS = st.integers(1, 4)
SECONDS = st.sampled_from((1.0, 2.0, 8.0, 64.0))
SHARES = st.sampled_from((0.0, 0.5, 1.0))
TIERS = ("gold", "", "bulk")
WEIGHTS = {"gold": 4.0, "bulk": 0.5}
quick = settings(max_examples=30, deadline=None)


def agree(policy: Policy, naive: Naive, coming: list[Comer]) -> None:
    limits = replace(ROOMY, max_num_seqs=naive.slots)
    people = crowd(coming)
    lengths = {}
    for _, one in people:
        lengths[one.request_id] = len(alone(one, limits))
        one.spec = replace(one.spec, forced_length=lengths[one.request_id])
    driver = Driver(limits, policy=policy, times=KnownTimes())
    play(driver, people)
    for now in range(int(driver.now)):
        for number, (arrives, request) in enumerate(people):
            if arrives == now:
                naive.arrives(One(request, number, float(now), lengths[request.request_id]))
        naive.step(float(now))
    assert driver.admitted == naive.admitted
    shed = {name for name, reason in driver.ended.items() if reason == "shed"}
    assert shed == set(naive.shed)  # in which order those of one moment go is promised to nobody
    assert not naive.waiting and not naive.running




@quick
@given(SLOTS, comers(slo()))
def test_first_come_first_served(slots, coming):
    agree(FirstComeFirstServed(), Naive(slots), coming)


@settings(max_examples=40, deadline=None)
@given(SLOTS, SECONDS, st.integers(1, 3), comers(slo(priorities=(-2, -1, 0, 1, 4))))
def test_priority(slots, ageing, gap, coming):
    agree(Priority(ageing, gap), NaivePriority(slots, ageing, gap), coming)


@quick
@given(SLOTS, SECONDS, SHARES, comers(slo(tenants=("a", "b")), max_size=60, max_output=40))
def test_shortest_by_guesses(slots, ageing, quantile, coming):
    agree(Shortest(ageing, quantile), NaiveShortest(slots, ageing, quantile), coming)


@quick
@given(SLOTS, SECONDS, comers(slo()))
def test_shortest_by_an_oracle(slots, ageing, coming):
    agree(Shortest(ageing, 0.5, oracle=True), NaiveOracle(slots, ageing, 0.5), coming)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.sampled_from((0.0, 8.0, 100.0)),
       comers(slo(tenants=("a", "a", "a", "b", "c"), tiers=TIERS), max_size=60))
def test_fair(slots, credit, coming):
    agree(Fair(WEIGHTS, credit), NaiveFair(slots, WEIGHTS, credit), coming)


@settings(max_examples=40, deadline=None)
@given(SLOTS, SECONDS, SECONDS, st.booleans(), comers(slo(ttfts=(None, 0.5, 1.0, 4.0, 30.0))))
def test_deadline(slots, ttft, ageing, sheds, coming):
    agree(Deadline(KnownTimes(), ttft, ageing, sheds=sheds), NaiveDeadline(slots, ttft, ageing, sheds), coming)


@settings(max_examples=40, deadline=None)
@given(SLOTS, SECONDS, st.sampled_from((3.0, 8.0, 60.0)),
       comers(slo(tenants=("a", "b")), max_size=60, sessions=("", "x", "x", "y")))
def test_program(slots, ageing, quantum, coming):
    agree(LeastServedProgram(ageing, quantum, inf), NaiveProgram(slots, ageing, quantum), coming)
