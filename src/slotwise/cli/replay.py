"""slotwise replay: replay a recorded event log, and compare every record."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from slotwise.cli.options import Commands, add_command
from slotwise.observe.event_log import read_file
from slotwise.simulate.replay import Outcome, replay
from slotwise.terminal import plain

DIFFERENT = 1  # exit status


def add(commands: Commands) -> None:
    command = add_command(commands, "replay", "replay an event log, and compare every record", run)
    command.add_argument("log", help="a file written by `slotwise serve --event-log FILE`")


def run(asked: argparse.Namespace) -> int:
    outcome = replay(read_file(asked.log))
    Console().print(_table(outcome))
    return 0 if outcome.difference is None else DIFFERENT


def _table(outcome: Outcome) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, number in (("engines", outcome.engines), ("requests", outcome.requests), ("steps", outcome.steps),
                         ("computed tokens", outcome.tokens), ("identical records", outcome.records)):
        table.add_row(name, f"{number:,}")
    difference = outcome.difference
    if difference is None:
        table.add_row("replayed", "to the end, byte for byte")
        return table
    table.add_row("first difference", plain(f"record {difference.record}, step {difference.step}: {difference.field}"))
    table.add_row("recorded", plain(difference.logged))
    table.add_row("replayed", plain(difference.replayed))
    return table
