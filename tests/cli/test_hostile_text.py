"""Text of clients, logs and servers reaches a terminal escaped and without markup."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from support.played import Play

from slotwise.cli import main
from slotwise.cli.top import ServerFrame
from slotwise.core.record import StepRecord
from slotwise.measure.bench.result_tables import throughput_table
from slotwise.observe.event_log import EngineLost, Entry, RequestEntry, Run, encode_lines
from slotwise.observe.live_state import LiveState

HOSTILE = "[/x]\x1b]0;OWNED\x07[bold]\n\x9b31m"


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return [_hostile(entry) for entry in Play(4).run(30).entries]


def _hostile(entry: Entry) -> Entry:
    if isinstance(entry, RequestEntry):
        add = msgspec.structs.replace(entry.add, name=f"{entry.number}{HOSTILE}")
        return msgspec.structs.replace(entry, add=add)
    if isinstance(entry, Run):
        return msgspec.structs.replace(entry, version=HOSTILE, model=f"m{HOSTILE}", device=HOSTILE, dtype=HOSTILE)
    if isinstance(entry, StepRecord):
        ended = tuple([end._replace(reason=HOSTILE, message=HOSTILE) for end in entry.ended])
        plans = tuple([plan._replace(refused=tuple([one._replace(reason=HOSTILE) for one in plan.refused]))
                       for plan in entry.plans])
        return entry._replace(plans=plans, outcome=entry.outcome._replace(ended=ended))
    return entry


def is_plain(shown: str) -> bool:
    return all(line.isprintable() for line in shown.split("\n")) and "[/x]" in shown and "\\x1b" in shown


@pytest.mark.parametrize("arguments", [["7"], ["--slowest", "30"], ["--step", "8"], ["--step", "12"]])
def test_explain_shows_hostile_text(
        entries: list[Entry], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    (tmp_path / "log").write_bytes(encode_lines(entries))
    assert main(["explain", str(tmp_path / "log"), *arguments]) == 0
    assert is_plain(capsys.readouterr().out)


def test_every_frame_of_top_shows_hostile_text(entries: list[Entry]) -> None:
    state, console = LiveState(), Console(width=200)
    for entry in [*entries, EngineLost(1, "lost", HOSTILE)]:
        state.apply(entry)
        for trouble in ("", HOSTILE):
            with console.capture() as captured:
                console.print(ServerFrame(state, state.now_ns, 50, trouble))
            assert is_plain(captured.get())


def test_a_benchmark_shows_a_servers_hostile_model_name() -> None:
    result = dict.fromkeys(("completed", "num_requests", "elapsed_time", "steps", "total_input_tokens", "mean_rows",
                            "total_output_tokens", "output_tokens_per_second", "tokens_per_second", "occupancy",
                            "requests_per_second"), 1)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(throughput_table(result | {"model_id": HOSTILE, "status": "complete"}))
    assert is_plain(captured.get())
