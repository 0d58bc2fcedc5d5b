"""How many drafts a draft model is to propose."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from support.toy import Driver, alone, next_token, request

from slotwise.core.drafting import MEASURING, NO_GAIN, NO_ROOM
from slotwise.core.record import PROPOSED, Proposing, StepPlan, StepResult
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.speculation.draft_model import FIRST_REST, DraftModelProposer, ProposingTimes
from slotwise.core.speculation.proposer import proposer_of
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.engine.executor import FakeExecutor

LIMITS = SchedulerLimits(max_model_len=600, num_blocks=600, block_size=8, max_num_seqs=16, max_num_batched_tokens=64)


def steps(weights: float, token: float) -> StepTimeModel:
    """Steps take `weights` seconds and `token` more for each token."""
    times = StepTimeModel()
    for _ in range(30):
        for rows in (1, 2, 4, 8, 16):
            times.learn(Work(rows, rows, 100 * rows, 0.0, longest=100), weights + token * rows)
            times.learn(Work(rows + 8, rows + 8, 100 * rows, 0.0, drafts=8), weights + token * (rows + 8))
            times.learn(Work(40, rows, 0, 800.0), weights + token * 40)
    return times


class Executor(FakeExecutor):
    """A draft model that is right with probability `share` and takes `each` seconds a pass."""

    def __init__(self, share: float, each: float) -> None:
        super().__init__(LIMITS.block_size, next_token, self.guess)
        self.share, self.each = share, each
        self.draw = Random(1)
        self.proposing: list[Proposing | None] = []

    def guess(self, known: list[int], most: int) -> list[int]:
        tokens = list(known)
        for _ in range(most):
            tokens.append(next_token(tokens) if self.draw.random() < self.share else 99)
        return tokens[len(known):]

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        passes, tokens = max(map(len, plan.drafts), default=0), sum(map(len, plan.drafts))
        self.proposing.append(Proposing(self.each * passes, passes, tokens) if plan.has_proposed else None)

    def collect(self) -> StepResult:
        return super().collect()._replace(proposing=self.proposing.pop(0))


def played(share: float, each: float, times: StepTimeModel, num_rows: int = 1, max_tokens: int = 400) -> Driver:
    driver = Driver(LIMITS, times=times, proposer=proposer_of(Speculation("draft_model", 8, model="x"), times))
    driver.executor = Executor(share, each)
    for number in range(num_rows):
        driver.add(request(f"r{number}", [number, 1, 2], max_tokens, ignore_eos=True))
    driver.run()
    for number in range(num_rows):
        assert driver.output[f"r{number}"] == alone(request(
            f"r{number}", [number, 1, 2], max_tokens, ignore_eos=True), LIMITS)
    return driver


def drafts_of(driver: Driver, last: int = 60) -> float:
    """Drafts a row and step, in the last steps that decode."""
    plans = [plan for plan in driver.plans if plan.slots][-last:]
    return sum(len(row) for plan in plans for row in plan.drafts) / sum(plan.num_rows for plan in plans)


def test_a_cheap_draft_model_that_is_right_proposes_many_and_a_dear_one_none():
    cheap, dear = (drafts_of(played(0.95, each, steps(1.0, 0.0))) for each in (0.02, 1.0))
    assert cheap > 5 and dear < 0.3


def test_the_number_follows_how_often_drafts_are_right():
    numbers = [drafts_of(played(share, 0.1, steps(1.0, 0.01))) for share in (0.1, 0.5, 0.8, 0.97)]
    assert numbers == sorted(numbers) and numbers[0] < 0.5 < 1.5 < numbers[-1]


def test_a_full_batch_that_computes_has_none():
    """A draft costs what a row costs."""
    driver = played(0.95, 0.1, steps(0.0, 1.0), num_rows=8, max_tokens=60)
    assert not any(plan.drafts for plan in driver.plans)
    assert all(plan.draft_limit in ("", NO_GAIN, NO_ROOM) for plan in driver.plans)


def test_wrong_drafts_are_tried_less_and_less_often_and_used_once_they_are_right():
    times = steps(1.0, 0.01)
    driver = Driver(LIMITS, times=times, proposer=proposer_of(Speculation("draft_model", 8, model="x"), times))
    driver.executor = Executor(0.0, 0.2)
    driver.add(request("one", [1, 2, 3], 590, ignore_eos=True))
    drafted = []
    while len(driver.output.get("one", [])) < 300:
        drafted.append(bool(driver.plan().drafts))
        driver.commit()
    tries = [at for at, one in enumerate(drafted) if one][1:]
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps == sorted(gaps) and gaps[1] >= 2 * FIRST_REST and sum(drafted[-100:]) <= 2
    driver.executor.share = 1.0
    while driver.scheduler.has_work:
        drafted.append(bool(driver.plan().drafts))
        driver.commit()
    assert all(drafted[-5:-1])


class Timed(Driver):
    """Steps take what a step of so many tokens took here with SmolLM2-135M's shape in bfloat16, in seconds."""

    TAKES = ((1, 0.0095), (8, 0.0117), (16, 0.0160), (24, 0.0216), (40, 0.0339), (80, 0.066))

    def commit(self) -> None:
        plan = self.flying[0]
        passes, tokens = max(map(len, plan.drafts), default=0), sum(plan.counts)
        (low, below), (high, above) = next(two for two in pairwise(self.TAKES) if tokens <= two[1][0])
        step = below + (above - below) * (tokens - low) / (high - low)
        self.now += step + (0.002 + 0.0002 * plan.num_rows) * passes - 1.0
        super().commit()


class TimedExecutor(Executor):
    def submit(self, plan: StepPlan) -> None:
        self.each = 0.002 + 0.0002 * plan.num_rows
        super().submit(plan)


@pytest.mark.parametrize(("share", "pays"), [(0.85, False), (1.0, True)])
def test_eight_streams_after_one_find_out_what_a_step_without_drafts_takes(share, pays):
    """From one stream, whose steps nearly all have drafts, a step of eight rows is predicted to take too long.

    Drafts gain a fifth there if all are right, and next to nothing if 85% are; finding out costs a little.  Before the
    step without drafts was measured, this ran at 0.905 of none.
    """
    limits = replace(LIMITS, max_num_batched_tokens=200)
    times = StepTimeModel()
    driver = Timed(limits, times=times, proposer=proposer_of(Speculation("draft_model", 8, model="x"), times))
    driver.executor = TimedExecutor(share, 0.0)
    driver.add(request("one", [1, 2], 500, ignore_eos=True))
    driver.run()
    alone_plans, began = len(driver.plans), driver.now
    for number in range(8):
        driver.add(request(f"r{number}", [number, 1, 2], 590, ignore_eos=True))
    driver.run()
    plans = [plan for plan in driver.plans[alone_plans:] if plan.num_rows == 8 and set(plan.kinds) == {1}]
    assert plans[0].draft_limit == MEASURING and len([one for one in plans if one.draft_limit == MEASURING]) < 30
    assert times.seconds(Work(8, 8, 4000, 0.0)) == pytest.approx(0.0117, rel=0.1)
    rate = 8 * 590 / (driver.now - began)
    assert rate > 8 / 0.0117 * (1.1 if pays else 0.95)


def test_drafts_from_texts_come_first():
    """A prediction is verified as it is, and the draft model proposes where there is none."""
    times = steps(1.0, 0.0)
    driver = Driver(LIMITS, times=times, proposer=proposer_of(Speculation("draft_model", 4, model="x"), times))
    driver.executor = Executor(1.0, 0.01)
    told, other = (request(name, [3, number, 4], 20, ignore_eos=True) for number, name in enumerate(("told", "other")))
    told.spec = replace(told.spec, prediction=tuple(alone(told, LIMITS)))
    driver.add(told), driver.add(other)
    driver.run()
    (row,) = [plan for plan in driver.plans if plan.drafts and len(plan.request_ids) == 2][:1]
    drafts = dict(zip(row.request_ids, row.drafts, strict=True))
    assert drafts["told"] == told.spec.prediction[1 : 1 + len(drafts["told"])] and set(drafts["other"]) == {PROPOSED}
    assert driver.output["told"] == list(told.spec.prediction) and driver.output["other"] == alone(other, LIMITS)


def test_proposing_counts_in_the_time_of_a_step():
    times = steps(1.0, 0.0)
    proposer = proposer_of(Speculation("draft_model", 8, model="x"), times)
    assert isinstance(proposer, DraftModelProposer)
    assert 0 < proposer.seconds(1, 4) == pytest.approx(4 * proposer.seconds(1, 1))
    proposer.committed([], [], Proposing(8.0, 4, 4))
    assert proposer.seconds(1, 4) == pytest.approx(8.0, rel=0.01) and not proposer.seconds(3, 0)


def test_seconds_of_passes_and_tokens_are_learned():
    times, draw = ProposingTimes(), Random(2)
    assert not times.is_trained and times.seconds(3, 3) == 0
    for _ in range(60):
        passes, tokens = draw.randint(1, 8), draw.randint(1, 300)
        times.learn(Proposing((0.01 * passes + 0.001 * tokens) * draw.uniform(0.9, 1.1), passes, tokens))
    assert times.seconds(4, 4) == pytest.approx(0.044, rel=0.15)
    assert times.seconds(1, 200) == pytest.approx(0.21, rel=0.15)
