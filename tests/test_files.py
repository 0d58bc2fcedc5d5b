"""Files are written whole or not at all, and nothing is left behind where a disk is full; reads have bounds."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotwise.core.step_time import StepTimeModel, Work
from slotwise.measure.bench.results import write_json
from slotwise.observe import step_time_store as step_time
from slotwise.observe.log_file import LogFile
from slotwise.platform.files import PRIVATE, check_part, read_regular, write_output, write_whole


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with a few kilobytes left."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        (place / "filler").write_bytes(bytes(48 << 10))
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_file_is_replaced_whole_and_is_read_by_whom_it_should_be(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for mode, seen in ((PRIVATE, 0o600), (0o666, 0o640)):
            path = tmp_path / f"{mode}"
            for data in (b"old", b"new" * 1000):
                write_whole(path, data, mode)
                assert path.read_bytes() == data and stat.S_IMODE(path.stat().st_mode) == seen
    finally:
        os.umask(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["384", "438"])


def test_a_link_is_replaced_and_the_file_it_names_stays(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "beside").symlink_to(tmp_path / "folder")
    for name, target in (("link", "target"), ("dangling", "nowhere"), ("loop", "loop"), ("beside/page", "../target")):
        (tmp_path / name).symlink_to(target)
        write_output(tmp_path / name, b"x")
        assert not (tmp_path / name).is_symlink() and (tmp_path / name).read_bytes() == b"x"
    assert (tmp_path / "target").read_bytes() == b"precious" and not (tmp_path / "nowhere").exists()
    assert (tmp_path / "beside").is_symlink()


def test_standard_output_is_written_also_where_it_is_a_file(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        script = "from slotwise.platform.files import write_output; write_output('/dev/stdout', b'x')"
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True, timeout=120)
    assert (tmp_path / "out").read_bytes() == b"x" and Path("/dev/stdout").is_symlink()


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE) as reader:
        write_output(tmp_path / "pipe", b"through")
        assert reader.communicate(timeout=120)[0] == b"through"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_pipe_in_the_place_of_step_times_is_replaced_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "times.json")
    script = """if True:
        import sys
        from pathlib import Path
        from slotwise.core.step_time import StepTimeModel
        from slotwise.observe import step_time_store as step_time
        step_time.save(Path(sys.argv[1]), StepTimeModel())
        step_time.load(Path(sys.argv[1]))"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "times.json")], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "times.json").is_file()


LIMITED = """
import resource, sys
from pathlib import Path
from slotwise.platform.files import write_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(Path(sys.argv[1]), bytes(5000))
except OSError as error:
    sys.exit(3)
"""


def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], timeout=120)
    assert done.returncode == 3 and path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_a_full_disk_leaves_no_temporary_file(full: Path) -> None:
    path = full / "result.json"
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"rows": ["x" * 100] * 1000})
    assert [one.name for one in full.iterdir()] == ["filler"]


def test_step_times_on_a_full_disk_are_not_kept_and_leave_nothing(
        full: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (full / "more").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    times = StepTimeModel()
    for number in range(40):
        times.step(Work(1 + number % 4, 1 + number % 4, 10 * number, 0), number * 0.01, number * 0.01 + 0.005)
    before = sorted(one.name for one in full.iterdir())
    for _ in range(3):
        step_time.save(full / "times.json", times)
    assert "step times are not kept: No space left on device" in caplog.text
    assert sorted(one.name for one in full.iterdir()) == before


def test_an_event_log_on_a_full_disk_ends_and_is_closed(full: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LogFile(full / "log") as file:
        for _ in range(100):
            file.write(b"x" * 1000 + b"\n")
    assert "ends here" in caplog.text and "No space" in caplog.text


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"old" * 1000)
    script = ("import sys; from slotwise.platform.files import write_whole; print('go', flush=True)\n"
              "while True: [write_whole(sys.argv[1], bytes([letter]) * 200_000) for letter in b'ab']")
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        seen: set[bytes] = set()
        while len(seen) < 2:
            seen |= {path.read_bytes() for _ in range(100)}
        process.send_signal(signal.SIGKILL)
    seen.add(path.read_bytes())
    assert seen <= {b"old" * 1000, b"a" * 200_000, b"b" * 200_000} and len(seen) > 1


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/dev/tty"), tmp_path / "nowhere"):
        with pytest.raises(OSError):
            read_regular(path, 10)
    (tmp_path / "file").write_bytes(b"x" * 11)
    assert read_regular(tmp_path / "file", 11) == b"x" * 11
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_regular(tmp_path / "file", 10)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_regular("/proc/self/status", 10)  # its size is said to be 0


def test_links_of_a_checkpoint_lead_to_its_own_files(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--owner--name"
    folder, blobs = cache / "snapshots" / "0123", cache / "blobs"
    for made in (folder, blobs, folder / "inner", tmp_path / "flat", tmp_path / "other" / "snapshots" / "1",
                 tmp_path / "other" / "blobs"):
        made.mkdir(parents=True)
    for file in (blobs / "abcd", folder / "own", tmp_path / "secret", tmp_path / "other" / "blobs" / "b"):
        file.write_bytes(b"x")
    for name, target in (("blob", "../../blobs/abcd"), ("beside", "own"), ("twice", "blob"), ("dangling", "nowhere"),
                         ("absolute", blobs / "abcd")):
        (folder / name).symlink_to(target)
        check_part(folder / name)
    (tmp_path / "flat" / "blob").symlink_to(blobs / "abcd")  # a copy of a model that shares the cache's files
    check_part(tmp_path / "flat" / "blob")
    (tmp_path / "renamed").symlink_to(tmp_path / "other" / "snapshots" / "1")
    (tmp_path / "other" / "snapshots" / "1" / "a").symlink_to("../../blobs/b")
    check_part(tmp_path / "renamed" / "a")
    for name, target in (("up", "../../../../secret"), ("etc", "/etc/hostname"), ("device", "/dev/zero"),
                         ("chain", "up"), ("foreign", tmp_path / "other" / "blobs" / "b")):
        (folder / name).symlink_to(target)
        with pytest.raises(OSError, match="outside of the checkpoint"):
            check_part(folder / name)
