"""The ring and the file of an event log: bounded, and a reader who comes late, or is slow, knows what is missing."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorded import Recorded
from support.records import record_of

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import RequestEnd, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add, Finish, Timing
from slotwise.observe import event_log, log_file
from slotwise.observe.event_log import LogError
from slotwise.observe.log_file import LogFile
from slotwise.observe.recorder import Recorder
from slotwise.observe.ring import Overtaken, Ring

ENTRIES = Recorded(0, Batching(), depth=1).play(60)


def known(entries: list[event_log.Entry]) -> list[event_log.Entry]:
    """The run with its settings, and the unfinished requests."""
    run: list[event_log.Run] = []
    requests: dict[int, event_log.Entry] = {}
    for entry in entries:
        if isinstance(entry, event_log.Run):
            run = [entry]
        elif isinstance(entry, event_log.RequestEntry):
            requests[entry.number] = entry
        elif isinstance(entry, StepRecord):
            for end in entry.ended:
                del requests[end.request_id]
            if entry.inputs.configured is not None:
                run = [msgspec.structs.replace(run[0], scheduling=entry.inputs.configured)]
    return [*run, *requests.values()]


def remembered(ring: Ring) -> list[event_log.Entry]:
    return list(map(event_log.decode, ring.lines()))


def test_lines_are_read_as_they_were_written() -> None:
    lines = event_log.encode_lines(ENTRIES).splitlines(keepends=True)
    assert list(log_file.read(lines)) == ENTRIES
    assert list(log_file.read([*lines, b'{"kind":"st'])) == ENTRIES  # whoever wrote it was killed
    with pytest.raises(LogError, match="line 3"):
        list(log_file.read([*lines[:2], b"{}\n"]))
    with pytest.raises(LogError, match="No such file"):
        list(log_file.read_file("/no/such/log"))


def test_a_line_leaves_nothing_behind() -> None:
    def num_objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    event_log.line_of(ENTRIES[0])
    before = num_objects()
    for _ in range(20):
        for entry in ENTRIES:
            event_log.line_of(entry)
    assert num_objects() - before < len(ENTRIES)


@given(capacity=st.integers(1, 60_000), most=st.integers(0, 70_000))
def test_a_ring_is_bounded_and_tells_what_comes_before_each_of_its_lines(capacity: int, most: int) -> None:
    ring = Ring(capacity)
    for position, entry in enumerate(ENTRIES):
        ring.append(entry, event_log.line_of(entry))
        assert ring.end == position + 1
    held = [line.data for line in ring.since(ring.first, 1 << 30).lines]
    assert list(log_file.read(held)) == ENTRIES[ring.first :]
    cost = sum(line.cost for line in ring.since(ring.first, 1 << 30).lines)
    assert sum(map(len, held)) < cost and (len(held) == 1 or cost <= capacity)
    latest = ring.latest(most)
    assert ring.first <= latest <= ring.end and (most < cost or latest == ring.first)
    for position in (ring.first, latest):
        assert ring.preface(position) == known(ENTRIES[:position])
    assert ring.unfinished() == known(ENTRIES) == known(remembered(ring))


FLOOD = """
from pathlib import Path
from slotwise.core.params import SamplingSpec
from slotwise.core.record import NO_PLAN, Inputs, Outcome, RequestEnd, StepRecord
from slotwise.core.record import StepResult
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add, Finish, Timing
from slotwise.observe.recorder import Recorder
from slotwise.observe.ring import Ring

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

recorder, sizes, time = Recorder(Ring(CAPACITY)), [], 10**15
for number in range(60_000):
    if number % 10_000 == 0:
        sizes.append(resident())
    if FLOOD == "refused":
        recorder.refused("queue_full")
        continue
    name, params = f"cmpl-{number:032d}-0", SamplingSpec(temperature=0.2, max_tokens=2000)
    recorder.commanded(Add(
        number, RequestSpec([1] * 8, params, number << 30), Timing(received_ns=time, read_ns=time), name), time)
    recorder.commanded(Finish(number, "abort"), time)
    recorder.stepped(StepRecord(
        time, time, (NO_PLAN,), StepResult(number, ()), Outcome(ended=(RequestEnd(number, "abort", 0),)),
        Inputs(handled=(time, time))))
print(*sizes, resident())
"""


@pytest.mark.parametrize("flood", ["refused", "queued and cut"])
def test_a_flood_of_requests_takes_the_memory_that_the_ring_may_take(flood: str) -> None:
    """Measured in a process of its own; the ids of ended requests take a few megabytes, too."""
    capacity = 4 << 20
    done = subprocess.run(
        [sys.executable, "-c", FLOOD.replace("CAPACITY", str(capacity)).replace("FLOOD", repr(flood))],
        capture_output=True, text=True, check=True, timeout=120)
    sizes = [*map(int, done.stdout.split())]
    assert sizes[-1] - sizes[0] < 3 * capacity, "all of it"
    assert sizes[-1] - sizes[-3] < capacity, "a plateau"


@given(capacity=st.integers(1500, 12_000), turns=st.lists(st.integers(0, 40), min_size=1), most=st.integers(1, 20))
def test_a_reader_misses_nothing_without_being_told(capacity: int, turns: list[int], most: int) -> None:
    ring, position, seen = Ring(capacity), 0, 0
    coming = iter(ENTRIES)
    for turn in turns:
        for _, entry in zip(range(turn), coming, strict=False):
            ring.append(entry, event_log.line_of(entry))
        batch = ring.since(position, most)
        start = seen + batch.missed
        entries = [event_log.decode(line.data) for line in batch.lines]
        assert entries == ENTRIES[start : start + len(entries)] and len(entries) <= most
        position, seen = batch.position, start + len(entries)
    assert seen == position <= ring.end


@given(capacity=st.integers(1500, 60_000), piece=st.integers(1, 30), between=st.integers(0, 12))
def test_pieces_are_what_was_held_while_lines_arrive_or_say_that_they_were_overtaken(
        capacity: int, piece: int, between: int) -> None:
    ring, coming = Ring(capacity), iter(ENTRIES)

    def append(number: int) -> None:
        for entry in islice(coming, number):
            ring.append(entry, event_log.line_of(entry))

    append(len(ENTRIES) // 2)
    held, first, read = ring.lines(), ring.first, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slotwise.observe.ring.PIECE", piece)
        try:
            for lines in ring.pieces():
                read.append(lines)
                append(between)
        except Overtaken:
            assert ring.first > first, "lines have left the ring"
    whole = b"".join(held)
    assert b"".join(read) == whole or (ring.first > first and whole.startswith(b"".join(read)))


def test_a_stream_tells_neither_prompts_nor_whatever_else_is_only_in_the_file() -> None:
    run = Recorded(0, Batching())
    run.play(20)
    streamed = [entry for entry in remembered(run.recorder.ring) if isinstance(entry, event_log.RequestEntry)]
    assert streamed and not any(entry.spec.prompt for entry in streamed)
    assert all(entry.spec.prompt for entry in run.file.entries if isinstance(entry, event_log.RequestEntry))


def test_a_log_has_the_ids_of_requests_and_the_times_of_their_responses() -> None:
    subject = Recorder()
    for turn in range(3):
        subject.commanded(Add(turn, RequestSpec([1, 2], SamplingSpec()), Timing(5, 0, 6), "same"), 7)
        subject.commanded(Finish(turn, "abort"), 8)
        subject.stepped(record_of(-1, 9, 9, ended=(RequestEnd(turn, "abort", 0),)))
    subject.sent(2, 10, 11, 4)
    requests = [entry for entry in remembered(subject.ring) if isinstance(entry, event_log.RequestEntry)]
    assert [(entry.number, entry.id, entry.timing, entry.ns) for entry in requests] == [
        (turn, "same", Timing(5, 0, 6), 7) for turn in range(3)]
    assert remembered(subject.ring)[-1] == event_log.Sent(2, 10, 11, 4)


def test_a_file_has_everything_in_its_order(tmp_path: Path) -> None:
    with LogFile(tmp_path / "log") as file:
        for entry in ENTRIES:
            file.write(event_log.line_of(entry))
    assert list(log_file.read_file(tmp_path / "log")) == ENTRIES


def test_a_file_that_cannot_keep_up_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, written = threading.Event(), threading.Event()

    def put(self: LogFile, data: bytes) -> None:
        written.set()
        stuck.wait()
        whole(self, data)

    whole = LogFile._put
    monkeypatch.setattr(LogFile, "_put", put)
    monkeypatch.setattr(log_file, "GATHER", 0.0)
    file = LogFile(tmp_path / "log", max_waiting=4000)
    file.write(event_log.line_of(ENTRIES[0]))
    assert written.wait(120)
    for entry in ENTRIES[1:]:
        file.write(event_log.line_of(entry))  # by this very thread: were it kept waiting, the test would not end
    stuck.set()
    file.close()
    found = list(log_file.read_file(tmp_path / "log"))
    missed = found[-1]
    assert isinstance(missed, event_log.Gap) and found[:-1] == ENTRIES[: len(found) - 1]
    assert missed.missed == len(ENTRIES) - len(found) + 1
    assert sum(len(event_log.line_of(entry)) for entry in found[1:-1]) <= 4000


def test_a_full_disk_is_told_once_and_harms_nobody(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def put(self: LogFile, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LogFile, "_put", put)
    monkeypatch.setattr(log_file, "GATHER", 0.0)
    with LogFile(tmp_path / "log") as file:
        for entry in ENTRIES:
            file.write(event_log.line_of(entry))
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "No space left" in caplog.text
