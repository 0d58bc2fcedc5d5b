"""Pauses of Python's garbage collector, kept short."""

from __future__ import annotations

import gc

MIDDLE_EVERY = 2  # collections of the young between two that look at the middle generation too
FULL_EVERY = 700  # of those between two of everything


def hold_off() -> None:
    """No collection until `settle`: what is being loaded is no garbage; looking for some takes a tenth of a start."""
    gc.disable()


def settle() -> None:
    """Never look through what was loaded, and seldom through all that came since.

    A full collection walks all objects there are.  What was imported is hundreds of thousands that live as long as the
    process does, and a full queue is as many again: each pause would be a tenth of a second in the middle of a stream.
    Nearly everything here is freed by its reference count; cycles that outlive the young generations wait, which at
    this rate costs tens of megabytes at most.  Loading itself leaves a thousand objects to collect: not worth the look.

    The middle generation is looked at while it is small: Python's own ten rounds of newcomers took ten milliseconds.
    """
    gc.freeze()
    young, _, _ = gc.get_threshold()
    gc.set_threshold(young, MIDDLE_EVERY, FULL_EVERY)
    gc.enable()
