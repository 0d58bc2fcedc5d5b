"""Step times that are learned, on costs that are known."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.played import LIMITS

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.step_time import StepTimeModel, Work, work_of
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo
from slotwise.engine.scheduling import Scheduling
from slotwise.observe import step_time_store as step_time

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

    def teach(self, times: StepTimeModel, steps: int, least: int = 1, most: int = 64) -> None:
        for _ in range(steps):
            work = self.work(least, most)
            times.learn(work, self.seconds(work))


def off(times: StepTimeModel, work: Work, factor: float = 1.0) -> float:
    return abs(times.seconds(work) / (cost(work) * factor) - 1)


def test_of_steps_like_a_hundred_others_few_are_learned_from_and_what_is_new_always() -> None:
    times, now = StepTimeModel(), 0.0

    def step(work: Work) -> int:
        """How many of these were learned from."""
        nonlocal now
        before, now = times.num_steps, now + 1
        times.step(work, now, now + cost(work))
        return times.num_steps - before

    for _ in range(100):
        step(work_of([200] * 8, [1] * 8))
    assert sum(step(work_of([200] * 8, [1] * 8)) for _ in range(100)) == 25
    assert all(step(work_of([200] * 8, [1] * 7 + [count])) for count in range(30, 60))
    assert step(work_of([200] * 9, [1] * 9)) == step(work_of([200] * 40, [1] * 40)) == 1


def test_a_routine_step_that_is_skipped_unseen_changes_nothing_else() -> None:
    seen, unseen, now, skipped = StepTimeModel(), StepTimeModel(), 0.0, 0
    draw = random.Random(3)
    for _ in range(2000):
        rows = draw.choice((1, 8, 8, 8, 30))
        starts = [draw.randrange(5000) if draw.random() < 0.1 else 600 + row for row in range(rows)]
        counts = [draw.choice((1, 1, 1, 5)) if draw.random() < 0.02 else 1 for _ in range(rows)]
        started = now + draw.choice((-0.005, 0.0, 0.001))
        ended = started + draw.choice((0.0, 0.005, 0.02))
        now = max(now, ended)
        seen.step(work_of(starts, counts), started, ended)
        if unseen.skips(starts, counts, started, ended):
            skipped += 1
        else:
            unseen.step(work_of(starts, counts), started, ended)
        assert vars(seen).keys() == vars(unseen).keys()
        assert all(vars(unseen)[name] == value for name, value in vars(seen).items())
    assert skipped > 40


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_steps_are_enough_and_hiccups_do_not_count(seed: int) -> None:
    times, machine = StepTimeModel(), Machine(seed, hiccups=0.05)
    machine.teach(times, 200)
    assert sorted(off(times, machine.work()) for _ in range(100))[50] < 0.06
    assert 0.0 < times.error < 0.1
    assert all(value >= 0 for value in times.prediction().shares)


@pytest.mark.parametrize("seed", range(3))
def test_one_row_alone_is_priced_after_load_that_never_had_fewer_than_four(seed: int) -> None:
    times = StepTimeModel()
    Machine(seed).teach(times, 300, least=4)
    assert off(times, ALONE) < 0.15


def test_streams_that_never_change_are_not_taken_for_what_one_of_them_would_cost() -> None:
    times = StepTimeModel()
    for step in range(200):
        work = work_of([100 + step] * 8, [1] * 8)
        times.learn(work, cost(work))
    assert off(times, ALONE) < 0.25


@pytest.mark.parametrize("seed", range(3))
def test_a_handful_of_small_steps_is_enough_to_price_a_row_alone_behind_a_burst(seed: int) -> None:
    times, machine = StepTimeModel(), Machine(seed, hiccups=0.0)
    for rows in (1, 4, 16):
        for step in range(4):
            few = work_of([step] * rows, [1] * rows)
            times.learn(few, machine.seconds(few))
    machine.teach(times, 300, least=48)
    for rows in (1, 2, 8):
        few = work_of([150] * rows, [1] * rows)
        assert off(times, few) < 0.15


def test_the_first_of_as_many_rows_costs_more_and_is_known_to() -> None:
    """Rows that were never together are recorded, and so is the first context beyond a power of two."""
    times, random_ = StepTimeModel(), random.Random(1)
    met: set[tuple[int, int]] = set()

    def took(work: Work) -> float:
        seen = (work.rows, max(256, 1 << (work.longest - 1).bit_length()))
        recording = 0.0 if seen in met else 4e-3
        met.add(seen)
        return cost(work) + (5e-3 if work.pairs else recording)

    errors: dict[bool, list[float]] = {True: [], False: []}
    for step in range(400):
        rows = random_.randint(1, 64)
        start = random_.choice((100, 400, 900))
        counts = [1] * (rows - 1) + [random_.choice((1, 1, 60))]
        work = work_of([start] * rows, counts)
        known = len(met)
        predicted, seconds = times.seconds(work), took(work)
        times.learn(work, seconds)
        if step >= 100 and not work.pairs:
            errors[len(met) > known].append(abs(predicted / seconds - 1))
    assert min(len(errors[True]), len(errors[False])) > 30
    medians = {first: sorted(one)[len(one) // 2] for first, one in errors.items()}
    assert max(medians.values()) < 0.15, medians


def test_a_machine_that_others_share_is_followed_at_once_and_what_is_typical_is_not() -> None:
    times = StepTimeModel()
    Machine(1, hiccups=0.0).teach(times, 500)
    before = times.typical(ALONE)
    slow = Machine(2, factor=1.2, hiccups=0.0)
    slow.teach(times, 30)
    assert sorted(off(times, slow.work(), 1.2) for _ in range(100))[50] < 0.08
    assert times.seconds(ALONE) == pytest.approx(cost(ALONE) * 1.2, rel=0.12)
    assert times.typical(ALONE) == pytest.approx(before, rel=0.06)


def test_an_hour_of_full_batches_makes_nobody_forget_a_row_alone() -> None:
    times, machine = StepTimeModel(), Machine(1)
    for context in range(1, 40):
        alone = Work(1, 1, context, 0.0)
        times.learn(alone, machine.seconds(alone))
    machine.teach(times, 3000, least=48)
    assert off(times, ALONE) < 0.08


def test_a_machine_that_became_slower_is_noticed() -> None:
    times = StepTimeModel()
    Machine(1).teach(times, 500)
    slow = Machine(2, factor=2.0)
    slow.teach(times, 500)
    assert sorted(off(times, slow.work(), 2.0) for _ in range(100))[50] < 0.1


def test_steps_that_overlap_begin_when_the_one_before_has_ended() -> None:
    one, other = StepTimeModel(), StepTimeModel()
    work = work_of([10, 20], [1, 1])
    for step in range(30):
        one.step(work, step * 0.01, step * 0.01 + 0.01)
        other.step(work, step * 0.01 - 0.009, step * 0.01 + 0.01)
    assert one.seconds(work) == pytest.approx(0.01, rel=0.01) == other.seconds(work)


def test_nothing_is_known_at_first_and_no_work_takes_no_time() -> None:
    times = StepTimeModel()
    assert not times.is_trained and times.seconds(ALONE) == 0 == times.error
    times.step(work_of([], []), 0, 5)
    assert not times.is_trained
    times.learn(ALONE, 0.002)
    assert times.is_trained and times.seconds(ALONE) == pytest.approx(0.002, rel=0.01)
    assert times.seconds(work_of([], [])) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=9))
def test_work_is_what_attention_and_products_do(rows: list[tuple[int, int, int]]) -> None:
    starts, counts, padding = zip(*rows, strict=True)
    work = work_of(starts, counts, padding if any(padding) else ())
    context = pairs = longest = 0
    for start, count, pad in rows:
        attended = sum(position + 1 for position in range(start, start + count + pad))
        if count + pad == 1:
            context += attended
            longest = max(longest, attended)
        else:
            pairs += attended
    assert work[:4] == (sum(counts) + sum(padding), len(rows), context, pairs)
    assert pairs or work.longest == longest, "how far a row of a step of such rows alone reads"


def test_what_was_learned_is_kept_and_soon_outweighed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = step_time.path_for(["a shape", "bfloat16", "2 threads"])
    assert path.is_relative_to(tmp_path) and path != step_time.path_for(["a shape", "float32", "2 threads"])
    assert not step_time.load(path).is_trained
    times = StepTimeModel()
    Machine(1).teach(times, 400)
    step_time.save(path, times)
    again = step_time.load(path)
    assert off(again, ALONE) < 0.1 and again.num_steps == 0 == again.error
    Machine(2, factor=3.0).teach(again, 300)
    work = Machine(3).work()
    assert off(again, work, 3.0) < 0.15


def test_a_config_is_read_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"name": "模型"}', encoding="utf-8")
    script = """if True:
        import sys
        from types import SimpleNamespace
        from slotwise.engine.config import EngineConfig
        from slotwise.observe import step_time_store as step_time
        info = SimpleNamespace(dtype="", quantization="", cache_dtype="", device="", product_path="", threads=1,
                                   speculation=None)
        print(step_time.path_for(step_time.traits(EngineConfig(sys.argv[1]), info)).name)"""
    names = set()
    for locale in ("C", "C.UTF-8"):
        environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": locale}
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        names.add(done.stdout)
    assert len(names) == 1


INFINITE = {"weight": 1.0, "products": [*[0.0] * 5, 1e-300, *[0.0] * 15], "totals": [1.0, 0.0, 1e59, 0.0, 0.0, 0.0]}


@pytest.mark.parametrize("content", [
    "", "{}", '{"sizes": {"decode-1": {"weight": 1, "products": [1], "totals": []}}}',
    json.dumps({"sizes": {"prompts-1": INFINITE}})])
def test_a_file_that_says_nothing_is_left_alone(tmp_path, content: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(content)
    assert not step_time.load(path).is_trained


INFO = EngineInfo("toy", "cpu", "bfloat16", 100, LIMITS, Scheduling(Batching(), max_num_seqs=6,
                                                                    max_num_batched_tokens=16), ())


ONE = Work(1, 1, 10, 0.0)


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "times.json")
    assert not step_time.load(tmp_path / "times.json").is_trained
    assert "not a regular file" in caplog.text


def test_what_one_server_learned_the_next_one_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, layers in (("small", 2), ("large", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"num_hidden_layers": {layers}}}')
    config = EngineConfig(model=str(tmp_path / "small"))
    with step_time.kept(config, INFO) as times:
        assert not times.is_trained
    assert not (tmp_path / "cache").exists(), "nothing was learned, so nothing is kept"
    with pytest.raises(KeyboardInterrupt), step_time.kept(config, INFO) as times:
        times.learn(ONE, 0.004)
        raise KeyboardInterrupt
    with step_time.kept(config, INFO) as times:
        assert times.seconds(ONE) == pytest.approx(0.004, rel=0.01)
    with step_time.kept(replace(config, model=str(tmp_path / "large")), INFO) as times:
        assert not times.is_trained
    with step_time.kept(config, msgspec.structs.replace(INFO, dtype="float32")) as times:
        assert not times.is_trained
    with step_time.kept(config, msgspec.structs.replace(INFO, threads=2)) as times:
        assert not times.is_trained
