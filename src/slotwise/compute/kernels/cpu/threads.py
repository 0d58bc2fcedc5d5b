"""A thread pool whose leader waits only for helpers that hold work.

OpenMP ends a parallel region when every thread has been in it.  Where other processes need the same cores, as the API
process and its clients do at every step, a thread that the system has preempted holds up all other threads, and a step
takes longer by the time that those processes took.  Here the leader (the calling thread) opens a job, works on it like
the helpers, closes it when no items are left, and waits only for the helpers inside: a helper that was preempted before
it entered has only missed the job.

    leader    open 7 ▶ items … close │ open 8 ▶ items … close, wait ──┐│ open 9 ▶ …
    helper 1   enter ▶ items … leave │  enter ▶ items ………………… leave ┘│  enter ▶ …
    helper 2   (preempted by the system)                               │  enter ▶ …

Helpers run at the lowest priority, so that the system preempts them first, and yield their core while they poll for the
next job.  Not SCHED_IDLE: with a busy program on its core, a helper that holds work would not run for half a second.
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
from pathlib import Path

import numpy as np
import torch

from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel, kernel, specialized
from slotwise.compute.kernels.cpu.memory import aligned
from slotwise.compute.kernels.cpu.simd import (
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
from slotwise.platform.host import num_processors

# Torch's own OpenMP: its threads, for kernels that run between torch's products, and the places they are bound to.
#
# Another pool's threads would compete with torch's, which spin on the same cores for milliseconds after each product.
# So such a kernel is started through the `GOMP_parallel` that torch itself is linked with (libgomp, and libomp and
# libiomp5 by their compatibility entry).


@functools.cache
def _openmp_library() -> ctypes.CDLL | None:
    """The library with OpenMP's functions, if this torch has any."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
                library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                library.GOMP_parallel.restype = None
                return library if library.omp_get_num_places else None
            except (OSError, AttributeError):
                return None
    return None


class TorchThreads:
    """Up to `threads` of torch's threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def run(self, code: int, words: int) -> None:
        """Call the kernel at `code` with `words` on every thread; returns when all have returned."""
        library = _openmp_library()
        assert library is not None
        library.GOMP_parallel(code, words, self._threads, 0)


def torch_threads(threads: int) -> TorchThreads | None:
    """None where torch has no OpenMP."""
    return None if _openmp_library() is None else TorchThreads(threads)


def places() -> list[frozenset[int]]:
    """The processors of each OpenMP place, starting with the first thread's; empty where threads are not bound."""
    library = _openmp_library()
    if library is None or not library.omp_get_proc_bind():
        return []
    count, first = library.omp_get_num_places(), max(0, library.omp_get_place_num())
    return [_processors(library, (first + number) % count) for number in range(count)]


def roam() -> None:
    """Allow the calling thread on all of OpenMP's places: otherwise it inherits the one core of a bound thread."""
    if (bound := places()) and sys.platform == "linux":
        with contextlib.suppress(OSError):  # not permitted: the thread works where it is
            os.sched_setaffinity(0, frozenset().union(*bound))


def _processors(library: ctypes.CDLL, place: int) -> frozenset[int]:
    numbers = (ctypes.c_int * library.omp_get_place_num_procs(place))()
    library.omp_get_place_proc_ids(place, numbers)
    return frozenset(numbers)


# Work queues: the items of a kernel that each thread takes.
#
# Adjacent items share what must be prepared or prefetched for them: panels of weights follow each other in memory, and
# a block of rows that is packed or quantized for one panel serves for the next.  So every thread begins with a queue of
# adjacent items, in order, and steals from other queues only when its own is empty.  Until then its next item is known,
# and prefetched before the current one is done.
#
#     queue 0   block 0: panel 0, 1, 2 ...   block 1: panel 0, 1, 2 ...
#     queue 1   block 2: panel 0, 1, 2 ...   block 3: panel 0, 1, 2 ...
#
# The counters of queues alternate between two cache lines: threads that share a line move it at each item.

# Counters that are free in the words of a kernel.
MAX_QUEUES = 12
# Bytes from the start of the words to the first counter, and from there to the second.
COUNTERS, LINE = 16, 64
NOTHING = -1


@kernel
def _counter(words: int, queue: int) -> int:
    """The address of the number of items that were taken from a queue."""
    return words + COUNTERS + queue % 2 * LINE + queue // 2 * 8


@kernel
def pop(words: int, thread: int, threads: int, items: int) -> int:
    """The next of `items` for a thread, as its number; NOTHING when all are taken."""
    queues = min(threads, MAX_QUEUES)
    for turn in range(queues):
        queue = (thread + turn) % queues
        first, end, counter = items * queue // queues, items * (queue + 1) // queues, _counter(words, queue)
        if first + look(counter) < end:
            item = first + fetch_add(counter, 1)
            if item < end:
                return item
    return NOTHING


@kernel
def upcoming(words: int, thread: int, threads: int, items: int) -> int:
    """The item that `pop` will return next from a thread's own queue; NOTHING when that is empty."""
    queues = min(threads, MAX_QUEUES)
    queue = thread % queues
    item = items * queue // queues + look(_counter(words, queue))
    return item if item < items * (queue + 1) // queues else NOTHING


# The most rows of an item.
MOST_ROWS = 32


@kernel
def rows_of_an_item(rows: int, threads: int) -> int:
    """Rows that a thread takes at once where every row is computed by itself.

    Items are taken in order, so that a thread computes about the same rows in one kernel after the other: they stay in
    the caches of its core.
    """
    return min(MOST_ROWS, max(1, rows // (4 * threads)))


def rows_of_a_block(tokens: int, most: int, threads: int) -> int:
    """Rows per block, at most `most`, such that there is one block or as many for each thread."""
    blocks = -(-tokens // most)
    return most if blocks <= 1 else -(-tokens // (blocks + -blocks % threads))


# The word of a kernel's header for the address of its code: next to the counter that helpers read first.
CODE = 1
NICE = 19
# Polls without a job before a helper sleeps.
LOOKS = 1 << 13
# Polls before a helper, and a leader that waits for one, yields its core.
BRIEFLY, LONG = 1 << 8, 1 << 12

# Words that leader and helpers share.  A job is the address of its kernel's words; the low bits, unused in such an
# address, hold the number of jobs so far: two in a row differ.  The words that helpers poll lie together, because
# moving a cache line from core to core is most of the cost of a job.

# The open job, or 0; helpers inside; whether the pool ends.
JOB, INSIDE, ENDING = range(3)
# The number of jobs so far, which only the leader uses.
JOBS = 8
# Helpers that sleep at the semaphore, or are about to.
ASLEEP = 16
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


WORK = specialized(_enter_jobs)
RUN_SHARED = CompiledKernel(_run_shared)


class ThreadPool:
    """Helpers, started at the first job.  The calling thread leads; one caller at a time.

    Where OpenMP binds its threads to places (OMP_PROC_BIND), helpers are bound to these places, too.
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

    def run_program(self, program: CompiledKernel, *arguments: int) -> None:
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
            if place is not None:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, place)
            # The priority comes last: at low priority a busy machine takes long to run the rest.
            with contextlib.suppress(OSError):  # not permitted: the helper keeps its priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        WORK.call(self._address)

    def _forget(self) -> None:
        """A forked process has no helpers to wait for."""
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

    A helper on the leader's own core would preempt the leader, which waits for the helper.
    """
    bound = places()
    processors = sum(map(len, bound)) if bound else num_processors()
    return ThreadPool(max(0, min(threads, processors) - 1))
