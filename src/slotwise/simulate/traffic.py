"""A workload as commands of a simulation: prompts of tokens that no model has, equal only where they share a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slotwise.core.params import SamplingParams
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add, Command
from slotwise.workload.requests import Workload

OWN = 1 << 32  # ids from here on belong to one request, those from PREFIX on to a prefix
PREFIX = 1 << 33

Traffic = Iterator[tuple[float, Command]]
"""Commands with their seconds, in order."""


class Adapters(NamedTuple):
    """LoRA adapters, of which each request has one, in turn."""

    number: int = 0
    seconds: float = 0.0  # that each adapter among a step's rows takes


NO_ADAPTERS = Adapters()


def traffic_of(workload: Workload, adapters: int = 0) -> Traffic:
    """Yields the requests of an open loop with their seconds of arrival.

    Args:
        adapters: of which each request has one, in turn; 0: none has any.

    Raises:
        ValueError: the workload is a closed loop.
    """
    if workload.users:
        raise ValueError("a closed loop is not simulated: its arrivals depend on answers; name other arrivals")
    params = SamplingParams(temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=True)
    for request in workload.requests:
        prompt = (PREFIX + request.prefix,) * request.num_prefix
        prompt += (OWN + request.number,) * (request.num_prompt - request.num_prefix)
        yield request.arrives_at or 0.0, Add(str(request.number), RequestSpec(
            prompt, params, request.number, adapter=1 + request.number % adapters if adapters else 0,
            forced_length=request.num_output))
