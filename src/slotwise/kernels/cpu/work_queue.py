"""Work queues: the items of a kernel that each thread takes.

Neighbouring items share what must be prepared or prefetched for them: panels of weights follow each other in memory,
and a block of rows that is packed or quantised for one panel serves for the next.  So every thread begins with a queue
of neighbours, in order, and steals from the others only when that is empty.  Until then its next item is known, and
prefetched before the current one is done.

    queue 0   block 0: panel 0, 1, 2 ...   block 1: panel 0, 1, 2 ...
    queue 1   block 2: panel 0, 1, 2 ...   block 3: panel 0, 1, 2 ...

Queues lie in turns on two cache lines: each item would cost two threads that share one the time to move it.
"""

from __future__ import annotations

from slotwise.kernels.cpu.jit.compiler import kernel
from slotwise.kernels.cpu.simd import fetch_add, look

MAX_QUEUES = 12  # as many counters are free in the words of a kernel
COUNTERS, LINE = 16, 64  # bytes from the start of the words to the first counter, and from there to the second
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


def rows_of_a_block(tokens: int, most: int, threads: int) -> int:
    """Rows per block, at most `most`, such that there is one block or as many for each thread."""
    blocks = -(-tokens // most)
    return most if blocks <= 1 else -(-tokens // (blocks + -blocks % threads))
