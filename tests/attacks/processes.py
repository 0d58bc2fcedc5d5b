"""A server's processes, found by a mark in their environment even of a dead parent, and a small disk for its files."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.server import PAGE, children

MARK = "SLOTWISE_ATTACKED"
CLOSING = b"\0"


@dataclass
class Family:
    """Processes of the server that was started with `environment`."""

    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def environment(self) -> dict[str, str]:
        return {MARK: self.mark}

    def living(self) -> list[int]:
        """Returns the running processes; a zombie has no environment and does not count."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (place / "environ").read_bytes().split(CLOSING):
                    found.append(int(place.name))
        return found


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(CLOSING, b" ").decode(errors="replace").strip()
    return ""


def zombies(pid: int) -> int:
    """Returns the number of children that have ended and were not reaped."""
    found = 0
    for child in children(pid):
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return found


def resident(pid: int) -> int:
    """Returns resident bytes, shared pages included; 0 without such a process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def proportional(pid: int) -> int:
    """Returns resident bytes, shared pages divided among their processes; 0 without such a process."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def descendants(pid: int) -> list[int]:
    """Returns the children of a process, and theirs."""
    found = children(pid)
    return found + [one for child in found for one in descendants(child)]


MIB = 1 << 20
USUAL_FILES, MANY_FILES = 1024, 8192  # limits of a server at its start, and of this process


class Disk:
    """A folder whose space can run out.

    Args:
        folder: its path.
        mounted: whether it is a file system of its own; otherwise a limit on the size of files replaces a full disk.
    """

    def __init__(self, folder: Path, mounted: bool) -> None:
        self.folder = folder
        self.mounted = mounted
        self._ballast = folder / "ballast"
        for name in ("cache", "tmp"):
            (folder / name).mkdir()

    @property
    def event_log(self) -> Path:
        return self.folder / "events.log"

    @property
    def environment(self) -> dict[str, str]:
        """Returns variables that make a server store all its files here."""
        return {"XDG_CACHE_HOME": str(self.folder / "cache"), "TMPDIR": str(self.folder / "tmp")}

    @property
    def _kernels(self) -> Path:
        return self.folder / "cache" / "slotwise" / "kernels"

    def adopt(self, kernels: Path) -> None:
        """Copies earlier compiled kernels to the disk, if there are any."""
        if kernels.is_dir():
            shutil.copytree(kernels, self._kernels, dirs_exist_ok=True)

    def kernels(self) -> list[Path]:
        """Returns the files of compiled kernels."""
        return sorted(path for path in self._kernels.rglob("*") if path.is_file())

    def leftovers(self) -> list[str]:
        """Returns temporary files, in their folder and in the caches."""
        temporary = list((self.folder / "tmp").rglob("*"))
        kept = [path for path in (self.folder / "cache").rglob("*") if "tmp" in path.name and path.is_file()]
        return sorted(str(path.relative_to(self.folder)) for path in [*temporary, *kept])

    def fill(self, processes: Iterable[int]) -> None:
        """Fills the disk, or without a mount limits the file size of `processes` to zero."""
        if not self.mounted:
            self._limit(processes, 0)
            return
        with self._ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            chunk = bytes(MIB)
            while True:
                if file.write(chunk) < len(chunk):
                    chunk = chunk[:max(1, len(chunk) // 2)]

    def free(self, processes: Iterable[int]) -> None:
        """Frees the space, or removes the limit of `processes`."""
        if self.mounted:
            self._ballast.unlink(missing_ok=True)
        else:
            self._limit(processes, resource.RLIM_INFINITY)

    def _limit(self, processes: Iterable[int], size: int) -> None:
        for pid in processes:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextlib.contextmanager
def small_disk(size: int, tell: Callable[[str], None] = print) -> Iterator[Disk]:
    """Yields a file system in memory of `size` bytes, or a plain folder without the right to mount."""
    with tempfile.TemporaryDirectory(prefix="slotwise-attacked-") as name:
        asked = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", name]
        try:
            mounted = subprocess.run(asked, capture_output=True).returncode == 0
        except OSError:
            mounted = False
        if not mounted:
            tell("    no file system may be mounted here: a limit on the size of files stands in for a full disk")
        try:
            yield Disk(Path(name), mounted)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", name], capture_output=True)


@contextlib.contextmanager
def usual_files() -> Iterator[None]:
    """Sets the soft limit of open files that most systems have, for processes started in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(USUAL_FILES, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(MANY_FILES, hard)), hard))


def open_files(pid: int) -> int:
    """Returns the number of file descriptors of a process, sockets included; 0 without such a process."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
