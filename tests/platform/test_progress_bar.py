"""The progress bar: on a terminal, elsewhere, and for what there is to do."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from slotwise.compute.kernels.cpu.jit.workers import COMPILED, Compilation
from slotwise.platform.progress_bar import ProgressBar

SCRIPT = """
from slotwise.platform.progress_bar import ProgressBar
with ProgressBar(is_wanted={wanted}) as bar:
    bar("Downloading X", 0, 93_000_000)
    bar("Downloading X", 43_000_000, 93_000_000)
    bar._bar and bar._bar.refresh()
    bar("weights", 5_000_000, 10_000_000)
    bar._bar and bar._bar.refresh()
    bar("kernels", 0, 0)
    bar("kernels", 3, 22)
    bar._bar and bar._bar.refresh()
bar("weights", 1, 10_000_000)
"""


def on_a_terminal(*, wanted: bool) -> str:
    """What the script writes to stderr where that is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", SCRIPT.format(wanted=wanted)], stderr=theirs,
                          env=os.environ | {"COLUMNS": "120", "TERM": "xterm"}) as process:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 4096):
                written += piece
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        assert process.wait(60) == 0
    return written.decode()


def test_a_terminal_shows_sizes_of_each_stage_and_keeps_none() -> None:
    written = on_a_terminal(wanted=True)
    for shown in ("Downloading X", "43 of 93 MB", "Reading and packing weights", "5 of 10 MB", "Compiling kernels",
                  "3 of 22 kernels"):
        assert shown in written
    assert written.rindex("\x1b[2K") > written.rindex("3 of 22 kernels")  # the line is erased at the end
    assert "0 of 10 MB" not in written  # which comes after the end
    hidden, shown = written.index("\x1b[?25l"), written.index("\x1b[?25h")
    assert hidden < shown < written.index("43 of 93 MB") and written.count("\x1b[?25l") == 1  # an interrupt may come


def test_a_terminal_shows_nothing_where_no_bar_is_wanted() -> None:
    assert on_a_terminal(wanted=False) == ""


def test_elsewhere_each_stage_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with ProgressBar(said.append) as bar:
        for done in (0, 50, 93):
            bar("Downloading X", done * 10**6, 93 * 10**6)
        bar("kernels", 0, 0)
        bar("kernels", 0, 22)
    bar("weights", 0, 10**6)
    assert said == ["Downloading X, 93 MB", "Compiling kernels, 22 kernels"]
    with ProgressBar() as bar:
        bar("weights", 0, 10**6)
    assert capfd.readouterr() == ("", "")


def test_kernels_are_counted_here_and_in_workers(tmp_path: Path) -> None:
    compilation = Compilation()
    compilation.begin(5)
    with compilation.shared(tmp_path, 3):
        assert compilation.done == 0
        for name in ("a", "b"):
            (tmp_path / name).touch()
            (tmp_path / f"{COMPILED}{name}").touch()
        (tmp_path / "c").touch()  # claimed, and not compiled yet
        assert compilation.done == 2
        (tmp_path / f"{COMPILED}c").touch()
    assert compilation.done == 3
    compilation.begin(1)
    compilation.compiled()
    assert (compilation.done, compilation.total) == (4, 6)
