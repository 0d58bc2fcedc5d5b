"""Explanations in a worker process (see `server.worker`): decoding a request's steps may take a tenth of a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from slotwise.observe.event_log import decode
from slotwise.observe.explain import explain_by
from slotwise.observe.request_timeline import RequestTimeline
from slotwise.observe.step_time import Prediction, StepTimeModel


def explain(facts: Sequence[Any], positions: Sequence[int], lines: bytes, prediction: Any, until_ns: int,
            ) -> list[dict[str, Any]]:
    """Returns the explanations of requests, as JSON objects.

    Args:
        facts, positions, lines: an `observe.ring.Extract`.
        prediction: parameters of the step-time model.
        until_ns: when a response is complete, if the log has no `Sent` yet.
    """
    times = StepTimeModel.predicting(msgspec.convert(prediction, Prediction))
    entries = list(map(decode, lines.splitlines()))
    told = []
    for one in msgspec.convert(facts, list[RequestTimeline]):
        last = one.over_at if one.over_at >= 0 else max(positions, default=0)
        following = [entry for position, entry in zip(positions, entries, strict=True)
                     if one.position < position <= last]
        told.append(explain_by(one, following, times, until_ns).as_json())
    return told


CALLS = {"explain": explain}
