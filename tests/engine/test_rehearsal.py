"""What a row alone takes, found out at leisure: on an executor that takes known times and asserts what is whose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from observe.played import LIMITS, Clock, Timed, cost
from recorded import Recorded
from toy import EOS, alone, request, scheduler

from slotwise.batching.settings import Batching
from slotwise.core.plan import StepPlan, StepResult
from slotwise.core.steptime import StepTimes, work_of
from slotwise.engine.loop import Engine
from slotwise.engine.messages import Add, Rehearsed, StepRecord
from slotwise.engine.rehearsal import ENOUGH, LONGEST, PAUSE, WARM, Leisure
from slotwise.observe import steptime
from slotwise.simulate.replay import replay

NS = 1e-9


class Moody(Timed):
    """Takes `slower` nanoseconds more for a step, and breaks while `is_broken`."""

    def __init__(self, clock: Clock, block_size: int) -> None:
        super().__init__(clock, block_size)
        self.slower = 0
        self.is_broken = False
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.plans.append(plan)
        self._clock.ns += self.slower

    def collect(self) -> StepResult:
        result = super().collect()
        if self.is_broken:
            raise RuntimeError("no such kernel")
        return result


class House:
    """An engine and its leisure."""

    def __init__(self, limits=LIMITS, depth: int = 0) -> None:
        self.clock = Clock()
        self.executor = Moody(self.clock, limits.block_size)
        self.engine = Engine(scheduler(limits), self.executor, self.clock, (EOS,), depth=depth)
        self.leisure = Leisure(self.engine)

    def rest(self) -> list[Rehearsed]:
        """Until the engine would sleep."""
        told = []
        while (wait := self.leisure.wait()) is not None:
            self.clock.ns += round(wait / NS)
            if (report := self.leisure.spend()) is not None:
                told.append(report)
        return told

    def serve(self, name: str, prompt: list[int], max_tokens: int) -> list[StepRecord]:
        asked = request(name, prompt, max_tokens)
        self.engine.handle(Add(name, prompt, asked.params, seed=0))
        records = []
        while self.engine.has_work:
            self.leisure.served()
            records.append(self.engine.step())
        assert [token for record in records for row in record.token_ids for token in row] == alone(asked, LIMITS)
        return records


def test_an_idle_engine_tells_what_a_row_alone_takes_and_then_sleeps() -> None:
    house = House()
    told = house.rest()
    assert len(told) == ENOUGH
    for report in told:
        assert 1 <= report.context <= LIMITS.block_size
        alone_ns = cost(work_of([report.context - 1], [1]))
        assert report.took_ns == pytest.approx(alone_ns, abs=10_000), "a little for looking at clocks"
    assert house.leisure.wait() is None and house.leisure.spend() is None
    house.serve("r", [3, 1, 4], 5)
    assert len(house.rest()) == ENOUGH, "whoever was served may have been slowed down"


def test_bursts_are_short_and_far_between() -> None:
    house = House()
    began = house.clock.ns
    ends = [report.ended_ns for report in house.rest()]
    steps = [plan for plan in house.executor.plans if plan.counts]
    busy = sum(cost(work_of(plan.starts, plan.counts)) for plan in steps) * NS
    assert busy < 0.12 * (ends[-1] - began) * NS
    assert ENOUGH * WARM < busy < 2 * ENOUGH * WARM
    assert ends[0] - began > (PAUSE + WARM) / NS


def test_what_is_cached_and_who_comes_are_not_touched() -> None:
    house = House()
    prompt = list(range(1, 14))
    house.serve("a", prompt, 5)
    free = house.engine.step().num_free_blocks
    house.rest()
    assert house.engine.step().num_free_blocks == free
    records = house.serve("b", prompt, 5)
    assert sum((record.cached for record in records), ()) == (12,)
    many = [request(f"r{number}", [number + 1], 6) for number in range(LIMITS.max_num_seqs)]
    for one in many:
        house.engine.handle(Add(one.request_id, one.tokens, one.params, seed=0))
    output: dict[str, list[int]] = {}
    while house.engine.has_work:
        record = house.engine.step()
        for name, tokens in zip(record.request_ids, record.token_ids, strict=True):
            output.setdefault(name, []).extend(tokens)
    assert output == {one.request_id: alone(one, LIMITS) for one in many}


def test_a_burst_that_somebody_interrupts_is_forgotten() -> None:
    house = House()
    house.clock.ns += round(PAUSE / NS)
    for _ in range(20):
        assert house.leisure.spend() is None
    assert house.leisure.wait() == 0.0, "in the middle of a burst"
    house.serve("r", [3, 1, 4], 5)
    assert house.leisure.wait() == pytest.approx(PAUSE, abs=0.01)
    assert len(house.rest()) == ENOUGH


def test_long_steps_are_not_tried_twice() -> None:
    """Whoever arrives in the middle of one waits for it."""
    house = House()
    house.executor.slower = round(LONGEST / NS)
    assert len(house.rest()) == 1
    house.serve("r", [3, 1, 4], 5)
    assert house.rest() == []


def test_a_step_that_breaks_is_the_last_until_somebody_is_served(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    house.executor.is_broken = True
    assert house.rest() == [] and "no such kernel" in caplog.text
    house.executor.is_broken = False
    house.serve("r", [3, 1, 4], 5)
    assert len(house.rest()) == ENOUGH


@pytest.mark.parametrize("house", [House(depth=1), House(replace(LIMITS, max_model_len=1, block_size=1))])
def test_nothing_is_tried_where_it_would_tell_nothing(house: House) -> None:
    assert house.leisure.wait() is None and house.rest() == []


def test_a_rehearsal_is_learned_from_however_often_it_was_learned() -> None:
    times = steptime.StepTimes()
    for _ in range(200):
        times.learn(work_of([10], [1]), 0.004)
    before = times.num_steps
    for _ in range(60):
        times.rehearsed(Rehearsed(0, 6_000_000, 11))
    assert times.num_steps == before + 60
    assert times.typical(work_of([10], [1])) == pytest.approx(0.006, rel=0.1)
    few = StepTimes(times.learned())
    for _ in range(60):
        few.learn(work_of([10], [1]), 0.004)
    assert few.typical(work_of([10], [1])) > 0.0042, "of steps that serve few are learned from"


class Resting(Recorded):
    """Between two of its turns the engine has time for itself, if there is nothing to do."""

    def start(self) -> None:
        super().start()
        self._leisure = Leisure(self._engine)
        self.told = 0

    def turn(self) -> None:
        if self._engine.has_work:
            self._leisure.served()
        else:
            self._now += round(PAUSE / NS)
            while (report := self._leisure.spend()) is None and self._leisure.wait() == 0.0:
                pass
            if report is not None:
                self.recorder.rehearsed(report)
                self.told += 1
        super().turn()


def test_rehearsals_leave_no_trace_in_what_is_replayed() -> None:
    resting = Resting(3, Batching())
    outcome = replay(resting.play(40))
    assert outcome.difference is None and outcome.requests == 40
    assert resting.told > 0
