"""The service over a socket pair, with the real scheduler and loop on the other side, one step at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.toy import EOS, VOCAB, alone, named, next_token, scheduler

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.request import Request, RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.client import EngineClient
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.generation import AT_THE_END, Chunk, Generation
from slotwise.engine.ipc import (
    BlockingChannel,
    ChannelClosed,
    HeartbeatMonitor,
    decode_command,
    encode,
    frame,
    messages_of,
    pair,
)
from slotwise.engine.messages import (
    Command,
    Configure,
    EngineFailed,
    EngineInfo,
    Finish,
    GiveBack,
    GivenBack,
    Loading,
    Observer,
)
from slotwise.engine.refusals import EngineError, Refused
from slotwise.engine.scheduling import Scheduling

LIMITS = SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
SCHEDULING = Scheduling(Batching(), max_num_seqs=LIMITS.max_num_seqs,
                        max_num_batched_tokens=LIMITS.max_num_batched_tokens)
INFO = EngineInfo("toy", "cpu", "float32", VOCAB, LIMITS, SCHEDULING, (EOS,))
FOREVER = SamplingSpec(max_tokens=50, ignore_eos=True)


class Other:
    """The engine's side.  It moves only when a test says so."""

    def __init__(self, sock: Any) -> None:
        self.channel = BlockingChannel(sock)
        self.sock = sock
        ticks = itertools.count()
        self.engine = Engine(scheduler(LIMITS), FakeExecutor(4, next_token), lambda: next(ticks), (EOS,))
        self.finished: list[Finish] = []

    def listen(self) -> None:
        for message in self.channel.receive(0):
            command = decode_command(message)
            if isinstance(command, Finish):
                self.finished.append(command)
            if isinstance(command, GiveBack):
                self.channel.send(encode(GivenBack(self.engine.give_back())))
            else:
                self.engine.handle(command)

    def step(self) -> None:
        self.listen()
        record = self.engine.step() if self.engine.has_work else self.engine.idle_record()
        if record is not None:
            for message in messages_of(record):
                self.channel.send(encode(message))


class Notes(Observer):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.losses: list[str] = []
        self.engines: list[EngineInfo] = []
        self.arrivals: list[tuple[str, int]] = []
        self.refusals: list[str] = []
        self.ends: list[tuple[str, str]] = []

    def started(self, info: EngineInfo) -> None:
        self.engines.append(info)

    def arrived(self, request_id: str, num_prompt: int, now_ns: int) -> None:
        self.arrivals.append((request_id, num_prompt))

    def refused(self, kind: str) -> None:
        self.refusals.append(kind)

    def commanded(self, command: Command, now_ns: int) -> None:
        self.commands.append(command)

    def lost(self, message: str, now_ns: int) -> None:
        self.losses.append(message)

    def stepped(self, record: Any) -> None:
        self.ends += [(row.request_id, row.reason) for row in record.ended]


def scenario(play: Callable[[EngineClient, Other, Notes], Awaitable[None]], **options: Any) -> None:
    """Run `play` with a service that is ready."""

    async def whole() -> None:
        ours, theirs = pair()
        client, other, notes = EngineClient(**options), Other(theirs), Notes()
        client.observers.append(notes)
        other.channel.send(encode(INFO))
        assert await client.attach(ours, HeartbeatMonitor(60)) == INFO == client.info and client.healthy
        await play(client, other, notes)
        client.give_up("enough")
        await asyncio.sleep(0.01)
        theirs.close()

    asyncio.run(whole())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.002)


async def run_out(other: Other) -> None:
    for _ in range(70):
        await asyncio.sleep(0)
        other.step()
        await settle()


async def all_of(generation: Generation) -> list[Chunk]:
    return [chunk async for chunk in generation]


def test_tokens_arrive_as_the_engine_makes_them() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        params = SamplingSpec(max_tokens=9, ignore_eos=True)
        generations = {name: client.submit(named(name, RequestSpec([1, 2, at], params)))
                       for at, name in enumerate("abc")}
        reading = {name: asyncio.create_task(all_of(generation)) for name, generation in generations.items()}
        await run_out(other)
        for at, name in enumerate("abc"):
            chunks = await reading[name]
            expected = alone(Request(name, RequestSpec([1, 2, at], params), (EOS,)), LIMITS)
            assert [token for chunk in chunks for token in chunk.token_ids] == expected
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
            assert len(chunks) == 9  # this consumer was never behind
        assert notes.arrivals == [(0, 3), (1, 3), (2, 3)] and notes.ends == [(n, "length") for n in range(3)]
        assert client.num_live == 0

    scenario(play)


def test_a_consumer_that_is_behind_gets_it_all_at_once() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        generation = client.submit(named("a", RequestSpec([1], SamplingSpec(max_tokens=9, ignore_eos=True))))
        await run_out(other)
        (chunk,) = await all_of(generation)
        assert len(chunk.token_ids) == 9 and chunk.finish_reason == "length"
        assert await all_of(generation) == []

    scenario(play)


@pytest.mark.parametrize(("interval", "sizes"), [(4, [4, 4, 2]), (AT_THE_END, [10]), (1, [1] * 10)])
def test_the_interval_gathers_tokens(interval: int, sizes: list[int]) -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        generation = client.submit(named("a", RequestSpec([1], SamplingSpec(max_tokens=10, ignore_eos=True))))
        generation.interval = interval
        reading = asyncio.create_task(all_of(generation))
        await run_out(other)
        assert [len(chunk.token_ids) for chunk in await reading] == sizes

    scenario(play)


def test_finishing_from_this_side_happens_once() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        generation = client.submit(named("a", RequestSpec([1], FOREVER)))
        reading = asyncio.create_task(all_of(generation))
        for _ in range(3):
            await settle()
            other.step()
        await settle()
        generation.finish("stop")
        generation.finish("abort")
        other.engine.step()  # a token the engine made before it heard
        chunks = await reading
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
        with pytest.raises(Refused) as caught:
            client.submit(named("a", RequestSpec([1], FOREVER)))  # the engine still has one of that name
        assert caught.value.kind == "duplicate_id"
        await settle()
        other.step()
        await settle()
        assert [(f.request_id, f.reason) for f in other.finished] == [(0, "stop")]
        assert notes.ends == [(0, "stop")] and not other.engine.has_work
        client.submit(named("a", RequestSpec([1], FOREVER)))

    scenario(play)


def test_refusals() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        first = client.submit(named("a", RequestSpec([1], FOREVER)))
        kinds = []
        for name in ("a", "b", "c"):
            try:
                client.submit(named(name, RequestSpec([1], FOREVER)))
            except Refused as refused:
                kinds.append(refused.kind)
        assert kinds == ["duplicate_id", "queue_full"] == notes.refusals
        first.finish("abort")
        with pytest.raises(Refused, match="try again"):  # the engine has not let go of it yet
            client.submit(named("d", RequestSpec([1], FOREVER)))
        await settle()
        other.step()
        await settle()
        client.submit(named("d", RequestSpec([1], FOREVER)))

    scenario(play, max_live=2)


def test_a_request_the_engine_rejects() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        generation = client.submit(named("a", RequestSpec([1] * 64, FOREVER)))
        await settle()
        other.step()
        (chunk,) = await all_of(generation)
        assert chunk.finish_reason == "rejected" and "64" in chunk.message

    scenario(play)


@pytest.mark.parametrize("how", ["closes", "says so", "talks nonsense", "talks too much"])
def test_when_the_engine_dies_everyone_ends_once(how: str) -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        generations = [client.submit(named(name, RequestSpec([1], FOREVER))) for name in "abc"]
        generations[2].finish("stop")
        reading = [asyncio.create_task(all_of(generation)) for generation in generations]
        await settle()
        other.step()
        await settle()
        last_words = {"says so": encode(EngineFailed("out of memory")), "talks nonsense": b"\xc1\xc1"}
        if how == "talks too much":
            other.sock.sendall(b"\xff" * 8)
        elif how in last_words:
            other.sock.sendall(frame(last_words[how]))
        other.sock.close()
        ends = [(await task)[-1] for task in reading]
        assert [end.finish_reason for end in ends] == ["error", "error", "stop"]
        assert ends[0].message == client.failure and not client.healthy
        assert how != "says so" or client.failure == "out of memory"
        assert notes.ends.count((0, "error")) == 1 == notes.ends.count((1, "error"))
        with pytest.raises(Refused) as caught:
            client.submit(named("d", RequestSpec([1], FOREVER)))
        assert caught.value.kind == "engine_dead"
        await client.drain(10)

    scenario(play)


@pytest.mark.parametrize("last_words", ["no such model", ""])
def test_an_engine_that_cannot_start(last_words: str) -> None:
    async def whole() -> None:
        ours, theirs = pair()
        stages: list[Loading] = []
        client = EngineClient(on_loading=stages.append)
        theirs.sendall(frame(encode(Loading("weights", 1, 3))))
        if last_words:
            theirs.sendall(frame(encode(EngineFailed(last_words))))
        theirs.close()
        with pytest.raises(EngineError, match=last_words or "ended"):
            await client.attach(ours, HeartbeatMonitor(60))
        assert stages == [Loading("weights", 1, 3)] and not client.healthy

    asyncio.run(whole())


def test_draining_waits_for_those_who_run_and_then_aborts() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        short = client.submit(named("short", RequestSpec([1], SamplingSpec(max_tokens=2, ignore_eos=True))))
        client.submit(named("long", RequestSpec([1], FOREVER)))
        draining = asyncio.create_task(client.drain(0.3))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as caught:
            client.submit(named("late", RequestSpec([1], FOREVER)))
        assert caught.value.kind == "draining"
        for _ in range(4):
            await settle()
            other.step()
        await settle()
        assert (await all_of(short))[-1].finish_reason == "length" and not draining.done()
        await draining
        await settle()
        other.step()
        assert [(f.request_id, f.reason) for f in other.finished] == [(1, "abort")]

    scenario(play)


def test_a_pause_lets_those_who_run_finish_and_ends() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        short = client.submit(named("short", RequestSpec([1], SamplingSpec(max_tokens=2, ignore_eos=True))))
        pausing = asyncio.create_task(client.pause_for("asleep", 60))
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="asleep") as caught:
            client.submit(named("late", RequestSpec([1], FOREVER)))
        assert caught.value.kind == "paused" and not pausing.done()
        for _ in range(4):
            await settle()
            other.step()
        await pausing
        assert (await all_of(short))[-1].finish_reason == "length"
        client.pause = ""
        client.submit(named("late", RequestSpec([1], FOREVER)))

    scenario(play)


def test_an_engine_without_such_a_cache_gives_nothing_back() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        asked = asyncio.create_task(client.give_back())
        await settle()
        other.step()
        with pytest.raises(EngineError, match="device cpu"):
            await asked
        asked = asyncio.create_task(client.give_back())
        await asyncio.sleep(0)
        client.give_up("gone")
        with pytest.raises(EngineError, match="gone"):
            await asked

    scenario(play)


def test_an_engine_that_does_not_listen_blocks_nobody() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        generations = [client.submit(named(str(i),
                                         RequestSpec(list(range(20_000)), FOREVER))) for i in range(50)]  # megabytes
        await settle()
        for generation in generations:
            generation.finish("abort")
        for _ in range(200):
            await asyncio.sleep(0)
            other.step()
            await settle()
            if len(notes.ends) == 50:
                return
        raise AssertionError("commands were lost")

    scenario(play)


def test_observers_hear_commands_as_the_engine_gets_them_and_of_its_loss() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        request = named("a", RequestSpec([1], SamplingSpec(max_tokens=9)))
        client.submit(request).finish("abort")
        client.reschedule({"max_num_seqs": 1})
        assert notes.commands == [request, Finish(0, "abort"), Configure(client.scheduling)]
        client.give_up("enough")
        assert notes.losses == ["enough"] and notes.ends == [(0, "abort")]

    scenario(play)


def test_a_failing_observer_harms_nobody() -> None:
    class Faulty(Notes):
        def stepped(self, record: Any) -> None:
            raise ValueError

    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        client.observers.insert(0, Faulty())
        generation = client.submit(named("a", RequestSpec([1], SamplingSpec(max_tokens=3, ignore_eos=True))))
        await run_out(other)
        assert (await all_of(generation))[-1].finish_reason == "length" and notes.ends == [(0, "length")]

    scenario(play)


def test_the_engine_ends_when_the_service_lets_go() -> None:
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        client.give_up("enough")
        await settle()
        with pytest.raises(ChannelClosed):
            other.channel.receive(1)
        assert not client.healthy and client.state == "down"

    scenario(play)


def test_what_a_new_engine_must_know_comes_before_any_request() -> None:
    """A client of the API may send a request in the very pass of the loop in which the engine becomes ready."""
    async def play(client: EngineClient, other: Other, notes: Notes) -> None:
        client.reschedule({"max_num_seqs": 4, "max_num_batched_tokens": 32})
        client.give_up("it was killed")
        await settle()
        told: list[str] = []

        class Eager(Notes):
            def started(self, info: EngineInfo) -> None:
                told.append("started")

            def commanded(self, command: Command, now_ns: int) -> None:
                told.append(type(command).__name__)

        client.observers.append(Eager())
        ours, theirs = pair()
        channel = BlockingChannel(theirs)
        attaching = asyncio.create_task(client.attach(ours, HeartbeatMonitor(60)))

        def submit() -> None:
            if client.healthy:
                client.submit(named("eager", RequestSpec([1, 2], SamplingSpec(max_tokens=2))))
            else:
                asyncio.get_running_loop().call_soon(submit)

        submit()
        await settle()
        channel.send(encode(INFO))
        await attaching
        await settle()
        assert told == ["started", "Configure", "Add"]
        client.give_up("enough")
        theirs.close()

    scenario(play)
