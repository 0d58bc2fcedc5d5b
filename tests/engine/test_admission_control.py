"""Who may wait, by what was measured; time comes from the records."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import record_of

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import RequestEnd
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SLO, SchedulerLimits
from slotwise.engine.admission_control import LEAST, LONGEST_RETRY, PATIENCE, UNMEASURED, AdmissionControl
from slotwise.engine.messages import Add, EngineInfo
from slotwise.engine.scheduling import Scheduling

LIMITS = SchedulerLimits(max_model_len=100, num_blocks=25, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
BEFORE = (UNMEASURED[0] * 4, UNMEASURED[1] * 100)
FLOOR = (LEAST[0] * 4, LEAST[1] * 100)
SECOND = 10**9


class Queue:
    """A door and an engine that does what a test says, on a clock of its own."""

    def __init__(self, **bounds: int) -> None:
        self.control = AdmissionControl(LIMITS, **bounds)
        self.now = SECOND
        self.serial = 0
        self.line: list[str] = []

    def come(self, count: int = 1, num_tokens: int = 10, tenant: str = "", tier: str = "") -> None:
        for _ in range(count):
            self.serial += 1
            self.line.append(str(self.serial))
            slo = SLO(tenant, tier)
            self.control.commanded(Add(self.line[-1], RequestSpec([1] * num_tokens, SamplingSpec(), slo=slo)),
                                   self.now)

    def objection(self, num_requests: int = 1, num_tokens: int = 0, tenant: str = "") -> str:
        return self.control.objection(tenant, num_requests, num_tokens)

    def step(self, admit: int = 0, seconds: float = 1.0, running: int = 4, **more: Any) -> None:
        admitted, self.line = tuple(self.line[:admit]), self.line[admit:]
        begun, self.now = self.now, self.now + int(seconds * SECOND)
        self.control.stepped(record_of(
            1, begun, self.now, admitted=admitted, cached=(0,) * len(admitted), num_running=running,
            num_waiting=len(self.line), **more))


def test_a_request_waits_until_its_first_slot_or_its_end() -> None:
    queue = Queue()
    queue.come(3)
    assert (queue.control.num_waiting, queue.control.num_waiting_tokens) == (3, 30)
    queue.step(admit=1)
    assert (queue.control.num_waiting, queue.control.num_waiting_tokens) == (2, 20)
    queue.control.stepped(record_of(1, 0, 0, admitted=("1",), cached=(0,)))  # it had to yield, and is back
    queue.control.stepped(record_of(1, 0, 0, ended=(RequestEnd("1", "length", 5), RequestEnd("2", "timeout", 0))))
    assert (queue.control.num_waiting, queue.control.num_waiting_tokens) == (1, 10)


def test_before_anything_was_measured_the_bound_is_fixed_and_generous() -> None:
    queue = Queue()
    assert queue.control.bounds == BEFORE and queue.control.retry_after == 1
    queue.come(BEFORE[0] + 4 - 1, 1)  # four slots are free
    assert queue.objection() == ""
    queue.come(1, 1)
    assert str(BEFORE[0]) in queue.objection() and "a second" not in queue.objection()


def test_the_bound_is_what_starts_in_a_minute() -> None:
    queue = Queue()
    queue.come(50)
    for _ in range(10):
        queue.step(admit=2)
    assert queue.control.rate.requests == pytest.approx(2, rel=0.01)
    assert queue.control.bounds == (2 * PATIENCE, 20 * PATIENCE)


def test_it_follows_an_engine_that_becomes_slow_down_to_a_floor() -> None:
    queue = Queue()
    queue.come(100)
    for _ in range(20):
        queue.step(admit=2)
    before = queue.control.bounds
    for _ in range(20):
        queue.step()
    between = queue.control.bounds
    for _ in range(600):
        queue.step()
    assert before > between > FLOOR == queue.control.bounds
    assert queue.control.retry_after == LONGEST_RETRY  # nothing starts any more


def test_time_without_a_queue_says_nothing_about_the_engine() -> None:
    queue = Queue()
    for _ in range(100):  # one comes in a second, and starts at once
        queue.come()
        queue.step(admit=1)
    assert not queue.control.rate.measured and queue.control.bounds == BEFORE


def test_the_time_between_steps_counts_while_somebody_waits() -> None:
    queue = Queue()
    queue.come(9)
    queue.step()
    queue.now += 4 * SECOND  # a step that took long to come
    queue.step(admit=5)
    assert queue.control.rate.requests == pytest.approx(1)


def test_a_router_is_told_a_rate_only_while_requests_wait() -> None:
    """After a time in which no request started, the router would otherwise shed every request that could queue."""
    queue = Queue()
    assert queue.control.drain_rate == 0
    queue.come(3)
    for _ in range(150):
        queue.step()
    queue.step(admit=1)
    assert 0 < queue.control.drain_rate < 0.1
    queue.step(admit=2)
    assert queue.control.drain_rate == 0 and queue.control.rate.measured
    queue.come()
    assert queue.control.drain_rate == queue.control.rate.requests > 0


def test_what_was_asked_for_holds_whatever_is_measured() -> None:
    queue = Queue(max_requests=3, max_tokens=1000)
    queue.come(4)
    queue.step(admit=1)
    assert queue.control.bounds == (3, 1000)
    assert "3" in queue.objection()
    queue.step(admit=1)
    assert queue.objection() == "" != queue.objection(2)


def test_tokens_are_bounded_beside_requests() -> None:
    queue = Queue(max_tokens=50)
    queue.come(5)
    queue.step()
    assert queue.objection(1, 0) == "" and "50" in queue.objection(1, 1)


def test_where_nobody_waits_anybody_may() -> None:
    queue = Queue(max_requests=1, max_tokens=1)
    assert queue.objection(100, 10**6) == ""
    with queue.control.entering():
        assert queue.objection(100, 10**6)
    assert queue.objection(100, 10**6) == ""


def test_free_slots_and_free_cache_are_no_queue() -> None:
    queue = Queue(max_requests=2, max_tokens=20)
    queue.come(1)
    queue.step(admit=1, running=1, num_free_blocks=20)
    queue.come(4)
    assert queue.objection() == ""
    queue.come()  # three slots, and two may wait
    assert queue.objection()


def test_those_at_the_door_are_counted() -> None:
    queue = Queue(max_requests=2)
    queue.come(1)
    queue.step()
    with queue.control.entering():
        assert queue.objection()
    assert not queue.objection()


def test_a_changed_number_of_slots() -> None:
    queue = Queue()
    queue.step(running=0, configured=Scheduling(Batching(), max_num_seqs=2, max_num_batched_tokens=32))
    assert queue.control.bounds[0] == UNMEASURED[0] * 2
    queue.control.started(EngineInfo("toy", "cpu", "float32", 9, LIMITS, Scheduling(Batching(), max_num_seqs=4,
                                                                                    max_num_batched_tokens=32), (1,)))
    assert queue.control.bounds[0] == BEFORE[0]


def test_who_is_refused_may_return_when_half_the_queue_is_gone() -> None:
    queue = Queue(max_requests=20)
    queue.come(28)
    for _ in range(4):
        queue.step(admit=2)
    assert queue.objection() and queue.control.retry_after == 5  # ten of twenty, two a second


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0.01, 5), st.integers(1, 99)), max_size=40))
def test_whatever_happens_the_numbers_hold(history: list[tuple[int, int, float, int]]) -> None:
    queue = Queue()
    for come, admit, seconds, num_tokens in history:
        queue.come(come, num_tokens)
        queue.step(min(admit, len(queue.line)), seconds)
        control = queue.control
        assert control.num_waiting == len(queue.line) and control.num_waiting_tokens >= 0
        assert all(bound >= least for bound, least in zip(control.bounds, FLOOR, strict=True))
        assert 1 <= control.retry_after <= LONGEST_RETRY
        fastest = max([0, *(min(step[1], 5) / step[2] for step in history)])
        assert control.rate.requests <= fastest * 1.001


def test_a_tier_has_a_queue_of_its_own() -> None:
    queue = Queue()

    def objection(tier: str, bound: int, num_requests: int = 1) -> str:
        return queue.control.tier_objection(SLO(tier=tier), bound, num_requests)

    queue.come(2, 1, tier="gold")
    queue.come(6, 1, tier="silver")
    queue.step()  # nobody found a slot
    assert objection("gold", 3) == "" != objection("gold", 2)
    assert "the tier silver is full: 6 requests wait, at most 5 may" in objection("silver", 5)
    assert objection("bronze", 1, 9) == ""  # where nobody waits anybody may
    queue.step(admit=3)
    assert objection("silver", 6) == "" != objection("silver", 5)
    with queue.control.entering(SLO(tier="gold")):
        assert "1 requests wait" in objection("gold", 1)
    assert objection("gold", 1) == ""
    queue.control.stepped(record_of(1, 0, 0, ended=tuple(RequestEnd(name, "abort", 0) for name in queue.line)))
    assert objection("silver", 0) == ""


def test_a_tenant_has_a_queue_of_its_own_in_whatever_tiers_it_waits() -> None:
    queue = Queue()
    queue.come(2, 1, "ann", "gold")
    queue.come(1, 1, "ann", "silver")
    queue.come(5, 1, "bob", "silver")
    queue.step(running=2)
    assert queue.control.tenant_objection("ann", 4) == "" != queue.control.tenant_objection("ann", 3)
    assert "this key's queue is full: 3 requests wait, at most 2 may; this one adds 2" in (
        queue.control.tenant_objection("ann", 2, 2))
    assert queue.control.tenant_objection("eve", 1, 9) == ""  # where nobody waits anybody may
    with queue.control.entering(SLO("ann")):
        assert queue.control.tenant_objection("ann", 4)
    queue.step(admit=3)
    assert queue.control.tenant_objection("ann", 1, 9) == "" != queue.control.tenant_objection("bob", 5)


def test_who_has_gone_is_forgotten() -> None:
    queue = Queue()
    for number in range(100):
        queue.come(1, 1, f"user {number}", "gold")
    queue.step(admit=60)
    queue.control.stepped(record_of(1, 0, 0, ended=tuple(RequestEnd(name, "abort", 0) for name in queue.line)))
    assert not queue.control._waiting and not queue.control._in_tier["gold"].total
    assert len(queue.control._tenant_of) == 60  # who runs
    queue.control.stepped(record_of(1, 0, 0, ended=tuple(RequestEnd(str(name), "stop", 0) for name in range(1, 61))))
    assert not queue.control._tenant_of


def test_a_tiers_retry_is_when_half_of_its_queue_has_drained() -> None:
    queue = Queue()
    queue.come(50, 1, "ann", "silver")
    assert queue.control.tier_retry_after("silver", 10) == queue.control.tenant_retry_after("ann", 10) == 1
    for _ in range(10):
        queue.step(admit=2)
    assert queue.control.tier_retry_after("silver", 20) == 10  # 30 wait, ten are to, two start a second
    assert queue.control.tenant_retry_after("ann", 20) == 10 and queue.control.tenant_retry_after("bob", 20) == 1
    assert queue.control.tier_retry_after("silver", 100) == 1 and queue.control.tier_retry_after("none", 100) == 1


def test_the_outlook_is_who_waits_and_how_fast_they_start() -> None:
    queue = Queue()
    assert queue.control.wait_estimate() == (0, 0.0)  # four slots are free
    queue.come(6)
    assert queue.control.wait_estimate() == (2, None)
    queue.step(running=4)
    assert queue.control.wait_estimate() == (6, None)
    queue.come(44)
    for _ in range(10):
        queue.step(admit=2)
    position, start = queue.control.wait_estimate()
    assert position == 30 and start == pytest.approx(31 / 2, rel=0.2)
    assert queue.control.start_of(0) == pytest.approx(0.5, rel=0.2)


def test_a_flood_is_refused_before_the_queue_is_full_and_others_are_not() -> None:
    queue = Queue(max_requests=20, max_tokens=202)  # 18 and 180 for all, the rest for tenants that hold nothing
    queue.step()  # nothing is free
    queue.come(16, 1, "flood")
    refused = queue.objection(tenant="flood")
    assert "16 requests wait, 16 of them this client's, and what is left of 18 is for others" in refused
    assert queue.objection(tenant="light") == "" == queue.objection(2, tenant="light")
    queue.come(2, 1, "light")
    assert "at most 18 may" in queue.objection(tenant="light") and "at most 18 may" in queue.objection(tenant="flood")
    queue.come(2, 1, "other")
    assert "at most 18 may" in queue.objection(tenant="another") and queue.control.num_waiting == 20


def test_a_bound_that_falls_as_it_is_measured_shuts_out_its_holder_alone() -> None:
    queue = Queue()
    queue.step(running=4)
    queue.come(56, 1, "flood")
    assert queue.objection(tenant="flood") and not queue.objection(tenant="light")
    for _ in range(3):
        queue.step(seconds=2.0)  # none starts
    assert queue.control.bounds[0] == FLOOR[0] < 56
    assert queue.objection(tenant="flood") and not queue.objection(tenant="light")
    with queue.control.entering(SLO("light")):  # its prompt is tokenized
        assert not queue.objection(tenant="other") and queue.objection(tenant="light")
        with queue.control.entering(SLO("other")):
            assert queue.objection(tenant="another"), "the reserve is bounded"
    assert not queue.objection(1, 50, tenant="light")


def test_so_do_a_bound_of_tokens_and_that_of_a_tier() -> None:
    queue = Queue()
    queue.step(running=4)
    queue.come(13, 100, "flood", "gold")
    for _ in range(3):
        queue.step(seconds=2.0)
    assert queue.control.bounds[1] == FLOOR[1] < queue.control.num_waiting_tokens
    assert "prompt tokens wait" in queue.objection(1, 1, "flood") and not queue.objection(1, 90, "light")
    assert queue.control.tier_objection(SLO("flood", "gold"), 9)
    assert not queue.control.tier_objection(SLO("light", "gold"), 9)


def test_tokens_are_shared_as_requests_are() -> None:
    queue = Queue(max_requests=1000, max_tokens=101)
    queue.step()
    queue.come(8, 10, "flood")
    assert "80 prompt tokens wait, 80 of them this client's" in queue.objection(1, 2, "flood")
    assert queue.objection(1, 10, "light") == ""
    queue.come(1, 10, "light")
    assert "at most 90 may" in queue.objection(1, 1, "light")


def test_who_runs_holds_a_place_until_its_end() -> None:
    queue = Queue(max_live=10)  # one of them for tenants that hold nothing
    queue.come(8, 1, "flood")
    queue.step(admit=8)
    assert "8 requests wait or run, 8 of them this client's" in queue.objection(tenant="flood")
    with queue.control.entering(SLO("light")), queue.control.entering(SLO("other")):
        assert "10 requests wait or run, at most 9 may" in queue.objection(tenant="another")
    queue.control.stepped(record_of(1, 0, 0, ended=(RequestEnd("1", "stop", 9), RequestEnd("2", "abort", 9))))
    assert queue.objection(2, tenant="flood") == "" != queue.objection(3, tenant="flood")


def test_a_tiers_queue_is_shared_as_the_whole_one_is() -> None:
    queue = Queue()
    queue.step()
    queue.come(8, 1, "flood", "gold")
    refused = queue.control.tier_objection(SLO("flood", "gold"), 10)
    assert "the queue of the tier gold is full: 8 requests wait, 8 of them this client's" in refused
    assert queue.control.tier_objection(SLO("light", "gold"), 10) == ""
    queue.come(1, 1, "light", "gold")
    queue.come(1, 1, "other", "gold")
    assert queue.control.tier_objection(SLO("another", "gold"), 10)


def test_a_free_slot_is_anybodys() -> None:
    queue = Queue(max_requests=0)
    queue.come(3, 1, "flood")
    assert queue.objection(tenant="flood") == "" != queue.objection(2, tenant="flood")


def test_who_is_refused_for_those_who_run_may_return_when_half_of_them_have_gone() -> None:
    queue = Queue(max_live=40)
    queue.come(40, 1, "flood")
    for _ in range(10):
        queue.step(admit=2)
    assert queue.objection(tenant="flood") and queue.control.retry_after == 10  # twenty of forty, two a second


def test_requests_that_free_slots_take_are_counted_neither_by_the_limit_nor_by_its_message() -> None:
    queue = Queue(max_requests=3, max_tokens=1000)
    queue.step(running=2)  # of four slots
    queue.come(4, 1)
    assert queue.objection() == ""
    queue.come(1, 1)
    assert "the queue is full: 3 requests wait, at most 3 may; this one adds 1" in queue.objection()
    queue = Queue()
    queue.step(running=2)  # of four slots
    queue.come(5, 1, "ann")
    assert "3 requests wait, at most 3 may; this one adds 1" in queue.control.tenant_objection("ann", 3)
    assert "3 requests wait, at most 3 may; this one adds 1" in queue.control.tier_objection(SLO("ann"), 3)
