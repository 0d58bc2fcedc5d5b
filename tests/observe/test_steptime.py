"""Step times that are learned, on costs that are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.core.steptime import StepTimes, Work, non_negative, work_of
from slotwise.observe import kept

ALONE = Work(tokens=1, rows=1, context=200, pairs=0.0)


def cost(work: Work) -> float:
    """Seconds, much like a small model's on two cores; up to eight rows hide behind the weights, a kink."""
    hidden = 30e-6 * min(work.tokens, 8)
    return 2e-3 + 45e-6 * work.tokens - hidden + 20e-6 * work.rows + 3e-7 * work.context + 4e-8 * work.pairs


class Machine:
    """Steps of random shapes that take what `cost` says, give or take, and now and then ten times as long."""

    def __init__(self, seed: int, factor: float = 1.0, hiccups: float = 0.02) -> None:
        self.random = random.Random(seed)
        self.factor, self.hiccups = factor, hiccups

    def work(self, least: int = 1, most: int = 64) -> Work:
        rows = self.random.randint(least, most)
        starts = [self.random.randint(0, 800) for _ in range(rows)]
        counts = [1] * rows
        if self.random.random() < 0.2:
            counts[-1] = self.random.randint(2, 400)
        return work_of(starts, counts)

    def seconds(self, work: Work) -> float:
        slow = 10 if self.random.random() < self.hiccups else 1
        return cost(work) * self.factor * self.random.lognormvariate(0, 0.04) * slow

    def teach(self, times: StepTimes, steps: int, least: int = 1, most: int = 64) -> None:
        for _ in range(steps):
            work = self.work(least, most)
            times.learn(work, self.seconds(work))


def off(times: StepTimes, work: Work, factor: float = 1.0) -> float:
    return abs(times.seconds(work) / (cost(work) * factor) - 1)


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_steps_are_enough_and_hiccups_do_not_count(seed: int) -> None:
    times, machine = StepTimes(), Machine(seed, hiccups=0.05)
    machine.teach(times, 200)
    assert sorted(off(times, machine.work()) for _ in range(100))[50] < 0.06
    assert 0.0 < times.error < 0.1
    assert all(value >= 0 for value in times.coefficients.values())


@pytest.mark.parametrize("seed", range(3))
def test_one_row_alone_is_priced_after_load_that_never_had_fewer_than_four(seed: int) -> None:
    times = StepTimes()
    Machine(seed).teach(times, 300, least=4)
    assert off(times, ALONE) < 0.15


def test_streams_that_never_change_are_not_taken_for_what_one_of_them_would_cost() -> None:
    times = StepTimes()
    for step in range(200):
        work = work_of([100 + step] * 8, [1] * 8)
        times.learn(work, cost(work))
    assert off(times, ALONE) < 0.25


def test_an_hour_of_full_batches_makes_nobody_forget_a_row_alone() -> None:
    times, machine = StepTimes(), Machine(1)
    for context in range(1, 40):
        alone = Work(1, 1, context, 0.0)
        times.learn(alone, machine.seconds(alone))
    machine.teach(times, 3000, least=48)
    assert off(times, ALONE) < 0.08


def test_a_machine_that_became_slower_is_noticed() -> None:
    times = StepTimes()
    Machine(1).teach(times, 500)
    slow = Machine(2, factor=2.0)
    slow.teach(times, 500)
    assert sorted(off(times, slow.work(), 2.0) for _ in range(100))[50] < 0.1


def test_steps_that_overlap_begin_when_the_one_before_has_ended() -> None:
    one, other = StepTimes(), StepTimes()
    work = work_of([10, 20], [1, 1])
    for step in range(30):
        one.step(work, step * 0.01, step * 0.01 + 0.01)
        other.step(work, step * 0.01 - 0.009, step * 0.01 + 0.01)
    assert one.seconds(work) == pytest.approx(0.01, rel=0.01) == other.seconds(work)


def test_nothing_is_known_at_first_and_no_work_takes_no_time() -> None:
    times = StepTimes()
    assert not times.knows and times.seconds(ALONE) == 0 == times.error
    times.step(work_of([], []), 0, 5)
    assert not times.knows
    times.learn(ALONE, 0.002)
    assert times.knows and times.seconds(ALONE) == pytest.approx(0.002, rel=0.01)
    assert times.seconds(work_of([], [])) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=9))
def test_work_is_what_attention_and_products_do(rows: list[tuple[int, int, int]]) -> None:
    starts, counts, padding = zip(*rows, strict=True)
    work = work_of(starts, counts, padding if any(padding) else ())
    context = pairs = 0
    for start, count, pad in rows:
        attended = sum(position + 1 for position in range(start, start + count + pad))
        if count + pad == 1:
            context += attended
        else:
            pairs += attended
    assert work == (sum(counts) + sum(padding), len(rows), context, pairs)


def test_shares_are_never_negative() -> None:
    """The second column would have to be, so the first does what it can alone."""
    assert non_negative([[2.0, 1.0], [1.0, 2.0]], [4.0, 1.0]) == pytest.approx([2.0, 0.0], rel=0.01)
    assert non_negative([[2.0, 1.0], [1.0, 2.0]], [3.0, 3.0]) == pytest.approx([1.0, 1.0], rel=0.01)
    assert non_negative([[0.0, 0.0], [0.0, 4.0]], [0.0, 2.0]) == pytest.approx([0.0, 0.5], rel=0.01)


def test_what_was_learned_is_kept_and_soon_outweighed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kept.place(["a shape", "bfloat16", "2 threads"])
    assert path.is_relative_to(tmp_path) and path != kept.place(["a shape", "float32", "2 threads"])
    assert not kept.load(path).knows
    times = StepTimes()
    Machine(1).teach(times, 400)
    kept.save(path, times)
    again = kept.load(path)
    assert off(again, ALONE) < 0.1 and again.num_steps == 0 == again.error
    Machine(2, factor=3.0).teach(again, 300)
    work = Machine(3).work()
    assert off(again, work, 3.0) < 0.15


@pytest.mark.parametrize("content", ["", "{}", '{"sizes": {"decode-1": {"weight": 1, "products": [1], "totals": []}}}'])
def test_a_file_that_says_nothing_is_left_alone(tmp_path, content: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(content)
    assert not kept.load(path).knows
