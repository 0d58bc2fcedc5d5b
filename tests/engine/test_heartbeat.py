"""A pulse felt by a clock that tests turn, and a heart that beats over a real channel."""

from __future__ import annotations

import threading
import time

import pytest

from slotwise.engine.ipc import (
    HEARTBEAT_SECONDS,
    STARTING,
    STUCK,
    BlockingChannel,
    ChannelClosed,
    HeartbeatMonitor,
    HeartbeatSender,
    decode_report,
    pair,
)
from slotwise.engine.messages import Heartbeat

TIMEOUT = 60.0


class Felt:
    """A pulse and its clock."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.now = 0.0
        self.heartbeat = HeartbeatMonitor(timeout, lambda: self.now)

    def turns(self, seconds: float, *, step: float | None = None) -> None:
        """Feel it for so long.  With `step` it beats all the while, and the step had taken so long at the start."""
        for turn in range(int(seconds / HEARTBEAT_SECONDS)):
            self.now += HEARTBEAT_SECONDS
            if step is not None:
                self.heartbeat.heard()
                self.heartbeat.on_heartbeat(int((step + turn * HEARTBEAT_SECONDS) * 1e9) if step else 0)
            self.heartbeat.tick()


def test_an_idle_engine_beats() -> None:
    felt = Felt()
    felt.turns(10 * TIMEOUT, step=0.0)
    assert not felt.heartbeat.frozen and not felt.heartbeat.verdict and felt.heartbeat.last_step_age is None


def test_a_busy_engine_beats_through_a_step_longer_than_the_timeout() -> None:
    felt = Felt()
    felt.turns(4 * TIMEOUT, step=0.001)
    assert not felt.heartbeat.frozen and not felt.heartbeat.verdict
    felt.heartbeat.stepped()
    felt.now += 3
    assert felt.heartbeat.last_step_age == 3


def test_a_step_beyond_all_reason_counts_as_frozen() -> None:
    felt = Felt()
    felt.turns(STUCK * TIMEOUT * 0.6, step=0.001)
    assert felt.heartbeat.frozen and not felt.heartbeat.verdict
    felt.turns(TIMEOUT, step=STUCK * TIMEOUT)
    assert "one step" in felt.heartbeat.verdict
    felt.heartbeat.stepped()
    assert not felt.heartbeat.frozen and not felt.heartbeat.verdict


def test_a_process_gets_time_to_load_however_short_the_timeout() -> None:
    felt = Felt(4.0)
    for _ in range(2):
        felt.turns(STARTING * 0.4)
        assert not felt.heartbeat.frozen
        felt.turns(4.0, step=0.0)
    felt.heartbeat.ready()
    assert not felt.heartbeat.frozen
    felt.turns(2.0)
    assert felt.heartbeat.frozen and not felt.heartbeat.verdict
    felt.turns(2.0)
    assert "frozen for 4 s" in felt.heartbeat.verdict


def test_silence_is_frozen_at_half_its_time_and_the_end_at_all_of_it() -> None:
    felt = Felt()
    felt.turns(TIMEOUT * 0.5 - 1)
    assert not felt.heartbeat.frozen
    felt.turns(1)
    assert felt.heartbeat.frozen and not felt.heartbeat.verdict
    felt.turns(TIMEOUT * 0.5 - 1)
    assert not felt.heartbeat.verdict
    felt.turns(1)
    assert "frozen for 60 s" in felt.heartbeat.verdict


def test_one_that_thaws_in_time_has_lost_nothing() -> None:
    felt = Felt()
    felt.turns(TIMEOUT - 1)
    assert felt.heartbeat.frozen
    felt.heartbeat.heard()
    assert not felt.heartbeat.frozen
    felt.turns(TIMEOUT - 1)
    assert not felt.heartbeat.verdict


def test_a_stall_of_the_watch_is_not_held_against_the_engine() -> None:
    felt = Felt()
    felt.now += 100 * TIMEOUT  # this process was stopped, or its event loop was busy
    felt.heartbeat.tick()
    assert not felt.heartbeat.frozen


@pytest.fixture
def ends():
    ours, theirs = pair()
    yield BlockingChannel(ours), BlockingChannel(theirs), ours
    ours.close()
    theirs.close()


def beats(channel: BlockingChannel, count: int) -> list[Heartbeat]:
    found: list[Heartbeat] = []
    while len(found) < count:
        found += [decode_report(message) for message in channel.receive(10)]
    return found


def test_a_heart_beats_and_tells_how_long_the_step_takes(ends) -> None:
    ours, theirs, _ = ends
    heartbeat_sender = HeartbeatSender(theirs, lambda: None)
    heartbeat_sender.start()
    (first,) = beats(ours, 1)
    assert first.step_ns == 0
    heartbeat_sender.step_began = time.monotonic_ns()
    later = beats(ours, 3)
    assert later[-1].step_ns > later[-2].step_ns > 0


def test_a_heart_that_nobody_hears_says_so_once(ends) -> None:
    _, theirs, sock = ends
    deserted = threading.Event()
    heartbeat_sender = HeartbeatSender(theirs, deserted.set)
    heartbeat_sender.start()
    sock.close()
    assert deserted.wait(120)
    with pytest.raises(ChannelClosed):
        theirs.send(b"")
