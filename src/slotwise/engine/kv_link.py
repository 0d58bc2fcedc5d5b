"""The engine's end of transfers: tells sender and receiver what the scheduler has decided, and it what they did.

    handle ──► offer, follow
    step:  pop_news ─► Scheduler.transfers      schedule ─► follow ─► submit ─► begin      commit ─► follow

`follow` comes between a plan and its execution: the plan may give blocks to other requests, and then they are neither
sent nor received.  `begin` comes after it: block copies of the plan read what the new blocks held before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from slotwise.core.kv_transfers import KVTransfers
from slotwise.core.record import DiskNews, ReceivedBlocks
from slotwise.core.request import Request
from slotwise.core.transfer.receiver import Receiver, TransferSource
from slotwise.core.transfer.sender import Sender
from slotwise.core.transfer.wire import prompt_digest


class News(NamedTuple):
    """Blocks that other engines have sent and read, and blocks found and read on disk."""

    arrivals: Sequence[ReceivedBlocks] = ()
    acknowledged: Sequence[str] = ()  # transfers
    disk: DiskNews | None = None


class KVLink(Protocol):
    """Moves blocks between engines, or to and from disk, while steps run; the engine's thread calls it."""

    @property
    def has_news(self) -> bool: ...

    def pop_news(self) -> News:
        """Returns what happened since the last call."""
        ...

    def offer(self, request: Request) -> None:
        """Announces a new request, whose blocks may have to be sent, or may be on disk."""
        ...

    def follow(self, transfers: KVTransfers, unwanted: Sequence[Request]) -> None:
        """Blocks may have been computed, others released; the requests `unwanted` will not ask for theirs."""
        ...

    def begin(self, transfers: KVTransfers) -> None:
        """Requests may wait for blocks."""
        ...

    def lose_memory(self) -> None:
        """The contents of all blocks are about to be lost; no request is unfinished."""
        return

    def remove(self, tenant: str | None = None) -> Callable[[], int]:
        """Stop storing blocks of a tenant's prompts, or of all, including those of unfinished requests.

        Returns a function that removes the stored ones, on any thread, and returns their number.
        """
        return lambda: 0


class TransferLink(KVLink):
    """A link to other engines.

    Args:
        sender: None: no blocks are sent.
        receiver: None: none are received.
    """

    def __init__(self, sender: Sender | None, receiver: Receiver | None, block_size: int) -> None:
        self._sender = sender
        self._receiver = receiver
        self._block_size = block_size

    @property
    def has_news(self) -> bool:
        return (self._receiver is not None and self._receiver.has_arrivals) or (
            self._sender is not None and self._sender.has_acknowledged)

    def pop_news(self) -> News:
        return News(self._receiver.pop_arrivals() if self._receiver is not None else (),
                    self._sender.pop_acknowledged() if self._sender is not None else ())

    def offer(self, request: Request) -> None:
        if self._sender is not None and request.kv is not None and request.kv.sends:
            self._sender.offer(request.kv.transfer_id, prompt_digest(request.tokens),
                               -(-request.num_prompt // self._block_size))

    def follow(self, transfers: KVTransfers, unwanted: Sequence[Request]) -> None:
        if self._sender is not None and self._sender.offered:
            self._sender.update(transfers.readable(self._sender.offered), transfers.sending())
        if self._receiver is not None and self._receiver.receiving:
            waiting = {request.request_id for request in transfers.receiving()}
            for request_id in [name for name in self._receiver.receiving if name not in waiting]:
                self._receiver.cancel(request_id)
        for request in unwanted:
            if self._receiver is not None:
                self._receiver.decline(self._source(request, -(-request.num_prompt // self._block_size)))

    def begin(self, transfers: KVTransfers) -> None:
        if self._receiver is None:
            return
        for request in transfers.receiving():
            if request.request_id not in self._receiver.receiving:
                self._receiver.begin(request.request_id, self._source(request, transfers.first_missing(request)))

    def _source(self, request: Request, first: int) -> TransferSource:
        assert request.kv is not None
        num_blocks = -(-len(request.tokens) // self._block_size)
        return TransferSource(request.kv.host, request.kv.port, request.kv.transfer_id, prompt_digest(request.tokens),
                      first, request.blocks[:num_blocks])

    def close(self) -> None:
        """End all transfers."""
        for one in (self._sender, self._receiver):
            if one is not None:
                one.close()
