"""Settings that keep the pauses of Python's garbage collector short."""

from __future__ import annotations

import gc

MIDDLE_EVERY = 2  # collections of the young generation per collection of the middle one
FULL_EVERY = 700  # collections of the middle generation per full collection


def hold_off() -> None:
    """Disables collection until `settle`: loading creates no garbage, and looking for it takes a tenth of a start."""
    gc.disable()


def settle() -> None:
    """Exempts all loaded objects from collection, and makes full collections rare.

    A full collection visits all objects.  Imports leave hundreds of thousands that stay until the process ends, and a
    full queue is as many again: each pause would be a tenth of a second in the middle of a stream.  Reference counts
    free nearly everything here; cycles that outlive the young generations wait, which at this rate costs tens of
    megabytes at most.  Loading itself leaves a thousand objects to collect, which is negligible.

    The middle generation is collected while small: after Python's default of ten young ones it took ten milliseconds.
    """
    gc.freeze()
    young, _, _ = gc.get_threshold()
    gc.set_threshold(young, MIDDLE_EVERY, FULL_EVERY)
    gc.enable()
