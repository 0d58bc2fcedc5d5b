from __future__ import annotations

import pytest
from support.records import record_of
from support.toy_engine import MS, engine

from slotwise.core.params import SamplingSpec
from slotwise.core.record import Admission, Decision, Preemption, RequestEnd, StepRecord, Stop
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add
from slotwise.observe.event_log import FORMAT, EngineLost, Entry, Gap, RequestEntry, Run, Sent
from slotwise.observe.live_state import LiveState

INFO = engine()
RUN = Run(FORMAT, "1", "toy", "float32", "cpu", 0.0, 0, INFO.limits, INFO.scheduling)


def request(number: int, at_ms: int = 0, num_prompt: int = 6) -> RequestEntry:
    return RequestEntry(at_ms * MS, num_prompt,
                        Add(number, RequestSpec((), SamplingSpec(max_tokens=8)), name=f"cmpl-{number}-0"))


def board(*entries: Entry) -> LiveState:
    made = LiveState()
    for entry in (RUN, *entries):
        made.apply(entry)
    return made


def step(at_ms: int, **columns: object) -> StepRecord:
    """A hundred milliseconds."""
    return record_of(at_ms, at_ms * MS, (at_ms + 100) * MS, **columns)


BUSY = (
    request(0), request(1, num_prompt=9), request(2, 50),
    step(0, taken=(1,) * 2, numbers=(0, 1), slots=(2, 0), starts=(2, 0), counts=(4, 5), tokens=((7,), ()),
         padding=(1, 0), admitted=(Admission(0, 2), Admission(1, 0)), num_running=2, num_free_blocks=4),
    step(100, taken=(60 * MS,), numbers=(0,), slots=(2,), starts=(6,), counts=(1,), tokens=((7,),),
         refused=(Decision(1, "token_budget"), Decision(2, "no_blocks")), stop=Stop("no_blocks", 2, 0), num_running=2,
         num_waiting=1, num_free_blocks=3))


def test_who_has_which_slot_and_how_far_it_is() -> None:
    now = board(*BUSY)
    first, second = now.seated()
    assert (first.request.number, first.slot, now.phase(first), now.reason(first)) == (1, 0, "stalled", "token_budget")
    assert (first.computed, first.num_sampled, first.cached) == (5, 0, 0)
    assert (second.request.number, second.slot, now.phase(second), now.reason(second)) == (0, 2, "decode", "")
    assert (second.computed, second.num_sampled, second.cached) == (7, 2, 2)
    (waiting,) = now.queue()
    assert (waiting.request.number, now.phase(waiting), now.reason(waiting)) == (2, "waits", "no_blocks")
    assert now.waiting.by_reason() == {"no_blocks": 1} and (now.num_running, now.num_waiting, now.slots) == (2, 1, 4)
    assert now.usage == pytest.approx(0.7)


def test_rates_over_the_last_seconds() -> None:
    now = board(*BUSY, step(200, ended=(RequestEnd(0, "stop", 2), RequestEnd(1, "abort", 0)), num_free_blocks=10))
    rates = now.rates(1000 * MS)
    assert rates.steps == pytest.approx(2) and rates.output_tokens == pytest.approx(2)
    assert rates.prompt_tokens == pytest.approx(9) and rates.requests == pytest.approx(2)
    assert rates.step_seconds == pytest.approx(0.1) and rates.step_tokens == pytest.approx(5)
    assert rates.empty == pytest.approx(5 / 8) and rates.wasted == pytest.approx(1 / 11)
    assert set(now.rates(60_000 * MS)) == {0}, "it was long ago"
    assert set(board().rates(5)) == {0}


def test_whoever_yields_waits_again_and_whoever_ends_is_gone() -> None:
    yielded = (*BUSY, step(200, preempted=(Preemption(0, "no_blocks", 7),), refused=(Decision(0, "no_blocks"),),
                           stop=Stop("no_blocks", 0, 1), numbers=(1,), slots=(0,), starts=(5,), counts=(4,),
                           tokens=((3,),), num_running=1, num_waiting=2))
    now = board(*yielded)
    assert [(life.request.number, now.reason(life)) for life in now.queue()] == [(0, "no_blocks"), (2, "no_blocks")]
    assert now.waiting.by_reason() == {"no_blocks": 2}
    (life,) = now.seated()
    assert now.phase(life) == "decode" and life.num_sampled == 1, "its prompt is computed"
    again = step(300, numbers=(1, 0), slots=(0, 1), starts=(9, 0), counts=(1, 8), held=(0,), tokens=((), ()),
                 admitted=(Admission(0, 0),), num_running=2, num_waiting=1)
    now = board(*yielded, again, step(400, ended=(RequestEnd(2, "timeout", 0, "too late"),), num_running=2))
    assert [(life.slot, now.phase(life)) for life in now.seated()] == [(0, "held"), (1, "prefill")] and not now.queue()
    assert now.num_waiting == 0 and not now.waiting.by_reason()


@pytest.mark.parametrize("ending", [Gap(5), RUN, EngineLost(400 * MS, "lost", "it fell")])
def test_what_is_not_known_is_forgotten(ending: Entry) -> None:
    now = board(*BUSY, ending)
    assert not now.requests and not now.waiting.by_reason() and now.num_running == 0
    assert now.down == ("it fell" if isinstance(ending, EngineLost) else "")
    now.apply(step(500, numbers=(1, 4), slots=(0, 1), starts=(5, 5), counts=(1, 1), tokens=((1,), (1,)), num_running=2))
    assert not now.seated(), "nobody is known by these numbers"
    assert now.num_running == 2 and now.now_ns == 600 * MS


def test_time_goes_on_with_what_is_sent_and_slots_may_change() -> None:
    now = board(*BUSY, Sent(0, 0, 777 * MS, 1), record_of(-1, 700 * MS, 700 * MS, configured=engine(2).scheduling))
    assert now.now_ns == 777 * MS and now.slots == 2
