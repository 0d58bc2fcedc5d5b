"""A thread pool whose leader waits only for helpers that hold work.

OpenMP ends a parallel region when every thread has been there.  Where others want the same cores, as the API process
and its clients do at every step, a thread that the system has preempted holds up all the rest, and a step takes as
much longer as the others took.  Here the leader (the calling thread) opens a job, works on it as helpers do, closes it
when no items are left, and waits only for the helpers inside: a helper that was preempted before it entered has missed
the job, and nothing else.

    leader    open 7 ▶ items … close │ open 8 ▶ items … close, wait ──┐│ open 9 ▶ …
    helper 1   enter ▶ items … leave │  enter ▶ items ………………… leave ┘│  enter ▶ …
    helper 2   (preempted by the system)                               │  enter ▶ …

Helpers run at the lowest priority, so that the system preempts them first, and yield their core while they poll for the
next job.  Not SCHED_IDLE: beside a busy program a helper that holds work would be kept from it for half a second.
After some milliseconds without a job they sleep until the next is opened.  They never need the interpreter's lock,
which the leader would have to wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading

import numpy as np

from slotwise.host import num_processors
from slotwise.kernels.cpu.jit.compiler import Compiled, kernel, specialised
from slotwise.kernels.cpu.memory import aligned
from slotwise.kernels.cpu.openmp import places
from slotwise.kernels.cpu.simd import (
    INT64,
    call_kernel,
    exchange,
    fetch_add,
    load,
    look,
    post,
    rest,
    store,
    wait_at,
)

CODE = 1  # word of a kernel's header: the address of its code, beside the counter that helpers read first
NICE = 19
LOOKS = 1 << 13  # polls for a job, in vain, before a helper sleeps
BRIEFLY, LONG = 1 << 8, 1 << 12  # polls before a helper, and a leader waiting for one, yields its core

# Words that leader and helpers share.  A job is the address of its kernel's words; the low bits, unused in such an
# address, hold the number of jobs so far: two in a row differ.  What helpers poll lies together, for moving a cache
# line from core to core is most of what a job costs.
JOB, INSIDE, ENDING = range(3)  # the open job, 0: none; helpers inside; the pool ends
JOBS = 8  # number of jobs so far: the leader's own
ASLEEP = 16  # helpers that sleep at the semaphore, or are about to
SEMAPHORE = 24
SIZE = 32
ADDRESS = ~63


@kernel
def _enter_jobs(shared: int) -> None:
    """Enter every job once, until the pool ends."""
    entered, looks = 0, 0
    while look(shared + 8 * ENDING) == 0:
        job = look(shared + 8 * JOB)
        if job == 0 or job == entered:
            looks += 1
            rest(looks, BRIEFLY)
            if looks == LOOKS:
                fetch_add(shared + 8 * ASLEEP, 1)
                wait_at(shared + 8 * SEMAPHORE)
                looks = 0
            continue
        fetch_add(shared + 8 * INSIDE, 1)  # a leader that closes the job from here on waits
        if look(shared + 8 * JOB) == job:
            call_kernel(load(job & ADDRESS, CODE, INT64), job & ADDRESS)
            entered, looks = job, 0
        fetch_add(shared + 8 * INSIDE, -1)


@kernel
def run_shared(shared: int, code: int, words: int) -> None:
    """Call `code` with `words` on this thread and all helpers that enter; its work is done when this returns."""
    number = load(shared, JOBS, INT64) + 1 & ~ADDRESS
    store(shared, JOBS, number, INT64)
    store(words, CODE, code, INT64)
    exchange(shared + 8 * JOB, words + number)
    if look(shared + 8 * ASLEEP) != 0:
        for _ in range(exchange(shared + 8 * ASLEEP, 0)):
            post(shared + 8 * SEMAPHORE)
    call_kernel(code, words)
    exchange(shared + 8 * JOB, 0)
    looks = 0
    while look(shared + 8 * INSIDE) != 0:
        looks += 1
        rest(looks, LONG)


def _run_shared(shared: int, code: int, words: int) -> None:
    run_shared(shared, code, words)


WORK = specialised(_enter_jobs)
RUN_SHARED = Compiled(_run_shared)


class ThreadPool:
    """Helpers, started at the first job.  The calling thread leads; one at a time.

    Where OpenMP binds its threads to places (OMP_PROC_BIND), helpers are bound to them, too.
    """

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self._shared, self._address = aligned(SIZE, np.int64)
        self._running = threading.Lock()
        self._is_started = False
        self._threads: list[threading.Thread] = []

    def run(self, code: int, words: int) -> None:
        """Call the kernel at `code` with `words`; returns when its work is done."""
        self.run_program(RUN_SHARED, code, words)

    def run_program(self, program: Compiled, *arguments: int) -> None:
        """Run `program` on the calling thread, with the pool's address for `run_shared` before `arguments`."""
        with self._running:
            if not self._is_started:
                self._start()
            program.call(self._address, *arguments)

    def _start(self) -> None:
        WORK.compile()
        where = places()
        _library().sem_init(ctypes.c_void_p(self._address + 8 * SEMAPHORE), 0, 0)
        atexit.register(self._end)  # or the memory would be freed while helpers still poll it
        os.register_at_fork(after_in_child=self._forget)
        self._is_started = True
        for number in range(1, self._helpers + 1):
            place = where[number % len(where)] if where else None
            thread = threading.Thread(target=self._work, args=(place,), name=f"compute-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self, place: frozenset[int] | None) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # not permitted: the helper keeps its priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            if place is not None:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, place)
        WORK.call(self._address)

    def _forget(self) -> None:
        """In a forked process: there are no helpers, and none to wait for."""
        self._shared[[JOB, INSIDE, ASLEEP]] = 0

    def _end(self) -> None:
        self._shared[ENDING] = 1
        for _ in self._threads:
            _library().sem_post(ctypes.c_void_p(self._address + 8 * SEMAPHORE))
        for thread in self._threads:
            thread.join()


@functools.cache
def _library() -> ctypes.CDLL:
    """The C library."""
    return ctypes.CDLL(None)


@functools.cache
def thread_pool(threads: int) -> ThreadPool:
    """This process's pool of `threads` threads, the leader included; at most as many as there are processors.

    A helper on the leader's own core would keep the leader from running, and the leader would wait for it.
    """
    bound = places()
    processors = sum(map(len, bound)) if bound else num_processors()
    return ThreadPool(max(0, min(threads, processors) - 1))
