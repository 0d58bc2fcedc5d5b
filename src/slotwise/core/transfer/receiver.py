"""The consumer's side: requests the blocks of prompts, and writes them to blocks of its own cache.

    engine's thread      begin ──────────────► pop_arrivals ... ──► the last one        decline
                           │                       ▲                                       │
    a thread of each     WANT ──► BLOCK, BLOCK ... ┘ written, in order ──► DONE          one for all: WANT none, DONE
    transfer

A block that is damaged or missing is requested again, a few times: the producer goes back to it, and what comes
between is dropped.  Whatever fails ends the transfer with the blocks that have arrived.  A block is written under the
lock that `cancel` takes, so nothing is written after it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from slotwise.core.record import ReceivedBlocks
from slotwise.core.transfer.sender import SIGNS, go_last
from slotwise.core.transfer.wire import Blocks, Connector, Frame, Kind, TransferError, Want, Wire

MAX_DECLINED = 1024  # prompts whose producers are still to be notified
RETRIES = 3  # times that a transfer asks again
REST = 3.0  # times the time worked, after each block: steps need the interpreter and the processors meanwhile

logger = logging.getLogger(__name__)


class TransferSource(NamedTuple):
    """Where a prompt's blocks come from, and where they go."""

    host: str
    port: int
    transfer_id: str
    prompt: str  # digest of its tokens
    first: int  # block that is wanted first; those before it are there
    blocks: Sequence[int]  # of this cache, for all blocks of the prompt


class _Transfer:
    def __init__(self, source: TransferSource) -> None:
        self.source = source
        self.num_arrived = source.first  # blocks of the prompt that are there
        self.is_cancelled = False
        self.wire: Wire | None = None
        self.told = time.monotonic()  # when the engine was last notified


class Receiver:
    """Receives the blocks of requests.

    Args:
        timeout: seconds without a sign of the producer after which a transfer fails.
        place: called by each thread that copies blocks, before it begins.
    """

    def __init__(
        self, blocks: Blocks, connector: Connector, timeout: float, place: Callable[[], None] = lambda: None,
    ) -> None:
        self._place = place
        self._blocks = blocks
        self._connector = connector
        self._timeout = timeout
        self._transfers: dict[int, _Transfer] = {}
        self._arrivals: dict[int, ReceivedBlocks] = {}  # the last one of each request
        self._lock = threading.Lock()
        self._declined: queue.Queue[TransferSource | None] = queue.Queue(MAX_DECLINED)
        threading.Thread(target=self._decline, name="kv-decline", daemon=True).start()

    # -- the engine's thread -------------------------------------------------------------------------------------

    def begin(self, request_id: int, source: TransferSource) -> None:
        """Start to receive the blocks of a request."""
        transfer = _Transfer(source)
        with self._lock:
            self._transfers[request_id] = transfer
        try:
            threading.Thread(target=self._run, args=(request_id, transfer), name="kv-receive", daemon=True).start()
        except RuntimeError as error:  # as many threads as the system allows
            self._tell(request_id, transfer, failure=str(error), is_last=True)

    def decline(self, source: TransferSource) -> None:
        """Tell the producer that no block is wanted: `source.first` comes after the last one."""
        with contextlib.suppress(queue.Full):  # then it waits
            self._declined.put_nowait(source)

    @property
    def receiving(self) -> Collection[int]:
        """Requests that have begun and were not cancelled, those with all blocks included."""
        return self._transfers.keys()

    def cancel(self, request_id: int) -> None:
        """Write no more blocks of a request."""
        with self._lock:
            transfer = self._transfers.pop(request_id)
            self._arrivals.pop(request_id, None)
            transfer.is_cancelled = True
            wire = transfer.wire
        if wire is not None:
            wire.interrupt()

    @property
    def has_arrivals(self) -> bool:
        return bool(self._arrivals)

    def pop_arrivals(self) -> list[ReceivedBlocks]:
        """Returns what has arrived since the last call."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, {}
        return list(arrivals.values())

    def close(self) -> None:
        """End all transfers."""
        for request_id in list(self._transfers):
            self.cancel(request_id)
        with contextlib.suppress(queue.Full):  # then its thread has work until the process ends
            self._declined.put_nowait(None)

    # -- transfers -----------------------------------------------------------------------------------------------

    def _run(self, request_id: int, transfer: _Transfer) -> None:
        self._place()
        go_last()
        failure = ""
        try:
            self._receive(request_id, transfer)
        except OSError as error:
            failure = str(error) or type(error).__name__
        finally:
            if transfer.wire is not None:
                transfer.wire.close()
            self._tell(request_id, transfer, failure=failure, is_last=True)
        if failure and not transfer.is_cancelled:
            source = transfer.source
            logger.warning("the prompt of %s is computed from block %d of %d on: %s", request_id, transfer.num_arrived,
                           len(source.blocks), failure)

    def _decline(self) -> None:
        self._place()
        go_last()
        while (source := self._declined.get()) is not None:
            transfer = _Transfer(source)
            try:
                self._receive(-1, transfer)  # nothing is missing
            except OSError as error:
                logger.info("the producer of %s was not told that it is not wanted: %s", source.transfer_id, error)
            finally:
                if transfer.wire is not None:
                    transfer.wire.close()

    def _receive(self, request_id: int, transfer: _Transfer) -> None:
        source = transfer.source
        wire = self._connector.connect(source.host, source.port, self._timeout)
        with self._lock:
            transfer.wire = wire
        if transfer.is_cancelled:
            return
        want = Want(source.transfer_id, source.prompt, self._blocks.layout, source.first)
        wire.send(Frame(Kind.WANT, data=want.encoded()))
        retries, is_asking, worked = RETRIES, False, time.thread_time()
        while transfer.num_arrived < len(source.blocks):
            frame = wire.receive()
            if frame.kind is Kind.GONE:
                raise TransferError(bytes(frame.data).decode(errors="replace"))
            if frame.kind is not Kind.BLOCK or frame.number < transfer.num_arrived:
                self._tell_sometimes(request_id, transfer)  # ALIVE, or a block that was sent twice
            elif frame.number == transfer.num_arrived and frame.is_intact:
                is_asking = False
                if not self._write(transfer, frame):
                    return
                time.sleep(REST * (time.thread_time() - worked))
                worked = time.thread_time()
                self._tell_sometimes(request_id, transfer)
            elif frame.number == transfer.num_arrived or not is_asking:
                if not retries:
                    raise TransferError(f"block {transfer.num_arrived} was damaged or lost {RETRIES + 1} times")
                retries, is_asking = retries - 1, True
                wire.send(Frame(Kind.AGAIN, transfer.num_arrived))
        with contextlib.suppress(OSError):  # it sees the end of the connection as well
            wire.send(Frame(Kind.DONE))

    def _write(self, transfer: _Transfer, frame: Frame) -> bool:
        """Write the next block; False if the transfer is cancelled."""
        assert isinstance(frame.data, memoryview)
        with self._lock:
            if transfer.is_cancelled:
                return False
            self._blocks.write(transfer.source.blocks[frame.number], frame.data)
            transfer.num_arrived += 1
            return True

    def _tell_sometimes(self, request_id: int, transfer: _Transfer) -> None:
        """Tell the engine that a transfer goes on, often enough for its timeout."""
        if time.monotonic() - transfer.told > self._timeout / SIGNS:
            self._tell(request_id, transfer)

    def _tell(self, request_id: int, transfer: _Transfer, *, failure: str = "", is_last: bool = False) -> None:
        transfer.told = time.monotonic()
        with self._lock:
            if not transfer.is_cancelled:
                self._arrivals[request_id] = ReceivedBlocks(request_id, transfer.num_arrived, is_last, failure)
