"""Taking turns: which decoding rows rest where a step may attend to only so many positions.

Attention reads the whole context of every row, so a few long sequences make every step long, for everyone.  With a cap
on the summed context of a step the long ones take turns, and the short ones, which cost next to nothing, run always:

    cap 10,000      long a (6,000)  ■   ■   ■        whoever rested longest goes first
                    long b (6,000)    ■   ■   ■
                    short (300)     ■ ■ ■ ■ ■ ■
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slotwise.core.request import NO_TURN, Request

SHORT = 16  # a row whose context is less than this share (one in so many) of the cap never rests
ALL = ""  # the cap that counts everyone; others count the rows of the tier they are named after


def resting(rows: Iterable[Request], caps: Mapping[str, int], step: int) -> frozenset[str]:
    """Names of those who rest in `step`; the others' turn is noted.

    Args:
        rows: that want one token each.
        caps: positions of a step, for ALL and for tiers; at least one row of each runs, however long it is.
    """
    left = dict(caps)
    rest = []
    for request in sorted(rows, key=lambda request: (_turn(request, step), request.arrival)):
        context = request.num_scheduled + 1
        names = [name for name in (ALL, request.terms.tier) if name in caps]
        is_long = any(context * SHORT >= caps[name] for name in names)
        if is_long and any(left[name] < min(context, caps[name]) for name in names):
            rest.append(request.request_id)
            continue
        request.turn = step
        for name in names:
            left[name] -= context
    return frozenset(rest)


def _turn(request: Request, step: int) -> int:
    """The last step it was given.  A newcomer goes behind those who rest already: a stream of newcomers that went first
    would let them rest for ever.
    """
    if request.turn == NO_TURN:
        request.turn = step - 1
    return request.turn
