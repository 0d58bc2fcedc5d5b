"""A small disk for a server's caches, event log and temporary files, which can be filled and freed."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

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
