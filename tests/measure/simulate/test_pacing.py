"""Work between rests: all of it, in order, as fast as its end is near, under the alarm that was set before."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.measure.simulate.what_if import ESTIMATED, LEAST, PERIOD, Pacer


@given(st.floats(-5, 20), st.floats(0, 20), st.floats(0, 1))
def test_the_share_of_the_time_is_what_the_rest_of_the_work_needs(left: float, worked: float, done: float) -> None:
    pacer = Pacer(8.0)
    pacer._done = done
    share = pacer._share(left, worked)
    assert LEAST <= share <= 1.0
    if done < ESTIMATED:
        assert share == LEAST
    elif left <= 0:
        assert share == 1.0
    elif LEAST < share < 1:
        assert share * left == pytest.approx(worked * (1 - done) / done)


def test_work_is_done_whole_with_rests_between_moments() -> None:
    rested: list[float] = []
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", rested.append)
        with Pacer(1e9) as pacer:
            until = time.process_time() + 20 * LEAST * PERIOD
            items = list(pacer.over(range(5), 0.5))
            while time.process_time() < until:
                pass
            assert pacer._done == 0.5
    assert items == list(range(5))
    assert len(rested) > 2 and sum(rested) > 10 * LEAST * PERIOD, "of a time without end little is worked"
    assert signal.getsignal(signal.SIGALRM) is handler


def test_an_error_ends_it_and_the_alarm_before_is_set_again() -> None:
    heard: list[int] = []
    timer, _ = signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000.0)
        with pytest.raises(ValueError, match="wrong"), Pacer(1.0):
            raise ValueError("wrong")
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000 and not heard
    finally:
        signal.setitimer(signal.ITIMER_REAL, timer)
        signal.signal(signal.SIGALRM, before)


def test_an_alarm_set_before_ends_the_process() -> None:
    endless = ("import signal\nfrom slotwise.measure.simulate.what_if import Pacer\n"
               "signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
               "with Pacer(1000.0):\n    while True: pass")
    assert subprocess.run([sys.executable, "-c", endless], timeout=100).returncode == -signal.SIGALRM
