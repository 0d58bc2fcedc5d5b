"""Heartbeats of the engine process, and the detection of a frozen one.

A thread of the engine process sends a heartbeat every half second, also while the engine computes or sleeps, with the
time that the current step has taken.  So the API process can distinguish

    idle     heartbeats, no step in progress
    busy     heartbeats, a step in progress, however long
    frozen   silence: the process is stopped, swapped out or stuck; also a step far beyond its limit

A frozen engine is unhealthy after half of its timeout and given up after all of it: a load balancer is notified before
the requests inside are cut off, and an engine that recovers in between loses nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from slotwise.engine.ipc import BlockingChannel, ChannelClosed, encode
from slotwise.engine.messages import Heartbeat

HEARTBEAT_SECONDS = 0.5
ENGINE_TIMEOUT = 60.0  # seconds of silence after which an engine is given up
SHORTEST_TIMEOUT = 4.0  # seconds; a few heartbeats may be late on a busy machine
STUCK = 10  # timeouts that one step may take while heartbeats arrive
SUSPECT = 0.5  # share of the timeout after which an engine counts as frozen
LAST_WORDS = 5.0  # seconds that the engine's thread gets to notice by itself that the channel is closed

Clock = Callable[[], float]
"""Monotonic seconds."""


def exit_process() -> None:
    """Ends this process after a grace period: the API process is gone and the engine's thread is stuck in a step."""
    time.sleep(LAST_WORDS)
    os._exit(1)


class HeartbeatSender:
    """The engine's side; the loop that runs the steps sets `step_began`.

    Args:
        deserted: called by the heartbeat thread when the channel has closed.
    """

    def __init__(self, channel: BlockingChannel, deserted: Callable[[], None] = exit_process) -> None:
        self.step_began = 0  # monotonic nanoseconds; 0: no step in progress
        self._channel = channel
        self._deserted = deserted

    def start(self) -> None:
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def _send_heartbeats(self) -> None:
        try:
            while True:
                began = self.step_began
                self._channel.send(encode(Heartbeat(time.monotonic_ns() - began if began else 0)))
                time.sleep(HEARTBEAT_SECONDS)
        except ChannelClosed:
            self._deserted()


class HeartbeatMonitor:
    """The API process' side: measures one engine's silence and the time of its current step.

    A tick adds at most two heartbeat intervals of silence, so a stall of this process does not count.

    Args:
        timeout: seconds of silence after which an engine is given up.
    """

    def __init__(self, timeout: float, clock: Clock = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._ticked_at = clock()
        self._silence = 0.0
        self._step = 0.0  # seconds that the current step has taken, by the last heartbeat
        self._last_step: float | None = None

    def heard(self) -> None:
        """Resets the silence: called for all data from the engine."""
        self._silence = 0.0

    def on_heartbeat(self, step_ns: int) -> None:
        self._step = step_ns * 1e-9

    def stepped(self) -> None:
        """Called for each step record."""
        self._step = 0.0
        self._last_step = self._clock()

    def tick(self) -> None:
        """Updates the silence; called every `HEARTBEAT_SECONDS`."""
        now = self._clock()
        self._silence += min(now - self._ticked_at, 2 * HEARTBEAT_SECONDS)
        self._ticked_at = now

    @property
    def last_step_age(self) -> float | None:
        """Seconds since the last step record; None: there was none."""
        return None if self._last_step is None else self._clock() - self._last_step

    @property
    def frozen(self) -> bool:
        """True after `SUSPECT` of the timeout: the engine should get no further requests."""
        return self._doubt >= SUSPECT * self._timeout

    @property
    def verdict(self) -> str:
        """Why the engine must be given up; empty if it need not be."""
        if self._doubt < self._timeout:
            return ""
        if self._silence >= self._timeout:
            return f"the engine has been frozen for {self._silence:.0f} s"
        return f"the engine has been in one step for {self._step:.0f} s"

    @property
    def _doubt(self) -> float:
        return max(self._silence, self._step / STUCK)
