"""The API process keeps off the core of the engine's main thread, and engines may use all there are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.live import serving

from slotwise.compose.launch import Cores

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
several = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="there must be two cores to choose from")
ALL = frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()
FIRST = frozenset(sorted(ALL)[:1])


def threads_of(process: int) -> list[int]:
    return [int(thread) for thread in os.listdir(f"/proc/{process}/task")]


def cores_of(process: int) -> frozenset[int]:
    """Of its threads; they are the same for all."""
    (cores,) = {frozenset(os.sched_getaffinity(thread)) for thread in threads_of(process)}
    return cores


@contextlib.contextmanager
def engine(cores: frozenset[int]) -> Iterator[int]:
    """A process on these cores."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.sched_setaffinity(process.pid, cores)
        yield process.pid
        process.kill()


@pytest.fixture
def ours() -> Iterator[None]:
    """This process' threads are where they were afterwards."""
    yield
    for thread in threads_of(os.getpid()):
        os.sched_setaffinity(thread, ALL)


@several
@pytest.mark.usefixtures("ours")
def test_every_thread_leaves_the_core_of_the_engine_s_first() -> None:
    end = threading.Event()
    before = threading.Thread(target=end.wait)
    before.start()
    try:
        with engine(FIRST) as pid:
            Cores().leave_to(pid)
            assert cores_of(os.getpid()) == ALL - FIRST
            assert cores_of(pid) == FIRST
    finally:
        end.set()
        before.join()


@linux
@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("ours_before", [ALL, FIRST], ids=["an engine bound to nothing", "a single core"])
def test_where_nothing_would_be_left_all_is_as_it_was(ours_before: frozenset[int]) -> None:
    os.sched_setaffinity(0, ours_before)
    cores = Cores()
    with engine(ours_before) as pid:
        cores.leave_to(pid)
    assert os.sched_getaffinity(0) == ours_before
    with cores.lent():
        assert os.sched_getaffinity(0) == ours_before


@several
@pytest.mark.usefixtures("ours")
def test_an_engine_that_is_gone_keeps_nobody_away() -> None:
    with engine(FIRST) as pid:
        pass
    Cores().leave_to(pid)
    assert cores_of(os.getpid()) == ALL


@several
@pytest.mark.usefixtures("ours")
def test_the_next_engine_may_use_them_all() -> None:
    cores = Cores()
    with engine(FIRST) as pid:
        cores.leave_to(pid)
    with pytest.raises(OSError, match="no process"), cores.lent():
        assert os.sched_getaffinity(0) == ALL
        raise OSError("no process could be started")
    assert os.sched_getaffinity(0) == ALL - FIRST


@several
@pytest.mark.usefixtures("ours")
def test_who_was_moved_by_somebody_else_stays_there_and_lends_no_more() -> None:
    cores = Cores()
    with engine(FIRST) as pid:
        cores.leave_to(pid)
    os.sched_setaffinity(0, FIRST)
    with cores.lent():
        assert os.sched_getaffinity(0) == FIRST
    assert os.sched_getaffinity(0) == FIRST


def test_elsewhere_nobody_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    cores = Cores()
    cores.leave_to(os.getpid())
    with cores.lent():
        pass


def soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def engine_of(server: int) -> int:
    """The engine process of a server that has one."""
    children = [Path(f"/proc/{server}/task/{thread}/children") for thread in threads_of(server)]
    (pid,) = [pid for pid in " ".join(path.read_text() for path in children).split()
              if b"slotwise.compose.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(pid)


@several
def test_a_server_leaves_a_core_to_its_engine_and_to_the_next_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    with serving(log=tmp_path / "log") as server:
        seen = []
        for _ in range(2):
            pid = engine_of(server.process.pid)
            leader = frozenset(os.sched_getaffinity(pid))
            assert len(leader) == 1, "compute threads stay where they are"
            assert cores_of(server.process.pid) == ALL - leader
            assert ALL in {frozenset(os.sched_getaffinity(thread)) for thread in threads_of(pid)}, "all were allowed"
            seen.append(pid)
            os.kill(pid, signal.SIGKILL)
            soon(lambda: not is_well(server.client))
            soon(lambda: is_well(server.client))
        assert engine_of(server.process.pid) not in seen


def is_well(client: httpx.Client) -> bool:
    return client.get("/health").status_code == 200
