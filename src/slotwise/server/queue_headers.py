"""The queue headers of responses and refusals: what the API process counts itself when a request arrives."""

from __future__ import annotations

from slotwise.engine.admission_control import WaitEstimate

POSITION, START = "X-Queue-Position", "X-Estimated-Start-Ms"


def headers_of(wait_estimate: WaitEstimate) -> tuple[tuple[bytes, bytes], ...]:
    """The queue headers of a wait estimate.  Without a measured rate there is no estimated start."""
    position = (POSITION.lower().encode(), b"%d" % wait_estimate.position)
    if wait_estimate.start is None:
        return (position,)
    return position, (START.lower().encode(), b"%d" % round(wait_estimate.start * 1000))
