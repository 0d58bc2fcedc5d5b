"""The process of a rank other than 0: `python -m slotwise.compose.rank_worker FD`, started by `compose.ranks` alone.

It computes its share of the plans that rank 0 sends, and ends when rank 0 does.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time

from slotwise import spawn
from slotwise.compose.garbage import hold_off, settle
from slotwise.compose.rank_messages import (
    Allocate,
    Collect,
    Failed,
    Join,
    Loaded,
    Measure,
    Run,
    decode_order,
    encode,
)
from slotwise.compose.worker import end
from slotwise.engine.ipc import BlockingChannel, ChannelClosed
from slotwise.errors import one_line
from slotwise.kernels.lazy_imports import spare_torch


def main(descriptor: int) -> int:
    spawn.end_with_parent()
    hold_off()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = BlockingChannel(socket.socket(fileno=descriptor))
    try:
        _serve(channel)
    except ChannelClosed:
        return 0
    except Exception as error:
        channel.send(encode(Failed(one_line(f"{type(error).__name__}: {error}"))))
        return 1
    return 0


def _serve(channel: BlockingChannel) -> None:
    """Loads, then obeys rank 0 until it closes the channel."""
    while not (messages := channel.receive(None)):
        pass
    join = decode_order(messages[0])
    assert isinstance(join, Join)
    spare_torch()
    from slotwise.compose.follower import Follower
    from slotwise.compose.rank_groups import Rank, RankMemory
    from slotwise.compose.ranks import BEAT

    rank = Rank.of(join.rank, join.config)
    memory = RankMemory(join.memory, join.boxes, rank)

    def beat() -> None:
        while True:
            memory.stage.beat(rank.within)
            time.sleep(BEAT)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    follower = Follower(join, rank, memory)
    settle()
    channel.send(encode(Loaded()))
    while True:
        for message in channel.receive(None):
            order = decode_order(message)
            if isinstance(order, Measure):
                follower.measure(order.config)
            elif isinstance(order, Allocate):
                follower.allocate(order.limits)
            elif isinstance(order, Run):
                began = time.monotonic_ns()
                follower.run(order.plan, order.known)
                memory.boxes.note(rank.number, order.plan.step, max(began, memory.boxes.arrived(rank.number)),
                                  time.monotonic_ns())
            elif isinstance(order, Collect):
                follower.collect()


if __name__ == "__main__":
    end(main(int(sys.argv[1])))
