"""Which files become event logs, for whose eyes, and which stay as they are."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.live import cli
from support.live_server import eventually
from support.played import LIMITS

from slotwise import LLM
from slotwise.cli import main
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.engine.scheduling import Scheduling
from slotwise.observe import event_log
from slotwise.observe.event_log import FORMAT
from slotwise.observe.log_file import LogFile, LogFileError, check, read_file

RUN = event_log.line_of(event_log.Run(
    FORMAT, "1", "m", "float32", "cpu", 1.0, 2, LIMITS, Scheduling(Batching(), max_num_seqs=4,
                                                                   max_num_batched_tokens=64)))
OTHER = event_log.line_of(event_log.Gap(3))


def written(path: Path, **options: bool) -> None:
    with LogFile(path, **options) as file:
        file.write(RUN)


def test_a_log_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path / "log")
        assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
        (tmp_path / "log").chmod(0o644)
        written(tmp_path / "log")
        assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("content", [b"", RUN, RUN + OTHER, RUN + b"half a li"])
def test_an_older_log_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    check(path)
    assert path.read_bytes() == content, "looking changes nothing"
    written(path)
    assert path.read_bytes() == RUN


@pytest.mark.parametrize("content", [
    b"precious", b"\n", b"{}\n", OTHER, b"\n" + RUN, RUN[:-1], b"x" * 100_000, b"\xff\xfe\n", b'{"kind":"run"}\n'])
def test_another_file_stays_as_it_is_unless_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(content)
    for attempt in (check, LogFile):
        with pytest.raises(LogFileError, match=r"thesis\.txt is not an event log, and is not replaced: .*--overwrite"):
            attempt(path)
    assert path.read_bytes() == content
    written(path, overwrite=True)
    assert path.read_bytes() == RUN


@pytest.mark.parametrize("overwrite", [False, True])
def test_links_and_pipes_are_never_written_to(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "log").write_bytes(RUN)
    (tmp_path / "link").symlink_to(tmp_path / "log")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name, told in (("link", "is a link"), ("dangling", "is a link"), ("pipe", "is not a regular file")):
        with pytest.raises(LogFileError, match=told):
            LogFile(tmp_path / name, overwrite=overwrite)
    with pytest.raises(IsADirectoryError):
        LogFile(tmp_path, overwrite=overwrite)
    assert (tmp_path / "log").read_bytes() == RUN and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_log_has_one_writer(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "log"
    script = ("import sys; from slotwise.observe.log_file import LogFile, LogFileError\n"
              "try: LogFile(sys.argv[1], overwrite=sys.argv[2] == 'True')\nexcept LogFileError as error: print(error)")
    with LogFile(path) as file:
        for attempt in (check, LogFile):
            with pytest.raises(LogFileError, match="is being written by another process: name another file"):
                attempt(path, overwrite=overwrite)
        done = subprocess.run([sys.executable, "-c", script, str(path), str(overwrite)], capture_output=True, text=True,
                              timeout=120)
        assert done.stdout == f"{path} is being written by another process: name another file\n", done.stderr
        file.write(RUN)
    assert path.read_bytes() == RUN
    check(path)
    written(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_log_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(RUN)
    os.chown(path, 12345, -1)
    with pytest.raises(LogFileError, match="belongs to another user"):
        LogFile(path)
    written(path, overwrite=True)


@pytest.mark.slow
def test_commands_refuse_before_an_engine_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("precious")
    done = cli("serve", "--port", "0", "--event-log", str(path))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"slotwise serve: {path} is not an event log")
    assert main(["bench", "throughput", "--num-prompts", "1", "--event-log", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"slotwise bench: {path} is not an event log")
    with pytest.raises(LogFileError):
        LLM(event_log=path)
    assert path.read_text() == "precious"
    told = ["bench", "throughput", "--num-prompts", "1", "--max-tokens", "1", "--overwrite-event-log"]
    assert main([*told, "--event-log", str(path)]) == 0
    assert isinstance(next(iter(read_file(path))), event_log.Run)


def test_a_log_that_is_cut_while_it_is_written_goes_on_without_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with LogFile(path) as file:
        file.write(RUN * 3)
        eventually(lambda: path.read_bytes() == RUN * 3)
        os.truncate(path, 0)  # as `copytruncate` of logrotate does
        file.write(OTHER)
    assert path.read_bytes() == OTHER
