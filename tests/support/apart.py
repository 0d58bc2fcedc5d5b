"""Two engines of a toy model, one of which computes prompts for the other, and a network between them that errs."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepRecord
from slotwise.core.request import KVTransfer, RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.transfer.connectors import connector_of
from slotwise.core.transfer.kv_transfer_config import CONSUMER, KVTransferConfig
from slotwise.core.transfer.receiver import Receiver
from slotwise.core.transfer.sender import Sender
from slotwise.core.transfer.wire import Listener, Wire
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.kv_link import TransferLink
from slotwise.engine.messages import UNSUBMITTED, Add, EngineInfo, Finish
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.recorder import Recorder
from support.recorded import Shelf
from support.toy import EOS, VOCAB, next_token, scheduler

LIMITS = SchedulerLimits(
    max_model_len=80, num_blocks=60, block_size=4, max_num_seqs=6, max_num_batched_tokens=16,
    enable_prefix_caching=True)
HOST = "127.0.0.1"
SECRET = "of the tests, for both ends"
FAULTS = ("drop", "delay", "corrupt", "truncate", "duplicate", "reset")


_ports: dict[int, itertools.count[int]] = {}


def free_port() -> int:
    """A port below those that the system gives to sockets, one of which would take it before it is listened on."""
    own = os.getpid()  # test processes, which are forked, begin at different ones
    for number in _ports.setdefault(own, itertools.count(own * 101)):
        port = 10_000 + number % 20_000
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise AssertionError("there are no more numbers")


class ToyBlocks:
    """The blocks of a fake executor, whose positions hold digests of all tokens before them, as bytes."""

    def __init__(self, executor: FakeExecutor, block_size: int) -> None:
        self._cache, self._size = executor._cache, block_size
        self._form = struct.Struct(f"{block_size}q")
        self.block_bytes, self.layout = self._form.size, f"{block_size} tokens"

    def read(self, block: int, into: memoryview) -> None:
        self._form.pack_into(into, 0, *[self._cache.get((block, offset), 0) for offset in range(self._size)])

    def write(self, block: int, data: memoryview) -> None:
        for offset, digest in enumerate(self._form.unpack_from(data)):
            self._cache[block, offset] = digest


class Side:
    """An engine that sends or receives prompts."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.scheduler = scheduler(limits)
        executor = FakeExecutor(limits.block_size, next_token)
        self.blocks = ToyBlocks(executor, limits.block_size)
        self.num_blocks, self.block_size = limits.num_blocks, limits.block_size
        self.link = TransferLink(None, None, limits.block_size)
        self.engine = Engine(self.scheduler, executor, time.monotonic_ns, (EOS,), kv_link=self.link)
        self.records: list[StepRecord] = []
        self.log = Shelf()
        self._recorder = Recorder()
        scheduling = Scheduling(Batching(), max_num_seqs=limits.max_num_seqs,
                                max_num_batched_tokens=limits.max_num_batched_tokens)
        self._recorder.started(EngineInfo("toy", "cpu", "float32", VOCAB, limits, scheduling, (EOS,)))
        self._recorder.write_to(self.log)
        self.names: list[str] = []  # of its requests, by id
        self.names: list[str] = []  # of its requests, by id
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def sends(self, listener: Listener, timeout: float) -> None:
        self.link._sender = Sender(self.blocks, listener, timeout)

    def receives(self, receiver: Receiver) -> None:
        self.link._receiver = receiver

    def handle(self, command: Add) -> None:
        command.request_id = len(self.names)
        self.names.append(command.name)
        self._recorder.commanded(command, time.monotonic_ns())
        self.engine.handle(command)

    def abort(self, name: str) -> None:
        command = Finish(self.names.index(name), "abort")
        self._recorder.commanded(command, time.monotonic_ns())
        self.engine.handle(command)

    def step(self) -> bool:
        """Make a step if there is anything to do; False: it waits."""
        if not self.engine.has_work or self.engine.wait() > 0:
            return False
        record = self.engine.step()
        self.scheduler.check()
        self.records.append(record)
        self._recorder.stepped(record)
        assert not record.outcome.failure, record.outcome.failure
        for number, tokens in zip(record.plan.request_ids, record.tokens, strict=False):
            self.tokens.setdefault(self.names[number], []).extend(tokens)
        for end in record.ended:
            name = self.names[end.request_id]
            assert name not in self.ended, f"{name} has ended twice"
            self.ended[name] = end.reason
        return True

    @property
    def waits(self) -> set[str]:
        """Reasons for which requests waited."""
        return {decision.reason for record in self.records for decision in record.plan.refused}

    @property
    def num_computed(self) -> int:
        """Tokens of prompts that were computed here."""
        return sum(count for record in self.records
                   for count, kind in zip(record.plan.counts, record.plan.kinds, strict=True) if not kind)


class Pair:
    """A producer and a consumer, joined by the named connector."""

    def __init__(self, connector: str, timeout: float = 5.0, limits: SchedulerLimits = LIMITS,
                 change: Callable[[Wire], None] = lambda wire: None) -> None:
        self.producer, self.consumer, self.port = Side(limits), Side(limits), free_port()
        self.timeout = timeout
        config = KVTransferConfig(connector, CONSUMER, kv_port=self.port, peers=(HOST,), timeout=timeout, secret=SECRET)
        made = connector_of(config, self.producer.blocks.block_bytes)
        listener = made.listen(HOST, self.port)
        accept, connect = listener.accept, made.connect

        def changed(wire: Wire) -> Wire:
            change(wire)
            return wire

        listener.accept = lambda: changed(accept())
        made.connect = lambda *where: changed(connect(*where))
        self.producer.sends(listener, timeout)
        self.consumer.receives(Receiver(self.consumer.blocks, made, timeout))

    def prefill(self, name: str, prompt: list[int], timeout: float | None = None, max_tokens: int = 1) -> None:
        self.producer.handle(Add(UNSUBMITTED, RequestSpec(
            prompt, SamplingSpec(max_tokens=max_tokens),
            kv=KVTransfer(name, sends=True, timeout=timeout or self.timeout)), name=name))

    def decode(self, name: str, prompt: list[int], max_tokens: int = 8) -> None:
        self.consumer.handle(Add(UNSUBMITTED, RequestSpec(
            prompt, SamplingSpec(max_tokens=max_tokens), kv=KVTransfer(name, False, self.timeout, HOST, self.port)),
            name=name))

    def run(self, until: Callable[[], bool] | None = None, seconds: float = 120.0) -> None:
        """Step both until neither has anything left, or `until` holds."""
        end = time.monotonic() + seconds
        sides = (self.producer, self.consumer)
        while not until() if until else any(side.engine.has_work for side in sides):
            stepped = [side.step() for side in sides]
            if not any(stepped):
                time.sleep(0.001)
            assert time.monotonic() < end, "it hangs"

    def close(self) -> None:
        for side in (self.producer, self.consumer):
            side.link.close()

    def check_nothing_is_left(self) -> None:
        """All blocks are free or cached, and no thread carries anything."""
        for side in (self.producer, self.consumer):
            side.scheduler.check()
            assert side.scheduler.num_free_blocks == side.num_blocks
            assert not side.scheduler.transfers.num_pinned_blocks
        end = time.monotonic() + 120.0
        while names := [one.name for one in threading.enumerate() if one.name in ("kv-send", "kv-receive")]:
            assert time.monotonic() < end, names
            time.sleep(0.01)


class Chaos:
    """A socket of a wire, some of whose messages are lost, late, damaged, cut, doubled, or the connection's last."""

    def __init__(self, wire: Wire, draw: Random, rate: float, longest: float, seen: Counter[str]) -> None:
        self._wire, self._stream, self._draw = wire, wire._stream, draw
        self._rate, self._longest, self._seen = rate, longest, seen
        wire._stream = self

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def sendall(self, data: bytes | memoryview) -> None:
        if self._draw.random() >= self._rate or not len(data):
            self._stream.sendall(data)
            return
        fault = self._draw.choice(FAULTS)
        self._seen[fault] += 1
        at = self._draw.randrange(len(data))
        if fault == "delay":
            time.sleep(self._draw.random() * self._longest)
        elif fault == "corrupt":
            data = self._damaged(data, at)
        elif fault == "truncate":
            self._stream.sendall(data[:at])
            self._stream.shutdown(socket.SHUT_RDWR)
        elif fault == "reset":
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._stream.close()
        if fault != "drop":
            self._stream.sendall(data)
        if fault == "duplicate":
            self._stream.sendall(data)

    def _damaged(self, data: bytes | memoryview, at: int) -> bytes | memoryview:
        """A message with another byte; of blocks in shared memory, a byte there."""
        places = getattr(self._wire, "_places", None)
        if places is not None and self._draw.random() < 0.5:
            place = self._draw.choice(places)
            place[self._draw.randrange(len(place))] ^= 1 << self._draw.randrange(8)
            return data
        changed = bytearray(data)
        changed[at] ^= 1 << self._draw.randrange(8)
        return changed
