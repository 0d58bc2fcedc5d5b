"""Throughput and latency of an engine, on a virtual clock where every second is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.virtual import ROW_NS, STEP_NS, TOKEN_NS, queued, stand

from slotwise.measure.bench.offline_run import LatencyBatch, latency, throughput

STEP, ROW, TOKEN = STEP_NS * 1e-9, ROW_NS * 1e-9, TOKEN_NS * 1e-9


def interrupt_at(count: int) -> Callable[[int], None]:
    """Someone who presses Ctrl-C once so many are done."""
    def watch(done: int) -> None:
        if done >= count:
            raise KeyboardInterrupt
    return watch


def test_throughput_is_tokens_over_the_engines_seconds() -> None:
    told: list[int] = []
    result = throughput(stand({"max_num_seqs": 2}), queued([3, 3, 2], [5, 5, 5]), told.append)
    seconds = 5 * STEP + (3 * 2 + 2 * 1) * ROW + 3 * 4 * TOKEN  # two rows for three steps, the third alone for two
    assert result["elapsed_time"] == pytest.approx(seconds)
    assert (result["completed"], result["steps"]) == (3, 5)
    assert (result["total_input_tokens"], result["total_output_tokens"], result["total_num_tokens"]) == (15, 8, 23)
    assert result["output_tokens_per_second"] == pytest.approx(8 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(23 / result["elapsed_time"])
    assert result["requests_per_second"] == pytest.approx(3 / result["elapsed_time"])
    assert result["status"] == "completed"
    assert told == sorted(told) and told[-1] == 3


def test_an_interrupted_throughput_keeps_what_had_ended() -> None:
    result = throughput(stand({"max_num_seqs": 1}), queued([2, 3, 50]), interrupt_at(2))
    assert (result["status"], result["completed"], result["num_requests"]) == ("interrupted", 2, 3)
    assert result["total_output_tokens"] == 5
    assert result["elapsed_time"] == pytest.approx(5 * (STEP + ROW))
    with pytest.raises(KeyboardInterrupt):
        throughput(stand({}), queued([5]), interrupt_at(0))


def test_a_workload_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        throughput(stand({}), queued([5000]))


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_latency_is_from_handing_over_to_the_last_token(batching: str) -> None:
    batch = LatencyBatch(4, input_len=6, output_len=3, num_warmup=1, num_iters=5)
    result = latency(stand({"batching": batching}), batch)
    seconds = 3 * (STEP + 4 * ROW) + 4 * 5 * TOKEN
    assert result["latencies"] == pytest.approx([seconds] * 5)
    assert result["avg_latency"] == pytest.approx(seconds)
    assert result["percentiles"] == pytest.approx(dict.fromkeys(("10", "25", "50", "75", "90", "99"), seconds))


def test_an_interrupted_latency_keeps_its_iterations() -> None:
    batch = LatencyBatch(2, input_len=3, output_len=3, num_warmup=0, num_iters=9)
    seen: list[int] = []

    def watch(done: int) -> None:
        seen.append(done)
        interrupt_at(4)(done)

    result = latency(stand({}), batch, watch=watch)
    assert (result["status"], len(result["latencies"])) == ("interrupted", 4)
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(("numbers", "says"), [
    ((0, 1, 1, 0, 1), "number of requests"), ((1, 0, 1, 0, 1), "length"), ((1, 1, 0, 0, 1), "length"),
    ((1, 1, 1, -1, 1), "num_warmup"), ((1, 1, 1, 0, 0), "num_iters"),
])
def test_batches_that_cannot_be_are_refused(numbers: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LatencyBatch(*numbers)


def test_a_batch_needs_its_slots() -> None:
    with pytest.raises(ValueError, match="--max-num-seqs"):
        latency(stand({"max_num_seqs": 4}), LatencyBatch(5, 1, 1, 0, 1))
