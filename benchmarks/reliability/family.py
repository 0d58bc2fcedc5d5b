"""Finds all processes of one server, even of a dead parent, by a mark in their environment."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from .server import PAGE, children

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
