"""The producer's side: sends the blocks of offered prompts as they are computed.

    engine's thread      offer ──► update, update ... ──► (pinned) ──► pop_acknowledged
                                        │ blocks that may be read
    a thread of each     admitted ──► WANT ──► BLOCK, BLOCK ... ALIVE ... BLOCK ──► DONE
    connection

A block is copied under the lock that `update` takes, so no block is read after the engine has withdrawn it.  Whole
blocks of a committed chunk are sent while the next chunk is computed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from slotwise.core.transfer.wire import Blocks, Frame, Kind, Listener, TransferError, Want, Wire
from slotwise.errors import ThrottledWarning, described

SIGNS = 4  # signs of life within the timeout
UNKNOWN = 0.25  # of the timeout: how long a consumer may be ahead of the request that offers its prompt
MAX_CONSUMERS = 256  # connections at once
MAX_STRANGERS = 64  # connections that are not admitted yet; beyond them the oldest one is closed
NICENESS = 10  # of the threads that copy: the engine's own goes first

logger = logging.getLogger(__name__)


class Offer:
    """A prompt whose blocks are sent to the consumer that knows its transfer's id."""

    def __init__(self, prompt: str, num_blocks: int) -> None:
        self.prompt = prompt  # digest of its tokens
        self.num_blocks = num_blocks
        self.blocks: Sequence[int] = ()  # the first ones of the prompt, which may be read


class Sender:
    """Sends the blocks of offered prompts.

    Args:
        timeout: seconds without a sign of a consumer after which its connection is closed.
        place: called by each thread that copies blocks, before it begins.
    """

    def __init__(
        self, blocks: Blocks, listener: Listener, timeout: float, place: Callable[[], None] = lambda: None,
    ) -> None:
        self._place = place
        self._blocks = blocks
        self._listener = listener
        self._timeout = timeout
        self._offers: dict[str, Offer] = {}
        self._changed = threading.Condition()  # of the offers
        self._acknowledged: list[str] = []
        self._wires: set[Wire] = set()
        self._strangers: dict[Wire, None] = {}  # those of them that are not admitted, the oldest first
        self._refused = ThrottledWarning(logger)  # anyone may connect, as often as they like
        self._is_closed = False
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    # -- the engine's thread -------------------------------------------------------------------------------------

    def offer(self, transfer_id: str, prompt: str, num_blocks: int) -> None:
        """Send the blocks of a prompt, once they are computed, to the consumer that names the transfer."""
        with self._changed:
            self._offers[transfer_id] = Offer(prompt, num_blocks)
            self._changed.notify_all()

    @property
    def offered(self) -> Collection[str]:
        """Transfers that are not withdrawn."""
        return self._offers.keys()

    def update(self, readable: Mapping[str, Sequence[int]], unfinished: Collection[str]) -> None:
        """Replace the blocks that may be read, by transfer; withdraw offers that have none and are not `unfinished`."""
        with self._changed:
            for name in list(self._offers):
                if name in readable or name in unfinished:
                    self._offers[name].blocks = readable.get(name, ())
                else:
                    del self._offers[name]
            self._changed.notify_all()

    @property
    def has_acknowledged(self) -> bool:
        return bool(self._acknowledged)

    def pop_acknowledged(self) -> list[str]:
        """Returns the transfers that consumers are done with: all has arrived, or the connection has ended."""
        with self._changed:
            acknowledged, self._acknowledged = self._acknowledged, []
        return acknowledged

    def close(self) -> None:
        """End all connections."""
        with self._changed:
            self._is_closed = True
            self._offers.clear()
            self._changed.notify_all()
        self._listener.close()
        for wire in list(self._wires):
            wire.interrupt()

    # -- connections ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                wire = self._listener.accept()
            except OSError as error:
                if self._listener.is_closed or self._is_closed:
                    return
                self._refuse(error)
                time.sleep(0.01)  # out of descriptors, say
                continue
            if len(self._wires) - len(self._strangers) >= MAX_CONSUMERS:
                wire.close()
                continue
            with self._changed:
                if len(self._strangers) >= MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    oldest.interrupt()
                self._strangers[wire] = None
            self._wires.add(wire)
            try:
                threading.Thread(target=self._serve, args=(wire,), name="kv-send", daemon=True).start()
            except RuntimeError as error:  # as many threads as the system allows
                self._drop(wire)
                self._refuse(error)

    def _serve(self, wire: Wire) -> None:
        self._place()
        go_last()
        transfer_id, is_admitted = "", False
        try:
            wire.admit()
            is_admitted = True
            with self._changed:
                self._strangers.pop(wire, None)
            frame = wire.receive()
            if frame.kind is not Kind.WANT or not frame.is_intact:
                raise TransferError("a consumer has not said what it wants")
            want = Want.decoded(bytes(frame.data))
            if refusal := self._refusal(want):
                wire.send(Frame(Kind.GONE, data=refusal.encode()))
            else:
                transfer_id = want.transfer_id
                self._send(wire, want)
        except OSError as error:
            if is_admitted:
                logger.info("a transfer has ended early: %s", described(error))
            else:
                self._refuse(error)
        finally:
            self._drop(wire)
            if transfer_id:  # its consumer does not ask twice
                self._acknowledge(transfer_id)

    def _drop(self, wire: Wire) -> None:
        with self._changed:
            self._strangers.pop(wire, None)
        self._wires.discard(wire)
        wire.close()

    def _refuse(self, error: Exception) -> None:
        with self._changed:
            self._refused.warn(f"a connection to the port for prompts was refused: {described(error)}")

    def _refusal(self, want: Want) -> str:
        """Why a consumer gets nothing; waits a little for the request that makes the offer."""
        with self._changed:
            self._changed.wait_for(lambda: want.transfer_id in self._offers or self._is_closed,
                                   UNKNOWN * self._timeout)
            offer = self._offers.get(want.transfer_id)
        if want.layout != self._blocks.layout:
            return f"the producer's blocks are laid out as {self._blocks.layout}"
        if offer is None:
            return "there is no such transfer"
        return "" if offer.prompt == want.prompt else "the prompt is another one"

    def _send(self, wire: Wire, want: Want) -> None:
        at, told = want.first, time.monotonic()
        while True:
            while (frame := wire.poll()) is not None:
                if frame.kind is Kind.DONE:
                    return
                at = max(want.first, frame.number) if frame.kind is Kind.AGAIN else at
            buffer = wire.buffer()
            match self._read(want.transfer_id, at, buffer):
                case "read":
                    wire.send_block(at)
                    at, told = at + 1, time.monotonic()
                case "end":
                    frame = wire.receive()  # DONE, or AGAIN
                    if frame.kind is Kind.DONE:
                        return
                    at = max(want.first, frame.number)
                case "gone":
                    wire.send(Frame(Kind.GONE, data=b"its request has ended"))
                    return
            if time.monotonic() - told > self._timeout / SIGNS:
                wire.send(Frame(Kind.ALIVE))
                told = time.monotonic()

    def _read(self, transfer_id: str, index: int, buffer: memoryview) -> str:
        """Copy a block of a prompt to `buffer`; if it cannot be read yet, wait a little."""
        with self._changed:
            offer = self._offers.get(transfer_id)
            if offer is not None and index >= offer.num_blocks:
                return "end"
            if offer is not None and index >= len(offer.blocks):
                self._changed.wait(self._timeout / SIGNS / 2)
                offer = self._offers.get(transfer_id)
            if offer is None:
                return "gone"
            if index >= len(offer.blocks):
                return "later"
            self._blocks.read(offer.blocks[index], buffer)
            return "read"

    def _acknowledge(self, transfer_id: str) -> None:
        with self._changed:
            self._acknowledged.append(transfer_id)


def go_last() -> None:
    """Lower the priority of the calling thread, where the system can."""
    if sys.platform == "linux":  # elsewhere the whole process would wait
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
