"""Work that is shared with whoever comes is done once, and waits for those alone who hold some of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel, kernel
from slotwise.compute.kernels.cpu.launcher import HEADER, MAX_ARGUMENTS, THREAD_COUNTER
from slotwise.compute.kernels.cpu.memory import aligned
from slotwise.compute.kernels.cpu.simd import INT64, fetch_add, load, store
from slotwise.compute.kernels.cpu.threads import INSIDE, RUN_SHARED, SIZE, ThreadPool, torch_threads

pytestmark = pytest.mark.slow

CELLS, COUNT, THREADS = range(HEADER, HEADER + 3)


@kernel
def _count(words):
    """Add one to each cell, and one to the number of the thread that does."""
    thread = fetch_add(words + THREAD_COUNTER, 1)
    cell = fetch_add(words, 1)
    while cell < load(words, COUNT, INT64):
        cells = load(words, CELLS, INT64)
        store(cells, cell, load(cells, cell, INT64) + 1, INT64)
        fetch_add(load(words, THREADS, INT64) + 8 * thread, 1)
        cell = fetch_add(words, 1)


def _count_cells(words):
    _count(words)


COUNTED = CompiledKernel(_count_cells, "void(int64)")


class Job:
    """Cells to be counted up, and by whom they were."""

    def __init__(self, size: int, most_threads: int = 8) -> None:
        self.cells, cells = aligned(size, np.int64)
        self.by_thread, by_thread = aligned(most_threads, np.int64)
        self.words, self.address = aligned(HEADER + MAX_ARGUMENTS, np.int64)
        self.words[[CELLS, COUNT, THREADS]] = cells, size, by_thread

    def run_on(self, threads) -> int:
        """How many threads took part."""
        self.words[:HEADER] = 0
        threads.run(COUNTED.address, self.address)
        return int(self.words[THREAD_COUNTER // 8])


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_every_item_of_every_job_is_done_once(helpers):
    pool, jobs = ThreadPool(helpers), [Job(size) for size in (0, 1, 2, 7, 300)]
    for _ in range(2000):
        for job in jobs:  # the same words again and again, and others: a helper may still look at the job before
            assert job.run_on(pool) <= helpers + 1, "somebody came twice"
    for job in jobs:
        assert (job.cells == 2000).all()


def test_helpers_come_again_after_they_slept():
    pool, job = ThreadPool(1), Job(200_000)
    for _ in range(5):
        threading.Event().wait(0.1)  # longer than a helper looks for work
        for _ in range(2000):
            job.by_thread[:] = 0
            job.run_on(pool)
            if job.by_thread.min(initial=1, where=[True, True, *[False] * 6]) > 0:
                break
        else:
            pytest.fail("the helper did not come")


def test_a_helper_that_never_comes_is_not_waited_for():
    """Nobody looks at these words but the leader."""
    job, (_, shared) = Job(100), aligned(SIZE, np.int64)
    RUN_SHARED.call(shared, COUNTED.address, job.address)
    assert (job.cells == 1).all()


def test_a_helper_inside_is_waited_for():
    job, (shared, address) = Job(10), aligned(SIZE, np.int64)
    shared[INSIDE] = 1
    leader = threading.Thread(target=RUN_SHARED.call, args=(address, COUNTED.address, job.address))
    leader.start()
    leader.join(0.2)
    assert leader.is_alive() and (job.cells == 1).all()
    shared[INSIDE] = 0
    leader.join(120)
    assert not leader.is_alive()


def test_two_leaders_take_turns():
    pool = ThreadPool(2)

    def lead(_: int) -> bool:
        job = Job(50)
        for _ in range(500):
            job.run_on(pool)
        return bool((job.cells == 500).all())

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(lead, range(4)))


def test_torch_s_threads_do_the_same_work():
    threads = torch_threads(2)
    if threads is None:
        pytest.skip("this torch has no OpenMP")
    job = Job(1000)
    for _ in range(100):
        job.run_on(threads)
    assert (job.cells == 100).all()


def _told(program: str, **environment: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True,
                         timeout=280)
    assert run.returncode == 0, run.stderr
    return run.stdout


FEWER = """
import torch
from slotwise.compute.kernels.cpu.kernels import CpuKernels
kernels = CpuKernels(4)
kernels.launcher.join_torch()
weight, x = torch.randn(64, 32), torch.randn(40, 32)
assert torch.allclose(kernels.linear(weight)(x), x @ weight.T, atol=1e-4)
assert kernels.record(lambda: x) is None
"""
FORKED = """
import os
from slotwise.compute.kernels.cpu.threads import INSIDE, ThreadPool
from tests.compute.kernels.test_threads import Job
pool, job = ThreadPool(1), Job(100)
job.run_on(pool)
pool._shared[INSIDE] += 1  # as if a helper were in a job at this moment
if child := os.fork():
    pool._shared[INSIDE] -= 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
else:
    job.run_on(pool)
    os._exit(0 if (job.cells == 2).all() else 1)
for helpers in (1, 3, 3):
    pool, job = ThreadPool(helpers), Job(100)
    for _ in range(100):
        job.run_on(pool)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_fewer_threads_do_the_work_a_forked_process_works_alone_and_its_parent_ends_while_helpers_are_awake():
    """One process for all of this: importing torch takes longest."""
    _told(FEWER + FORKED, OMP_THREAD_LIMIT="1", PYTHONPATH=os.pathsep.join(sys.path))


WHERE = """
import os, threading, time, torch
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.threads import roam
CpuKernels(2).linear(torch.randn(64, 32))(torch.randn(40, 32))
helper = next(thread for thread in threading.enumerate() if thread.name == "compute-1")
while os.getpriority(os.PRIO_PROCESS, helper.native_id) != 19:  # it may not have begun: a leader does not wait for it
    time.sleep(0.01)
print(os.sched_getaffinity(0) == os.sched_getaffinity(helper.native_id))
print(os.getpriority(os.PRIO_PROCESS, helper.native_id), os.getpriority(os.PRIO_PROCESS, 0) < 19)
everywhere, told = os.sched_getaffinity(os.getppid()), []
def look():
    told.append(os.sched_getaffinity(0) == everywhere)
    roam()
    told.append(os.sched_getaffinity(0) == everywhere)
thread = threading.Thread(target=look)
thread.start()
thread.join()
print(*told)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities and places of their own on Linux")
def test_helpers_give_way_and_stay_where_openmp_s_threads_would_and_another_thread_may_leave():
    """The bound thread that started it stays on its core."""
    is_alone = str(len(os.sched_getaffinity(0)) == 1)
    bound = _told(WHERE, OMP_PROC_BIND="true", OMP_NUM_THREADS="2").split()
    assert bound == [is_alone, "19", "True", is_alone, "True"]
    assert _told(WHERE, OMP_PROC_BIND="false").split() == ["True", "19", "True", "True", "True"]
