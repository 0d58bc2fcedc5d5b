"""Who multiplies which panel of weights by which block of rows.

What a product does to rows before it multiplies them (halving, widening, quantising) is kept by the thread that did it,
so that a block which two threads share is prepared twice.  So every thread begins with a queue of blocks of its own,
and only when that is empty helps with the others.

    queue 0   block 0: panel 0, 1, 2 ...   block 2: panel 0, 1, 2 ...
    queue 1   block 1: panel 0, 1, 2 ...   block 3: panel 0, 1, 2 ...

Attention's blocks are tiles of queries, its panels their key-value heads.  A thread with a queue of its own knows what
it will take next, and asks for it before it is done with what it has.
"""

from __future__ import annotations

from slotwise.kernels.cpu.parts import kernel
from slotwise.kernels.cpu.simd import fetch_add, look

MOST = 6  # queues: as many counters are free in the words that a kernel is given
COUNTERS = 16  # bytes from the start of the words to the first of them
NOTHING = -1


@kernel
def take(words, thread, threads, blocks, panels):
    """What is next for a thread, as `block * panels + panel`; NOTHING when all is taken."""
    queues = min(threads, MOST)
    for turn in range(queues):
        queue = (thread + turn) % queues
        items, counter = (blocks - queue + queues - 1) // queues * panels, words + COUNTERS + 8 * queue
        if look(counter) < items:
            item = fetch_add(counter, 1)
            if item < items:
                return (item // panels * queues + queue) * panels + item % panels
    return NOTHING


@kernel
def upcoming(words, thread, threads, blocks, panels):
    """What `take` will give a thread next, while its own queue holds anything; otherwise NOTHING."""
    queues = min(threads, MOST)
    queue = thread % queues
    item = look(words + COUNTERS + 8 * queue)
    if item >= (blocks - queue + queues - 1) // queues * panels:
        return NOTHING
    return (item // panels * queues + queue) * panels + item % panels


def rows_of_a_block(tokens: int, most: int, threads: int) -> int:
    """At most so many, so that there is one block, or as many for one thread as for another."""
    blocks = -(-tokens // most)
    return most if blocks <= 1 else -(-tokens // (blocks + -blocks % threads))
