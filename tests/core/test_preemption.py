"""Preemption for a waiting request: what the victims free is what admission then finds."""

from __future__ import annotations

from support.toy import Driver, request

from slotwise.core.policies.priority import Priority
from slotwise.core.reasons import OUTRANKED, TOKEN_PENDING
from slotwise.core.scheduler_limits import SLO, SchedulerLimits

URGENT, USUAL, LATER = SLO(priority=-9), SLO(priority=0), SLO(priority=9)


def driver(**limits: int | bool) -> Driver:
    return Driver(SchedulerLimits(max_num_seqs=8, block_size=4, **limits), policy=Priority(60.0, 1))


def prompt(length: int, first: int) -> list[int]:
    return [1 + (first + place) % 20 for place in range(length)]


def test_blocks_shared_with_rows_that_stay_are_not_freed() -> None:
    subject = driver(max_model_len=400, num_blocks=62, max_num_batched_tokens=400, enable_prefix_caching=True)
    system = prompt(160, 0)
    subject.add(request("peer", [*system, 3], 60, slo=USUAL, ignore_eos=True))
    for _ in range(2):
        subject.plan()
        subject.commit()
    for number in range(4):
        subject.add(request(f"low{number}", [*system, 5 + number], 40, slo=LATER, ignore_eos=True))
    for _ in range(3):
        subject.plan()
        subject.commit()
    subject.add(request("high", prompt(140, 1), 4, slo=USUAL, ignore_eos=True))
    while "high" not in subject.admitted:
        plan = subject.plan()
        outranked = [one for one in plan.preempted if one.reason == OUTRANKED]
        assert not outranked or "high" in subject.admitted, "preempted in vain"
        subject.commit()
    subject.run()


def test_blocks_that_admission_leaves_free_are_preempted_for_too() -> None:
    subject = driver(max_model_len=4000, num_blocks=1000, max_num_batched_tokens=4000, watermark_blocks=10)
    subject.add(request("low", prompt(941 * 4, 0), 200, slo=LATER, ignore_eos=True))
    for _ in range(3):
        subject.plan()
        subject.commit()
    subject.plan()
    subject.add(request("high", prompt(50 * 4 - 4, 1), 4, slo=URGENT, ignore_eos=True))
    plan = subject.plan()
    assert subject.preempted == ["low"] and subject.admitted[-1] == "high"
    assert plan.stop == (TOKEN_PENDING, "low", 0, None)
    subject.commit()
    subject.commit()
    subject.run()
