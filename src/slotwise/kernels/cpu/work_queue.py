"""Who takes which piece of a kernel's work.

Pieces that lie together share what must be prepared for them or read ahead: panels of weights follow each other in
memory, and a block of rows that is halved or quantised for one panel serves for the next.  So every thread begins with
a queue of neighbours, in order, and only when that is empty helps with the others.  Until then it knows what it will
take next, and asks for it before it is done with what it has.

    queue 0   block 0: panel 0, 1, 2 ...   block 1: panel 0, 1, 2 ...
    queue 1   block 2: panel 0, 1, 2 ...   block 3: panel 0, 1, 2 ...
"""

from __future__ import annotations

from slotwise.kernels.cpu.parts import kernel
from slotwise.kernels.cpu.simd import fetch_add, look

MAX_QUEUES = 6  # queues: as many counters are free in the words that a kernel is given
COUNTERS = 16  # bytes from the start of the words to the first of them
NOTHING = -1


@kernel
def pop(words, thread, threads, items):
    """The next of `items` for a thread, as its number; NOTHING when all are taken."""
    queues = min(threads, MAX_QUEUES)
    for turn in range(queues):
        queue = (thread + turn) % queues
        first, end, counter = items * queue // queues, items * (queue + 1) // queues, words + COUNTERS + 8 * queue
        if first + look(counter) < end:
            item = first + fetch_add(counter, 1)
            if item < end:
                return item
    return NOTHING


@kernel
def upcoming(words, thread, threads, items):
    """What `pop` will give a thread next of its own queue; NOTHING when that is empty."""
    queues = min(threads, MAX_QUEUES)
    queue = thread % queues
    item = items * queue // queues + look(words + COUNTERS + 8 * queue)
    return item if item < items * (queue + 1) // queues else NOTHING


def rows_of_a_block(tokens: int, most: int, threads: int) -> int:
    """At most so many, so that there is one block, or as many for one thread as for another."""
    blocks = -(-tokens // most)
    return most if blocks <= 1 else -(-tokens // (blocks + -blocks % threads))
