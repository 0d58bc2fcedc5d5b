"""What a step must cost, by hand; and a real run held against it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.records import record_of

from slotwise import builtin
from slotwise.cli import main
from slotwise.compose import machine as machine_module
from slotwise.compose.engine_builder import load
from slotwise.compose.machine import faster, measure_machine
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import describe
from slotwise.core.record import RowKind, StepRecord
from slotwise.core.step_time import Machine, Roofline
from slotwise.engine.config import EngineConfig
from slotwise.measure.bench.profiler import DECODE, MIXED, PREFILL, RooflineShares, cost_of, kind_of

CONFIG = describe(builtin.path(), "float32", ReferenceKernels())
MS = 1_000_000  # nanoseconds


def record(starts: tuple[int, ...], counts: tuple[int, ...], sampled: tuple[bool, ...]) -> StepRecord:
    tokens = tuple((5,) if samples else () for samples in sampled)
    kinds = tuple(RowKind.DECODE if start == 9 else RowKind.PREFILL for start in starts)
    return record_of(0, 0, 100 * MS, starts=starts, counts=counts, tokens=tokens, kinds=kinds)


def of_the_builtin_model(machine: Machine) -> Roofline:
    return load(EngineConfig(str(builtin.path()), dtype="float32")).roofline(machine)


def test_the_cost_of_a_step_is_what_its_rows_ask_for() -> None:
    roofline = of_the_builtin_model(Machine(1.0, 1.0))
    heads, kv_heads, dim, layers = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.num_layers
    inner = layers * CONFIG.hidden_size * ((2 * heads + 2 * kv_heads) * dim + 3 * CONFIG.intermediate_size)
    head = CONFIG.hidden_size * CONFIG.vocab_size
    cost = cost_of(record((10, 0, 4), (1, 3, 2), (True, True, False)), roofline)
    contexts, pairs = 11 + 3 + 6, 11 + (1 + 2 + 3) + (5 + 6)
    assert 0 <= roofline.weight_bytes - 4 * (inner + head) < 0.01 * roofline.weight_bytes  # norms, too
    assert cost.bytes == roofline.weight_bytes + 4 * 2 * layers * kv_heads * dim * contexts
    assert cost.operations == 2 * (6 * inner + 2 * head) + 4 * layers * heads * dim * pairs
    decode = cost_of(record((10, 6), (1, 1), (True, True)), roofline)
    assert decode.operations == 2 * 2 * (inner + head) + 4 * layers * heads * dim * (11 + 7)


def test_steps_are_told_apart_and_the_larger_bound_counts() -> None:
    achieved = RooflineShares(Roofline(Machine(1e9, 1e12), 1 << 20, 1000, 100_000, 10_000, 500))
    for starts, counts in (((9, 9), (1, 1)), ((9, 0), (1, 7)), ((0, 0), (4, 7))):
        achieved.step(record(starts, counts, (True, True)))
    achieved.step(record_of(-1, 0, 5 * MS))  # nothing ran
    assert [tally.steps for tally in achieved.kinds.values()] == [1, 1, 1]
    assert [tally.tokens for tally in achieved.kinds.values()] == [2, 8, 11]
    for tally in achieved.kinds.values():
        assert tally.bound_seconds == max(tally.bytes_seconds, tally.operations_seconds)
        assert tally.achieved == pytest.approx(tally.bound_seconds / 0.1)


def test_kinds() -> None:
    assert kind_of(record((9,), (1,), (True,))) == DECODE
    assert kind_of(record((9, 0), (1, 2), (True, True))) == MIXED
    assert kind_of(record((0,), (2,), (True,))) == PREFILL


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_measured_product_is_the_one_that_the_model_uses(
    monkeypatch: pytest.MonkeyPatch, quantization: str,
) -> None:
    loaded = load(EngineConfig(str(builtin.path()), dtype="bfloat16", quantization=quantization))
    kernels, packed = loaded._decoder.kernels, []
    monkeypatch.setattr(kernels, "linear", lambda weight: packed.append(weight) or (lambda tokens: tokens))
    machine = measure_machine(loaded._decoder, (16, 32), seconds=0.0)
    assert [(weight.shape, weight.dtype) for weight in packed] == [
        ((size, size), loaded.model_config.dtype) for size in (16, 32)]
    assert machine.bytes_per_second > 0 and machine.operations_per_second > 0
    assert faster(Machine(1.0, 4.0), Machine(2.0, 3.0)) == Machine(2.0, 4.0)


@pytest.mark.parametrize("cache", [1 << 12, 1 << 20])
def test_weights_beyond_the_last_cache_are_timed_in_memory_beyond_it(
    monkeypatch: pytest.MonkeyPatch, cache: int,
) -> None:
    decoder, parts = load(EngineConfig(str(builtin.path()), dtype="bfloat16"))._decoder, list[int]()
    monkeypatch.setattr(machine_module, "last_cache_bytes", lambda: cache)
    monkeypatch.setattr(machine_module, "_reader", lambda kernels: (lambda part: parts.append(len(part)), 64))
    measure_machine(decoder, (16,), caches=8, seconds=0.0)
    assert decoder.step_weight_bytes > cache
    assert sum(parts) == 2 * 8 * cache  # once untimed, once timed
    monkeypatch.setattr(machine_module, "last_cache_bytes", lambda: 1 << 40)
    parts.clear()
    measure_machine(decoder, (16,), seconds=0.0)
    assert 0 <= sum(parts) // 2 - decoder.step_weight_bytes < 64


@pytest.mark.slow
def test_a_run_is_held_against_the_machine_and_taken_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "roofline.json"
    words = ("--roofline", "--num-prompts", "6", "--output-lengths", "fixed:8", "--input-lengths", "uniform:4:60",
             "--max-num-seqs", "4", "--output-json", str(path))
    assert main(["bench", "throughput", *words]) == 0
    said = capsys.readouterr().out
    assert "decode" in said and "products" in said
    result = json.loads(path.read_text())
    kinds, parts = result["kinds"], result["parts"]
    assert kinds["decode"]["steps"] > 0
    for kind in kinds.values():
        assert (kind["bound_seconds"] > 0) == (kind["steps"] > 0)
        assert kind["achieved"] <= 1  # rates are those that the model's own steps can reach
        assert kind["achieved"] == pytest.approx(kind["bound_seconds"] / kind["seconds"] if kind["steps"] else 0)
    assert sum(kind["tokens"] for kind in kinds.values()) == result["workload"]["prompt_tokens"] + 6 * 7
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(result["timed_seconds"])


def test_a_step_that_beats_its_bound_achieves_all_of_it() -> None:
    achieved = RooflineShares(Roofline(Machine(1e3, 1e3), 1 << 20, 1000, 100_000, 10_000, 500))
    achieved.step(record((9, 9), (1, 1), (True, True)))
    tally = achieved.kinds[DECODE]
    assert tally.bytes_seconds > tally.seconds and tally.achieved == 1
