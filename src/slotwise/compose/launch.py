"""Starts the engine process from one that never imports torch, and says on which processors each of them runs.

*Compute threads* run where `--cpu-threads` and `--cpu-bind` say, as OpenMP's environment:

    auto       a thread for each processor that this process may use, bound to it
    cores      a thread for each physical core, bound to it, node by node: hardware threads share a core's multipliers
    none       threads are not bound, and the system moves them
    0-3,8      a thread for each of these processors, bound to it

A *processor* is a hardware thread, as the system numbers them; a *node* (of NUMA) is a set of processors with memory of
its own.  Fewer threads than places take the first places: with `cores` they stay within a node as long as it has cores.
OpenMP reads its environment once, when a process loads it, so these are options of commands that start an engine
process.  `compute/kernels/cpu/threads.py` binds its helpers to the same places.

*The API process* keeps off the core of the engine's main thread, which leads every kernel and is bound to a core
(`THREADS_STAY`).  Time that the API process takes on that core delays each step in full.  On any other core it delays
only a helper thread, which has the lowest priority and is waited for only while it holds work:

    core 0    engine: main thread ……………………………………………………………………………
    core 1    engine: a helper …… │ API process │ …… a helper …………… │ API process │ ……

Where that thread is bound to no core, or to all cores, nothing is changed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slotwise.compute.model.generation_config import absolute
from slotwise.engine.config import EngineConfig
from slotwise.engine.ipc import frame, pair
from slotwise.platform import child, spawn
from slotwise.platform.host import num_processors

MIDDLE_EVERY = 2  # collections of the young generation per collection of the middle one
FULL_EVERY = 700  # collections of the middle generation per full collection


def hold_off() -> None:
    """Disables collection until `settle`: loading creates no garbage, and looking for it takes a tenth of a start."""
    gc.disable()


def settle() -> None:
    """Exempts all loaded objects from collection, and makes full collections rare.

    A full collection visits all objects.  Imports leave hundreds of thousands that stay until the process ends, and a
    full queue is as many again: each pause would be a tenth of a second in the middle of a stream.  Reference counts
    free nearly everything here; cycles that outlive the young generations wait, which at this rate costs tens of
    megabytes at most.  Loading itself leaves a thousand objects to collect, which is negligible.

    The middle generation is collected while small: after Python's default of ten young ones it took ten milliseconds.
    """
    gc.freeze()
    young, _, _ = gc.get_threshold()
    gc.set_threshold(young, MIDDLE_EVERY, FULL_EVERY)
    gc.enable()


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
        ValueError: it is not such a list, has a number twice, or has too many.
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


class Cores:
    """The cores of this process: a subset of those it had when this was created."""

    def __init__(self) -> None:
        self._all = self._ours = _of(0)

    def leave_to(self, engine: int) -> None:
        """Keeps all threads of this process off the cores to which the main thread of process `engine` is bound."""
        self._ours = self._all - _of(engine) or self._all
        if self._ours != self._all:
            with contextlib.suppress(OSError):  # a system without /proc: the threads stay where they are
                for thread in os.listdir("/proc/self/task"):
                    _move(int(thread), self._ours)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """A process started in this context may use all cores."""
        before = _of(0)
        if before != self._ours:  # the affinity was changed from outside: leave it
            yield
            return
        _move(0, self._all)
        try:
            yield
        finally:
            _move(0, before)


def _of(thread: int) -> frozenset[int]:
    """Returns the cores of a thread, 0: the calling one, or of a process' main thread; empty if unavailable."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return frozenset(os.sched_getaffinity(thread))
    return frozenset()


def _move(thread: int, cores: frozenset[int]) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the thread has ended or may not be moved: not an error
            os.sched_setaffinity(thread, cores)


# Compute threads that move between cores compete with this process there: when all threads synchronized at every
# kernel, the mixed trace over HTTP took 43 to 71 s without this, and 41 to 43 s with it.
THREADS_STAY = {"OMP_PROC_BIND": "true"}


class ChildProcess:
    """A child process with one end of a channel.  Closing the other end stops it.

    Args:
        command: its arguments; the file descriptor of its end is appended.
        options: of `subprocess.Popen`, see `spawn.start`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.started = time.monotonic()
        self.channel, theirs = pair()
        with theirs:
            descriptor = theirs.fileno()
            try:
                self.process = spawn.start(
                    [*command, str(descriptor)], pass_fds=[descriptor], stdin=subprocess.DEVNULL, **options)
            except BaseException:
                self.channel.close()
                raise

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def held_bytes(self) -> int:
        """Memory that is the system's again when the process ends; 0 where the system does not tell."""
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

    def kill(self) -> None:
        self.process.kill()


def launch_engine(config: EngineConfig, log_format: str, more: Mapping[str, str] = {}) -> ChildProcess:
    """Starts the engine process, which begins to load.

    Args:
        log_format: of its stderr: see observe.lines.
        more: variables of its environment that replace this process' own, as those of `environment`.
    """
    process = ChildProcess(
        child.python("slotwise.compose.engine_process", log_format),
        env=THREADS_STAY | child.environment() | dict(more))
    process.channel.sendall(frame(msgspec.msgpack.encode(absolute_paths(config))))
    return process


def absolute_paths(config: EngineConfig) -> EngineConfig:
    """Returns `config` for a process with another current folder."""
    return replace(
        config, model=str(Path(config.model).absolute()), generation_config=absolute(config.generation_config))
