"""Spreads a calculation over the time until its end is wanted: moments of work, and rests between them.

    work │ rest ……………… │ work │ rest ……………… │ work        together 5 ms

Helper threads that compute a server's steps poll for work and give their core to any program that wants it, for as long
as the system lets that run.  Even of the lowest priority, a program that works for a second on end takes them all of
it, and steps twice as long.  In moments far shorter than a step it lengthens each by what it takes.  The rests are all
of its politeness: a low priority beside them would starve it where other programs use every processor.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from math import inf
from types import FrameType
from typing import Self, TypeVar

PERIOD = 0.005  # seconds of work and the rest behind it: a part of a step
LEAST = 0.05  # of the time, worked; also until enough is done for an estimate of the rest
ESTIMATED = 0.002  # of the work, done

Item = TypeVar("Item")


class OutOfTime(Exception):
    """The work was not done in time; `seconds` estimates what all of it would have taken."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it takes about {seconds:.0f} s")
        self.seconds = seconds


class Pacer:
    """A context, of the main thread, in which work is paced.

    An alarm that is set when it begins ends the process at its time all the same.

    Args:
        seconds: from its beginning until the work is to be done.
        most: from its beginning until OutOfTime ends what is not.
    """

    def __init__(self, seconds: float, most: float = inf) -> None:
        self._seconds, self._most = seconds, most
        self._done = 0.0  # of all work
        self._waited = 0.0  # seconds of moments in which other programs had the processor
        self._is_over = False

    @property
    def worked(self) -> float:
        """Seconds of the work without its rests; in some of them other programs had the processor."""
        return time.process_time() - self._worked + self._waited

    def over(self, items: Sequence[Item], share: float) -> Iterator[Item]:
        """Yields `items`: what is done with them is this share of all work."""
        before = self._done
        for number, item in enumerate(items):
            self._done = before + share * number / len(items)
            yield item
        self._done = before + share

    def __enter__(self) -> Self:
        self._began, self._worked = time.monotonic(), time.process_time()
        self._resumed, self._resumed_at = self._worked, self._began
        self._handler = signal.signal(signal.SIGALRM, self._rest)
        self._alarm, _ = signal.setitimer(signal.ITIMER_REAL, LEAST * PERIOD)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True  # a moment that ends from here on sets no alarm
        left = self._alarm - (time.monotonic() - self._began)
        signal.setitimer(signal.ITIMER_REAL, max(left, PERIOD) if self._alarm else 0.0)
        signal.signal(signal.SIGALRM, self._handler)

    def _rest(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_over:
            return
        now = time.monotonic()
        if self._alarm and now - self._began > self._alarm:
            signal.signal(signal.SIGALRM, self._handler)
            signal.raise_signal(signal.SIGALRM)
        worked = time.process_time()
        self._waited += max(0.0, now - self._resumed_at - (worked - self._resumed))
        if now - self._began > self._most:
            self._is_over = True
            raise OutOfTime((now - self._began) / max(self._done, ESTIMATED))
        share = self._share(self._seconds - (now - self._began), self.worked)
        time.sleep((worked - self._resumed) * (1 / share - 1))
        self._resumed, self._resumed_at = time.process_time(), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, share * PERIOD)

    def _share(self, left: float, worked: float) -> float:
        """Returns the part of the time to work.

        Args:
            left: seconds until the work is to be done.
            worked: seconds that the work has taken so far, as `worked`.
        """
        if self._done < ESTIMATED:
            return LEAST
        to_come = worked * (1 - self._done) / self._done
        return min(1.0, max(LEAST, to_come / left)) if left > 0 else 1.0
