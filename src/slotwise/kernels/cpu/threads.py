"""Threads that help whoever leads, and are waited for only while they hold work.

OpenMP ends a parallel region when every thread has been there.  Where others want the same cores, as the API process
and its clients do at every step, a thread that the system has put aside holds up all the rest, and a step takes as much
longer as the others took.  Here the leader opens a job, works on it like everybody else, closes it when nothing is left
to take, and waits for those alone who are inside: a helper that was put aside before it came has missed the job, and
nothing else.

    leader    open 7 ▶ items … close │ open 8 ▶ items … close, wait ──┐│ open 9 ▶ …
    helper 1   enter ▶ items … leave │  enter ▶ items ………………… leave ┘│  enter ▶ …
    helper 2   (put aside by the system)                               │  enter ▶ …

So that it is the helpers who are put aside, they are as nice as can be, and let others have the core while they look
for the next job.  Not SCHED_IDLE: beside a busy program one that holds work would be kept from it for half a second.
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

from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.memory import aligned
from slotwise.kernels.cpu.openmp import places
from slotwise.kernels.cpu.parts import kernel
from slotwise.kernels.cpu.simd import (
    INT64,
    call,
    exchange,
    fetch_add,
    load,
    look,
    post,
    rest,
    store,
    wait_at,
)

CODE = 1  # word of what a kernel is given: where its code is, beside the counter that helpers look at first
NICE = 19
LOOKS = 1 << 13  # for a job, in vain, before a helper sleeps
BRIEFLY, LONG = 1 << 8, 1 << 12  # looks before a helper, and a leader who waits for one, offer others their core

# Words that leader and helpers share.  A job is the address of what its kernel is given, and in the bits that no such
# address has a use for, how many there were: two in a row are told apart.  What helpers look at lies together, for a
# cache line on its way from core to core is most of what a job costs.
JOB, INSIDE, ENDING = range(3)  # the job that may be entered, 0: none; helpers inside; they are to leave for good
JOBS = 8  # jobs so far: the leader's own
ASLEEP = 16  # helpers who sleep at the semaphore, or are about to
SEMAPHORE = 24
SIZE = 32
ADDRESS = ~63


@kernel
def _enter_jobs(shared):
    """Enter every job, once, until the end."""
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
        fetch_add(shared + 8 * INSIDE, 1)  # a leader who closes the job from here on waits
        if look(shared + 8 * JOB) == job:
            call(load(job & ADDRESS, CODE, INT64), job & ADDRESS)
            entered, looks = job, 0
        fetch_add(shared + 8 * INSIDE, -1)


@kernel
def run_shared(shared, code, words):
    """Call `code` with `words` together with whoever comes to help; its work is done when this returns."""
    number = load(shared, JOBS, INT64) + 1 & ~ADDRESS
    store(shared, JOBS, number, INT64)
    store(words, CODE, code, INT64)
    exchange(shared + 8 * JOB, words + number)
    if look(shared + 8 * ASLEEP) != 0:
        for _ in range(exchange(shared + 8 * ASLEEP, 0)):
            post(shared + 8 * SEMAPHORE)
    call(code, words)
    exchange(shared + 8 * JOB, 0)
    looks = 0
    while look(shared + 8 * INSIDE) != 0:
        looks += 1
        rest(looks, LONG)


def _work(shared):
    _enter_jobs(shared)


def _run_shared(shared, code, words):
    run_shared(shared, code, words)


WORK = Compiled(_work, "void(int64)")
RUN_SHARED = Compiled(_run_shared, "void(int64, int64, int64)")


class ThreadPool:
    """Helpers, started when they are first needed.  Whoever leads is the thread that calls; one at a time.

    Where OpenMP binds its threads to places (OMP_PROC_BIND) helpers stay there, too.
    """

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self._shared, self._address = aligned(SIZE, np.int64)
        self._running = threading.Lock()
        self._is_started = False
        self._threads: list[threading.Thread] = []

    def run(self, code: int, words: int) -> None:
        """Call the kernel at `code` with `words`; return when its work is done."""
        self.run_program(RUN_SHARED, code, words)

    def run_program(self, program: Compiled, *arguments: int) -> None:
        """Help the calling thread with `program`, which is given what `run_shared` wants, and then `arguments`."""
        with self._running:
            if not self._is_started:
                self._start()
            program.call(self._address, *arguments)

    def _start(self) -> None:
        WORK.compile()
        where = places()
        _library().sem_init(ctypes.c_void_p(self._address + 8 * SEMAPHORE), 0, 0)
        atexit.register(self._end)  # or the memory would be gone while helpers still look at it
        os.register_at_fork(after_in_child=self._forget)
        self._is_started = True
        for number in range(1, self._helpers + 1):
            place = where[number % len(where)] if where else None
            thread = threading.Thread(target=self._work, args=(place,), name=f"compute-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self, place: frozenset[int] | None) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # where it is not allowed, work is done all the same
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            if place is not None:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, place)
        WORK.call(self._address)

    def _forget(self) -> None:
        """A forked process has none of the helpers, nor waits for them."""
        self._shared[[JOB, INSIDE, ASLEEP]] = 0

    def _end(self) -> None:
        self._shared[ENDING] = 1
        for _ in self._threads:
            _library().sem_post(ctypes.c_void_p(self._address + 8 * SEMAPHORE))
        for thread in self._threads:
            thread.join()


@functools.cache
def _library() -> ctypes.CDLL:
    """Of C."""
    return ctypes.CDLL(None)


@functools.cache
def thread_pool(threads: int) -> ThreadPool:
    """The crew of this process that has so many threads, the leader among them, or as many as there are processors.

    A helper on the leader's own core would be waited for by the one who keeps it from going on.
    """
    bound = places()
    processors = sum(map(len, bound)) if bound else len(os.sched_getaffinity(0))
    return ThreadPool(max(0, min(threads, processors) - 1))
