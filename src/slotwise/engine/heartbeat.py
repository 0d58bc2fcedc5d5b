"""Whether an engine lives, felt from outside of it.

A thread of the engine process sends a beat every half second, through compute and sleep alike, and says how long the
step under way has taken.  So the API process can tell apart

    idle     beats, no step under way
    busy     beats, a step under way, however long
    frozen   silence: the process is stopped, swapped out or gone astray; also one step that takes beyond all reason

A frozen engine is unhealthy at half its time, and given up at all of it: who routes requests hears of it before those
inside are cut off, and one that thaws in between has lost nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from slotwise.engine.channel import BlockingChannel, ChannelClosed
from slotwise.engine.messages import Heartbeat
from slotwise.engine.wire import encode

HEARTBEAT_SECONDS = 0.5
ENGINE_TIMEOUT = 60.0  # seconds of silence after which an engine is given up
SHORTEST_TIMEOUT = 4.0  # a few beats may be late on a busy machine
STUCK = 10  # times its limit of silence that an engine which beats may spend on one step
SUSPECT = 0.5  # share of the limit after which an engine counts as frozen
LAST_WORDS = 5.0  # seconds that the engine's thread gets to see for itself that the channel has closed

Clock = Callable[[], float]
"""Monotonic seconds."""


def exit_process() -> None:
    """End this process: nobody is left to serve, and the engine's thread is caught in a step, or it would have left."""
    time.sleep(LAST_WORDS)
    os._exit(1)


class HeartbeatSender:
    """The engine's side: `step_began` is kept by whoever steps.

    Args:
        deserted: called by the heart's thread when the channel has closed.
    """

    def __init__(self, channel: BlockingChannel, deserted: Callable[[], None] = exit_process) -> None:
        self.step_began = 0  # monotonic nanoseconds; 0: no step is under way
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
    """The API process' side: one engine's signs of life.

    Silence is counted in turns of our own watch, so that a stall of this process is not held against the engine.

    Args:
        timeout: seconds of silence after which an engine is given up.
    """

    def __init__(self, timeout: float, clock: Clock = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._ticked_at = clock()
        self._silence = 0.0
        self._step = 0.0  # seconds that the step under way has taken, when last heard
        self._last_step: float | None = None

    def heard(self) -> None:
        """Anything at all has come from the engine."""
        self._silence = 0.0

    def on_heartbeat(self, step_ns: int) -> None:
        self._step = step_ns * 1e-9

    def stepped(self) -> None:
        """A step's record has come."""
        self._step = 0.0
        self._last_step = self._clock()

    def tick(self) -> None:
        """To be called every `HEARTBEAT_SECONDS`."""
        now = self._clock()
        self._silence += min(now - self._ticked_at, 2 * HEARTBEAT_SECONDS)
        self._ticked_at = now

    @property
    def last_step_age(self) -> float | None:
        """Seconds since the last step's record came; None: none has."""
        return None if self._last_step is None else self._clock() - self._last_step

    @property
    def frozen(self) -> bool:
        """No sign of life for so long that nobody should be sent there."""
        return self._doubt >= SUSPECT * self._timeout

    @property
    def verdict(self) -> str:
        """Why the engine is to be given up; empty: it is not."""
        if self._doubt < self._timeout:
            return ""
        if self._silence >= self._timeout:
            return f"the engine has been frozen for {self._silence:.0f} s"
        return f"the engine has been in one step for {self._step:.0f} s"

    @property
    def _doubt(self) -> float:
        return max(self._silence, self._step / STUCK)
