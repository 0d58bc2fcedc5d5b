"""Where requests stand, as the engine tells it: exact, and without a trace."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recorded import Recorded
from support.records import admitted_of
from support.toy import EOS, next_token

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SLO, SchedulerLimits
from slotwise.core.step_time import StepTimeModel
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, Finish, QueuePositionQuery, RequestPosition
from slotwise.engine.scheduling import Scheduling
from slotwise.measure.simulate.replay import replay

LIMITS = SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
REQUESTS = st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=9)


def engine(policy: str) -> Engine:
    scheduling = Scheduling(Batching(), Ordering(policy, preemption_gap=100 if policy == "priority" else None),
                            max_num_seqs=1, max_num_batched_tokens=64)
    times, ticks = StepTimeModel(), count(1)
    scheduler = Scheduler(LIMITS, scheduling.discipline(), scheduling.policy(times), times)
    return Engine(scheduler, FakeExecutor(4, next_token), lambda: next(ticks), (EOS,), scheduling=scheduling)


def places(subject: Engine, names: list[str]) -> dict[str, int | None]:
    answer = subject.queue_positions(QueuePositionQuery(7, tuple(names)))
    assert answer.number == 7
    return {position.request_id: position.position for position in answer.positions}


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest"])
@settings(deadline=None, max_examples=40)
@given(requests=REQUESTS)
def test_places_are_the_order_in_which_slots_are_given(policy: str, requests: list[tuple[int, int, int]]) -> None:
    subject = engine(policy)
    names = [f"r{number}" for number in range(len(requests))]
    for name, (priority, length, num_prompt) in zip(names, requests, strict=True):
        params = SamplingSpec(max_tokens=length, ignore_eos=True)
        subject.handle(Add(name, RequestSpec([3] * num_prompt, params, slo=SLO(priority=priority))))
    told = places(subject, names)
    assert sorted(told.values()) == list(range(len(names)))
    admitted: list[str] = []
    while subject.has_work:
        admitted += admitted_of(subject.step())
        ahead = [name for name in sorted(told, key=told.__getitem__) if name not in admitted]
        later = places(subject, names)
        assert [name for name in ahead if later[name] != ahead.index(name)] == []
    assert admitted == sorted(told, key=told.__getitem__)


def test_a_standing_tells_the_state_and_the_tokens() -> None:
    subject = engine("fcfs")
    for name in "ab":
        subject.handle(Add(name, RequestSpec([3, 1, 4], SamplingSpec(max_tokens=8, ignore_eos=True))))
    subject.step()
    subject.step()
    assert subject.queue_positions(QueuePositionQuery(1, ("a", "b", "nobody"))).positions == (
        RequestPosition("a", "running", 2), RequestPosition("b", "waiting", 0, 0))
    subject.handle(Finish("a", "abort"))
    assert subject.queue_positions(QueuePositionQuery(2, ("a",))).positions == ()


class Watched(Recorded):
    """Somebody always wants to know where everyone stands."""

    def turn(self) -> None:
        self._engine.queue_positions(QueuePositionQuery(1, tuple(range(40))))
        super().turn()


@pytest.mark.parametrize("depth", [0, 1])
def test_who_asks_leaves_no_trace_in_what_is_replayed(depth: int) -> None:
    outcome = replay(Watched(3, Batching(), depth=depth).play(40))
    assert outcome.difference is None and outcome.requests == 40
