"""A log that is played again gives the same records, and one that was changed does not."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.recorded import TIGHT, Recorded
from support.records import record_of
from support.toy import Guesses

from slotwise.core.disciplines.batching_settings import KINDS, Batching
from slotwise.core.record import NO_STEP, Copy, NewBlocks, RequestEnd, StepRecord, Stop
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.measure.simulate.replay import ReplayError, replay
from slotwise.observe import event_log, log_file
from slotwise.observe.log_file import LogFile

WITH_HOST = replace(TIGHT, num_host_blocks=10)
BATCHINGS = [*(Batching(kind) for kind in KINDS), Batching(prefill="inline"), Batching(prefill="alone"),
             Batching("dynamic", batch_size=2, max_wait_ms=7.0), Batching(long_prefill_token_threshold=3)]


def steps(entries: list[event_log.Entry]) -> list[StepRecord]:
    return [entry for entry in entries if isinstance(entry, StepRecord)]


def test_a_log_of_the_last_release_comes_out_again(tmp_path: Path) -> None:
    """With drafts, failed steps, preemptions, and a prefix that two requests computed at the same time."""
    path = tmp_path / "log"
    path.write_bytes(lzma.decompress(Path(__file__).with_name("log_of_0.2.0.xz").read_bytes()))
    outcome = replay(log_file.read_file(path))
    assert outcome.difference is None and (outcome.requests, outcome.records) == (120, 290)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", BATCHINGS, ids=str)
def test_every_record_comes_out_again(batching: Batching, depth: int) -> None:
    for seed in range(2):
        entries = Recorded(seed, batching, depth=depth).play(60)
        outcome = replay(event_log.decode(event_log.encode(entry)) for entry in entries)
        assert outcome.difference is None
        assert (outcome.requests, outcome.records) == (60, len(steps(entries)))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", [Batching(), Batching("static")], ids=str)
def test_so_does_what_was_copied_to_the_host_and_back(batching: Batching, depth: int) -> None:
    for seed in range(3):
        entries = Recorded(seed, batching, depth=depth, limits=WITH_HOST).play(60)
        records = steps(entries)
        assert any(record.plan.saves for record in records) and any(record.plan.loads for record in records)
        outcome = replay(event_log.decode(event_log.encode(entry)) for entry in entries)
        assert outcome.difference is None and outcome.records == len(records)


@pytest.mark.parametrize("batching", [Batching(), Batching("static")], ids=str)
def test_so_does_what_stages_compute_at_once(batching: Batching) -> None:
    for seed in range(3):
        entries = Recorded(seed, batching, depth=2, limits=replace(TIGHT, stages=3), proposer=Guesses(seed)).play(60)
        outcome = replay(
            (event_log.decode(event_log.encode(entry)) for entry in entries), proposer=Guesses(seed))
        assert outcome.difference is None and (outcome.requests, outcome.records) == (60, len(steps(entries)))
        assert any(reason == "micro_batch" for step in steps(entries) for _, reason in step.plan.refused)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", [Batching(), Batching("static"), Batching("orca")], ids=str)
def test_so_do_drafts(batching: Batching, depth: int) -> None:
    num_failures = 0
    for seed in range(4):
        entries = Recorded(seed, batching, depth=depth, proposer=Guesses(seed)).play(60)
        records = steps(entries)
        num_failures += sum(bool(record.outcome.failure) for record in records)
        assert any(record.plan.drafts for record in records)
        assert batching.kind != "continuous" or any(record.plan.freed_blocks for record in records)
        outcome = replay((event_log.decode(event_log.encode(entry)) for entry in entries), Guesses(seed))
        assert outcome.difference is None and outcome.records == len(records)
    assert num_failures


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", [Batching(), Batching("static"), Batching("orca")], ids=str)
def test_the_log_says_where_drafts_came_from(batching: Batching, depth: int) -> None:
    settings, drafted = Speculation("suffix", prompt_lookup_min=1), 0
    for seed in range(3):
        entries = Recorded(seed, batching, depth=depth, speculation=settings).play(60)
        records = steps(entries)
        drafted += sum(bool(record.plan.drafts) for record in records)
        assert any(record.plan.draft_limit for record in records)
        outcome = replay(event_log.decode(event_log.encode(entry)) for entry in entries)
        assert outcome.difference is None and outcome.records == len(records)
    assert drafted


def test_what_was_played_had_everything_in_it() -> None:
    """So that the test above means something."""
    entries = [entry for seed in range(4) for depth in (0, 1) for entry in Recorded(
        seed, Batching(), depth=depth).play(60)]
    records = steps(entries)
    reasons = {end.reason for record in records for end in record.ended}
    assert reasons == {"stop", "length", "abort", "timeout", "error", "rejected"}
    assert any(record.preempted for record in records) and any(record.inputs.configured for record in records)
    assert any(join.num_cached for record in records for join in record.admitted)
    assert any(record.outcome.failure for record in records) and any(record.result.failed for record in records)
    assert any(record.result.tokens for record in records)  # rows of whom had ended meanwhile
    held = steps(Recorded(0, Batching("static")).play(60))
    assert any(record.plan.held for record in held) and any(any(record.plan.padding) for record in held)


def test_a_log_goes_through_a_file_and_through_the_loss_of_an_engine(tmp_path: Path) -> None:
    run = Recorded(1, Batching(), depth=1)
    run.play(20)
    run.ask(20)
    run.turn()
    run.recorder.lost("it was killed", run.clock())
    run.recorder.stepped(record_of(NO_STEP, 5, 5, ended=(RequestEnd(20, "error", 0, "it was killed"),)))
    run.start()
    for number in range(21, 40):
        run.ask(number)
        run.turn()
    with LogFile(tmp_path / "log") as file:
        for entry in run.file.entries:
            file.write(event_log.line_of(entry))
    outcome = replay(log_file.read_file(tmp_path / "log"))
    assert outcome.difference is None and (outcome.engines, outcome.requests) == (2, 40)


def with_plan(record: StepRecord, **columns: Any) -> StepRecord:
    return record._replace(plans=(record.plan._replace(**columns),))


CHANGES: dict[str, Callable[[StepRecord], StepRecord]] = {
    "outcome.tokens": lambda step: step._replace(outcome=step.outcome._replace(
        tokens=tuple((row[0] + 1,) if row else () for row in step.tokens))),
    "plan.slots": lambda step: with_plan(step, slots=tuple(slot + 1 for slot in step.plan.slots)),
    "plan.request_ids": lambda step: with_plan(step, request_ids=tuple(number + 1 for number in step.plan.request_ids)),
    "plan.new_blocks": lambda step: with_plan(step, new_blocks=(*step.plan.new_blocks, NewBlocks(0, 0, (1,)))),
    "plan.loads": lambda step: with_plan(step, loads=(Copy(0, 1),)),
    "counters.num_waiting": lambda step: step._replace(counters=step.counters._replace(
        num_waiting=step.counters.num_waiting + 1)),
    "plan.stop": lambda step: with_plan(step, stop=Stop("no_slot", 0, 7)),
}


@pytest.mark.parametrize("field", CHANGES)
def test_whatever_is_changed_is_found(field: str) -> None:
    entries = Recorded(0, Batching()).play(20)
    records = steps(entries)
    index = next(i for i, record in enumerate(records) if i > 10 and any(record.tokens))
    changed = CHANGES[field](records[index])
    outcome = replay(changed if entry is records[index] else entry for entry in entries)
    assert outcome.difference is not None
    assert (outcome.records, outcome.difference.record, outcome.difference.field) == (index, index, field)


@pytest.mark.parametrize("length", [0, 3, 1000, 100_000])
def test_a_long_field_is_shown_around_its_first_difference(length: int) -> None:
    entries = Recorded(0, Batching()).play(20)
    index, record = next((i, entry) for i, entry in enumerate(entries) if isinstance(entry, StepRecord)
                         and entry.inputs.planned)
    changed = record._replace(inputs=record.inputs._replace(
        planned=(*record.inputs.planned, *[1] * length, 987654321)))
    difference = replay([*entries[:index], changed, *entries[index + 1:]]).difference
    assert difference is not None and difference.field == "inputs.planned"
    whole = msgspec.json.encode(changed.inputs.planned).decode()
    if length <= 3:
        assert difference.logged == whole
    else:
        assert difference.logged.endswith(" ...") and whole.startswith(difference.logged.removesuffix(" ..."))
    assert difference.replayed == msgspec.json.encode(record.inputs.planned).decode() and len(difference.logged) < 450


def test_the_difference_of_two_long_fields_is_shown_with_what_is_before_and_behind() -> None:
    entries = Recorded(0, Batching()).play(20)
    index, record = next((i, entry) for i, entry in enumerate(entries) if isinstance(entry, StepRecord)
                         and entry.ended)
    ends = [RequestEnd(end.request_id, "x" * 5000, end.num_output, "y" * 5000) for end in record.ended]
    changed = record._replace(outcome=record.outcome._replace(ended=tuple(ends)))
    difference = replay([*entries[:index], changed, *entries[index + 1:]]).difference
    assert difference is not None and difference.field == "outcome.ended"
    assert f'[[{ends[0].request_id},"xxx' in difference.logged and record.ended[0].reason in difference.replayed
    assert len(difference.logged) < 450 and len(difference.replayed) < 450


def test_a_request_that_is_not_there_is_missed() -> None:
    entries = Recorded(0, Batching()).play(20)
    gone = next(entry for entry in entries if isinstance(entry, event_log.RequestEntry) and entry.number == 7)
    with pytest.raises(ReplayError, match="not in the log"):
        replay(entry for entry in entries if entry is not gone)


def test_what_cannot_be_replayed_says_why() -> None:
    run = Recorded(0, Batching())
    run.play(5)
    with pytest.raises(ReplayError, match="no prompts"):
        replay(map(event_log.decode, run.recorder.ring.lines()))
    with pytest.raises(ReplayError, match="engine's start"):
        replay(run.file.entries[1:])
    with pytest.raises(ReplayError, match="3 entries are missing"):
        replay([*run.file.entries, event_log.Gap(3)])
