"""What a step must cost, by hand; and a real run held against it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live import cli

from slotwise import builtin
from slotwise.bench.roofline import DECODE, MIXED, PREFILL, Machine, Roofline, kind_of
from slotwise.engine.messages import StepRecord
from slotwise.model.load import describe

CONFIG = describe(builtin.path(), "float32")
MS = 1_000_000  # nanoseconds


def record(starts: tuple[int, ...], counts: tuple[int, ...], sampled: tuple[bool, ...]) -> StepRecord:
    tokens = tuple((5,) if samples else () for samples in sampled)
    return StepRecord(0, 0, 100 * MS, starts=starts, counts=counts, token_ids=tokens)


def test_the_cost_of_a_step_is_what_its_rows_ask_for() -> None:
    roofline = Roofline(CONFIG, Machine(1.0, 1.0), 1000)
    heads, kv_heads, dim, layers = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.num_layers
    inner = layers * CONFIG.hidden_size * ((2 * heads + 2 * kv_heads) * dim + 3 * CONFIG.intermediate_size)
    head = CONFIG.hidden_size * CONFIG.vocab_size
    cost = roofline.cost(record((10, 0, 4), (1, 3, 2), (True, True, False)))
    contexts, pairs = 11 + 3 + 6, 11 + (1 + 2 + 3) + (5 + 6)
    assert cost.bytes == 1000 + 4 * 2 * layers * kv_heads * dim * contexts
    assert cost.operations == 2 * (6 * inner + 2 * head) + 4 * layers * heads * dim * pairs


def test_steps_are_told_apart_and_the_larger_bound_counts() -> None:
    roofline = Roofline(CONFIG, Machine(1e9, 1e12), 1 << 20)
    for starts, counts in (((9, 9), (1, 1)), ((9, 0), (1, 7)), ((0, 0), (4, 7))):
        roofline.step(record(starts, counts, (True, True)))
    roofline.step(StepRecord(-1, 0, 5 * MS))  # nothing ran
    assert [tally.steps for tally in roofline.kinds.values()] == [1, 1, 1]
    assert [tally.tokens for tally in roofline.kinds.values()] == [2, 8, 11]
    for tally in roofline.kinds.values():
        assert tally.bound_seconds == max(tally.bytes_seconds, tally.operations_seconds)
        assert tally.achieved == pytest.approx(tally.bound_seconds / 0.1)


def test_kinds() -> None:
    assert kind_of(record((9,), (1,), (True,))) == DECODE
    assert kind_of(record((9, 0), (1, 2), (True, True))) == MIXED
    assert kind_of(record((0,), (2,), (True,))) == PREFILL


@pytest.mark.slow
def test_a_run_is_held_against_the_machine_and_taken_apart(tmp_path: Path) -> None:
    path = tmp_path / "roofline.json"
    run = cli("bench", "throughput", "--roofline", "--num-prompts", "6", "--output-lengths", "fixed:8",
              "--input-lengths", "uniform:4:60", "--max-num-seqs", "4", "--output-json", str(path))
    assert run.returncode == 0, run.stderr
    assert "decode" in run.stdout and "products" in run.stdout
    result = json.loads(path.read_text())
    kinds, parts = result["kinds"], result["parts"]
    assert kinds["decode"]["steps"] > 0 and all(0 <= kind["achieved"] < 2 for kind in kinds.values())
    assert sum(kind["tokens"] for kind in kinds.values()) == result["workload"]["prompt_tokens"] + 6 * 7
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(result["timed_seconds"])
