"""The fold over step records: small runs counted by hand, and laws that hold for any workload under any discipline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lengths import padded_tokens
from support.records import record_of
from support.virtual import BLOCK_BYTES, arriving, queued, stand

from slotwise.core.record import RequestEnd, RowKind
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.measure.bench import accounting
from slotwise.measure.bench.accounting import Accounts, thinned
from slotwise.measure.bench.comparison import DISCIPLINES
from slotwise.measure.bench.offline_run import run_offline
from slotwise.measure.workload.workloads import Workload

STEP, ROW, TOKEN = 0.010, 0.001, 0.0001  # seconds, of the virtual engine


def run(workload: Workload, **asked: object) -> Accounts:
    return run_offline(stand(asked), workload)


def static_by_hand() -> Accounts:
    """Two slots, prompts of 3 and 5 tokens, outputs of 4 and 2; then one request alone.

        slot 0  P d d d  P
        slot 1  P d H H  .
    """
    return run(queued([4, 2, 1], [3, 5, 2]), batching="static", max_num_seqs=2)


def test_a_static_batch_counted_by_hand() -> None:
    entry = static_by_hand().entry()
    assert (entry["steps"], entry["decode_steps"], entry["output_tokens"]) == (5, 5, 7)
    waste = entry["waste"]
    assert (waste["padded_tokens"], waste["held_row_steps"], waste["empty_slot_steps"]) == (2, 2, 1)
    assert entry["occupancy"] == 7 / 10
    assert entry["mean_rows"] == 9 / 5
    assert entry["max_rows"] == 2


def test_a_static_batch_returns_as_one() -> None:
    """Both answers come whole, when the longer one ends: first token and last at once, and no gaps between tokens."""
    accounts = static_by_hand()
    entry = accounts.entry()
    prompts = STEP + 2 * ROW + 8 * TOKEN  # 3 + 5 tokens and 2 of padding, one of each row in its price
    batch = prompts + 3 * (STEP + 2 * ROW)
    last = batch + STEP + ROW + TOKEN
    assert entry["ttft_values"] == pytest.approx([batch, batch, last])
    assert entry["itl_values"] == []
    assert entry["e2e"]["max"] == pytest.approx(last)
    assert [tokens for _, tokens in entry["cumulative"]] == [0, 6, 7]
    assert [len(accounts.outputs[number]) for number in range(3)] == [4, 2, 1]


def test_steps_with_drafts_are_steps_of_decoding() -> None:
    """Two drafts, one of them right; then steps without."""
    accounts = Accounts(SchedulerLimits(max_model_len=64, num_blocks=9, block_size=4, max_num_seqs=1,
                                        max_num_batched_tokens=64), 0.0)
    accounts.arrived(0, 4, 0.0)
    steps = [(0, 4, (), (9,), RowKind.PREFILL), (4, 3, ((7, 8),), (7, 5), RowKind.DECODE),
             (6, 1, (), (6,), RowKind.DECODE), (7, 1, (), (3,), RowKind.DECODE)]
    for number, (start, count, drafts, tokens, kind) in enumerate(steps):
        ended = (RequestEnd(0, "length", 5),) if number == 3 else ()
        accounts.step(record_of(number, number * 10**9, (number + 1) * 10**9, (0,), (0,), (start,), (count,), tokens=(
            tokens,), drafts=drafts, kinds=(kind,), ended=ended))
    entry = accounts.entry()
    assert accounts.sampled_tokens == entry["output_tokens"] == 5 and entry["decode_steps"] == entry["steps"] == 4
    assert list(accounts.prompt_times) == [1.0] and list(accounts.decode_times) == [1.0, 1.0]


def test_head_of_line_seconds_run_while_a_slot_is_wasted() -> None:
    """The third request waits for the whole batch; in its last two steps a row is held."""
    assert static_by_hand().entry()["waste"]["head_of_line_seconds"] == pytest.approx(2 * (STEP + 2 * ROW))
    full = run(queued([2, 2, 2], [1, 1, 1]), batching="continuous", max_num_seqs=2)
    assert full.entry()["waste"]["head_of_line_seconds"] == pytest.approx(0.0)


def test_waiting_counts_from_arrival_in_the_middle_of_a_step() -> None:
    """One at a time, four slots: whoever waits does so beside empty ones."""
    step = STEP + ROW
    accounts = run(arriving([0.0, 0.5 * step], [3, 1]), batching="one_at_a_time")
    assert accounts.entry()["waste"]["head_of_line_seconds"] == pytest.approx(2.5 * step)


def test_waiting_for_a_window_counts() -> None:
    accounts = run(arriving([0.0, 0.1], [1, 1]), batching="dynamic", max_wait_ms=200.0)
    assert accounts.entry()["waste"]["head_of_line_seconds"] == pytest.approx(0.2 + 0.1, abs=2e-3)


def test_the_chart_draws_the_batch() -> None:
    chart = static_by_hand().entry()["chart"]
    assert (chart["slots"], chart["steps"], chart["truncated"]) == (2, 5, False)
    assert chart["runs"] == [
        [0, 0, 1, "prefill", 0, 3], [1, 0, 1, "prefill", 1, 5], [0, 1, 3, "decode", 0, 3], [1, 1, 1, "decode", 1, 1],
        [1, 2, 2, "held", 1, 2], [0, 4, 1, "prefill", 2, 2]]
    assert chart["pads"] == [[0, 0, 2]]
    assert chart["step_ends"][0] == 0.0
    assert len(chart["step_ends"]) == 6


def test_the_chart_stops_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "MAX_STEPS", 3)
    entry = run(queued([10])).entry()
    assert entry["steps"] == 10
    assert entry["chart"]["steps"] == 3
    assert entry["chart"]["truncated"]
    assert entry["chart"]["runs"] == [[0, 0, 1, "prefill", 0, 1], [0, 1, 2, "decode", 0, 2]]


def test_chunks_of_a_prompt_are_no_decode_steps() -> None:
    entry = run(queued([3], [25]), max_num_batched_tokens=10).entry()
    assert (entry["steps"], entry["decode_steps"]) == (3 + 2, 1 + 2)


def test_what_orca_reserves_and_never_uses() -> None:
    """Blocks of 16: 1 + 64 tokens reserve 4 blocks (the last token needs no place), of which 1 is ever used."""
    orca = run(queued([8], [1], max_tokens=64), batching="orca", kv_cache_memory=16 * BLOCK_BYTES)
    assert orca.entry()["waste"]["reserved_unused"] == pytest.approx(7 / 8 * 3 / 16)  # freed with the last token
    paged = run(queued([8], [1], max_tokens=64), batching="continuous", kv_cache_memory=16 * BLOCK_BYTES)
    assert paged.entry()["waste"]["reserved_unused"] == 0.0


def test_a_preempted_request_is_computed_again_and_counted() -> None:
    """Three blocks for two rows that grow to two each: one of them yields."""
    workload = queued([20, 20], [10, 10])
    accounts = run(workload, max_num_seqs=2, kv_cache_memory=3 * BLOCK_BYTES)
    entry = accounts.entry()
    assert entry["preemptions"] > 0
    assert entry["output_tokens"] == 40
    assert accounts.outputs == run(workload, max_num_seqs=2).outputs
    kinds = [kind for slot, _, _, kind, number, _ in entry["chart"]["runs"] if number == 1]
    assert kinds.count("prefill") == 1 + entry["preemptions"]


def test_thinning_keeps_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "MAX_POINTS", 10)
    points = thinned(range(1000))
    assert (len(points), points[0], points[-1]) == (10, 0, 999)
    assert thinned(range(10)) == list(range(10))
    cumulative = run(queued([500])).entry()["cumulative"]
    assert len(cumulative) <= 10
    assert cumulative[-1][1] == 500
    assert cumulative == sorted(cumulative)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=15), st.integers(1, 4),
    st.sampled_from(DISCIPLINES))
def test_slot_steps_and_tokens_add_up(asked: list[tuple[int, int]], slots: int, discipline: str) -> None:
    prompts, outputs = [prompt for prompt, _ in asked], [output for _, output in asked]
    accounts = run(queued(outputs, prompts), batching=discipline, max_num_seqs=slots)
    entry, waste = accounts.entry(), accounts.entry()["waste"]
    drawn = {kind: sum(steps for _, _, steps, of_kind, _, _ in entry["chart"]["runs"] if of_kind == kind)
             for kind in ("prefill", "decode", "held")}
    assert sum(drawn.values()) + waste["empty_slot_steps"] == entry["steps"] * slots
    assert drawn["held"] == waste["held_row_steps"]
    assert drawn["decode"] == sum(outputs) - len(outputs)
    assert drawn["prefill"] + drawn["decode"] == round(entry["occupancy"] * entry["steps"] * slots)
    assert len([*accounts.prompt_times, *accounts.decode_times]) == entry["steps"]
    assert entry["output_tokens"] == sum(outputs)
    grouped = discipline in ("static", "dynamic")
    assert waste["padded_tokens"] == (padded_tokens(prompts, slots) if grouped else 0)
    assert entry["waste"]["head_of_line_seconds"] <= entry["seconds"] * len(outputs)
    assert entry["ttft"]["max"] <= entry["e2e"]["max"] == pytest.approx(entry["seconds"])
