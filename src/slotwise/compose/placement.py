"""Where the engine's compute threads run: `--cpu-threads` and `--cpu-bind`, as OpenMP's environment.

    auto       a thread for each processor that this process may use, bound to it
    cores      a thread for each physical core, bound to it, node by node: hardware threads share a core's multipliers
    none       threads are not bound, and the system moves them
    0-3,8      a thread for each of these processors, bound to it

A *processor* is a hardware thread, as the system numbers them; a *node* (of NUMA) is a set of processors with memory of
its own.  Fewer threads than places take the first places: with `cores` they stay within a node as long as it has cores.
OpenMP reads its environment once, when a process loads it, so these are options of commands that start an engine
process.  `kernels.cpu.threads` binds its helpers to the same places.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from slotwise.host import num_processors

AUTO, CORES, NONE = "auto", "cores", "none"
MOST_PROCESSORS = 1 << 16
SYSTEM = Path("/sys/devices/system")

_LIST = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", re.ASCII)


class Processor(NamedTuple):
    """A hardware thread."""

    number: int
    siblings: frozenset[int]  # the hardware threads of its core, itself included
    node: int


def environment(threads: int | None, bind: str, processors: Sequence[Processor]) -> dict[str, str]:
    """Returns OpenMP's variables for `threads` compute threads; None: one for each place.

    Args:
        bind: a word or a list, as above.
        processors: those that this process may use; empty: unknown, as on systems other than Linux.

    Raises:
        ValueError: there are not as many places, or a processor is not there; one line.
    """
    if bind in (AUTO, NONE):
        if threads is not None and threads > num_processors():
            raise ValueError(f"--cpu-threads {threads}: this process may use {num_processors()} processors")
        bound = {"OMP_PROC_BIND": "false"} if bind == NONE else {}
        return bound if threads is None else bound | {"OMP_NUM_THREADS": str(threads)}
    if not processors:
        raise ValueError(f"--cpu-bind {bind}: the processors of this system are not known; leave it out")
    places = _cores(processors) if bind == CORES else _listed(bind, processors)
    if threads is not None and threads > len(places):
        raise ValueError(f"--cpu-threads {threads}: --cpu-bind {bind} has {len(places)} places")
    places = places[:threads]
    written = ",".join("{" + ",".join(map(str, sorted(place))) + "}" for place in places)
    return {"OMP_NUM_THREADS": str(len(places)), "OMP_PLACES": written, "OMP_PROC_BIND": "true"}


def _cores(processors: Sequence[Processor]) -> list[frozenset[int]]:
    """The physical cores, node by node: of each, the hardware threads that this process may use."""
    usable = frozenset(one.number for one in processors)
    ordered = sorted(processors, key=lambda one: (one.node, one.number))
    return list(dict.fromkeys(one.siblings & usable for one in ordered))


def _listed(bind: str, processors: Sequence[Processor]) -> list[frozenset[int]]:
    usable = {one.number for one in processors}
    places = numbers(bind)
    for number in places:
        if number not in usable:
            raise ValueError(f"--cpu-bind {bind}: this process may not use processor {number}; it may use "
                             f"{', '.join(map(str, sorted(usable)))}")
    return [frozenset({number}) for number in places]


def numbers(text: str) -> list[int]:
    """The numbers of a list such as 0-3,8, in its order.

    Raises:
        ValueError: it is no such list, has a number twice, or has too many.
    """
    if not _LIST.fullmatch(text):
        raise ValueError(f"must be processors such as 0-3,8, not {text!r:.40}")
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
        if not int(first) <= int(last or first) or len(found) > MOST_PROCESSORS:
            raise ValueError(f"must be at most {MOST_PROCESSORS} processors, not {text!r:.40}")
    if len(set(found)) < len(found):
        raise ValueError(f"must have each processor once, not {text!r:.40}")
    return found


def read_processors(usable: Collection[int], system: Path = SYSTEM) -> list[Processor]:
    """The processors `usable`, as Linux describes them; none where it does not."""
    found: list[Processor] = []
    if sys.platform != "linux":
        return found
    nodes = {number: int(path.name.removeprefix("node")) for path in sorted(system.glob("node/node[0-9]*"))
             for number in _read(path / "cpulist")}
    for number in sorted(usable):
        siblings = _read(system / f"cpu/cpu{number}/topology/thread_siblings_list")
        found.append(Processor(number, frozenset(siblings) | {number}, nodes.get(number, 0)))
    return found


def _read(path: Path) -> list[int]:
    """The numbers of a file; none where there is no such file, or nothing in it."""
    with contextlib.suppress(OSError, ValueError):
        return numbers(path.read_text().strip())
    return []
