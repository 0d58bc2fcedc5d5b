"""Prefill and decode apart: replicas that compute prompts, and others that answer.

    arrival ──► prefill replica ──prompt computed──► travels ──► decode replica: its last token again, then the output

A prompt is sent whole, when it is computed: the server sends each chunk while the next one is computed.  Blocks are not
pinned on the prefill replica meanwhile, and a prompt that the decode replica has cached travels, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from slotwise.core.kv_transfers import KVTransfers
from slotwise.core.request import KVTransfer, Request
from slotwise.core.step import Arrival
from slotwise.engine.kv_link import News
from slotwise.engine.messages import Add, Command
from slotwise.simulate.requests import SERVED, SimulatedRequest
from slotwise.simulate.simulator import Server, simulate

LONG = 1e9  # seconds; no prompt is late


class Arrived:
    """A link to other engines whose prompts have arrived when their requests get a slot."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._arrivals: dict[str, Arrival] = {}

    @property
    def has_news(self) -> bool:
        return bool(self._arrivals)

    def pop_news(self) -> News:
        arrivals, self._arrivals = self._arrivals, {}
        return News(tuple(arrivals.values()))

    def offer(self, request: Request) -> None:
        """No blocks are sent."""

    def follow(self, transfers: KVTransfers, unwanted: Sequence[Request]) -> None:
        """None of the blocks is read or written."""

    def begin(self, transfers: KVTransfers) -> None:
        for request in transfers.receiving():
            blocks = -(-len(request.tokens) // self._block_size)
            self._arrivals[request.request_id] = Arrival(request.request_id, blocks, is_last=True)


def simulate_apart(
    arrivals: Iterable[tuple[float, Command]], prefill: Sequence[Server], decode: Sequence[Server],
    seconds_per_token: float = 0.0,
) -> dict[str, SimulatedRequest]:
    """Simulates requests, in order of arrival, on replicas with roles; each goes to the fewest unfinished ones.

    Args:
        decode: made with an `Arrived` as their links.
        seconds_per_token: in which the keys and values of a prompt's token travel.
    """
    requests = [(at, command) for at, command in arrivals if isinstance(command, Add)]
    found = simulate([(at, Add(one.request_id, replace(one.spec, forced_length=1))) for at, one in requests], prefill)
    computed = [(found[one.request_id].ended + len(one.spec.prompt) * seconds_per_token, _received(one))
                for _, one in requests if found[one.request_id].reason in SERVED]
    answered = simulate(sorted(computed, key=lambda each: each[0]), decode)
    return found | {name: replace(one, arrived=found[name].arrived) for name, one in answered.items()}


def _received(command: Add) -> Add:
    return Add(command.request_id, replace(
        command.spec, kv=KVTransfer(command.request_id, sends=False, timeout=LONG)))
