"""slotwise timeline: a saved event log as an HTML page."""

from __future__ import annotations

import argparse
import os
import stat
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from slotwise.cli.options import Commands, add_command
from slotwise.files import PRIVATE, write_output
from slotwise.observe import event_log
from slotwise.observe.timeline import page


def add(commands: Commands) -> None:
    timeline = add_command(commands, "timeline", "draw a saved event log as a page that opens in any browser", run)
    timeline.add_argument("log", type=Path, metavar="LOG", help="a file written by `slotwise serve --event-log LOG`")
    timeline.add_argument("--output", type=Path, metavar="FILE", help="the page (default: LOG.html beside the log)")
    timeline.add_argument("--open", action="store_true", help="show it in the browser")


def run(asked: argparse.Namespace) -> int:
    output: Path = asked.output or asked.log.with_name(asked.log.name + ".html")
    if asked.log.is_file() and output.exists() and os.path.samefile(asked.log, output):
        raise ValueError(f"--output {output} is the log itself: name another file")
    write_output(output, page.saved(asked.log.name, _drawn(asked.log)), _mode(asked.log))
    print(f"wrote {output}")
    if asked.open:
        webbrowser.open(output.resolve().as_uri())
    return 0


def _mode(log: Path) -> int:
    """The mode of a page: it holds what the log holds, so the same users may read it; only the owner, of a pipe."""
    return stat.S_IMODE(log.stat().st_mode) & 0o666 if log.is_file() else PRIVATE


def _drawn(path: Path) -> Iterator[bytes]:
    """The entries of a log, checked, without prompts, salts and tenants, which are not drawn."""
    for entry in event_log.read_file(path):
        if isinstance(entry, event_log.RequestEntry):
            entry = entry.replace_spec(entry.spec.public())
        yield event_log.encode(entry) + b"\n"
