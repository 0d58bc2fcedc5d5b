"""Pauses of Python's garbage collector, kept short."""

from __future__ import annotations

import gc

FULL_EVERY = 200  # collections of the middle generation between two of everything


def hold_off() -> None:
    """No collection until `settle`: what is being loaded is no garbage; looking for some takes a tenth of a start."""
    gc.disable()


def settle() -> None:
    """Never look through what was loaded, and seldom through all that came since.

    A full collection walks all objects there are.  What was imported is hundreds of thousands that live as long as the
    process does, and a full queue is as many again: each pause would be a tenth of a second in the middle of a stream.
    Nearly everything here is freed by its reference count; cycles that outlive the young generations wait, which at
    this rate costs tens of megabytes at most.  Loading itself leaves a thousand objects to collect: not worth the look.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_EVERY)
    gc.enable()
