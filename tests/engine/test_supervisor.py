"""The supervisor with a clock and processes of the test's own: no second passes, every pause is seen."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from engine.test_client import FOREVER, INFO, SCHEDULING, Notes
from support.records import record_of
from support.toy import named

from slotwise.core.request import RequestSpec
from slotwise.engine.client import EngineClient
from slotwise.engine.ipc import HEARTBEAT_SECONDS, BlockingChannel, decode_command, encode, pair
from slotwise.engine.messages import Add, Configure, EngineFailed, EngineInfo, Heartbeat
from slotwise.engine.record_codec import StepReport, packed
from slotwise.engine.refusals import EngineError, Refused
from slotwise.engine.supervisor import EXIT, REAP, Backoff, Supervisor

TIMEOUT = 60.0


class Process:
    """An engine process in name: the test speaks for it."""

    def __init__(
        self, *, starts: bool = True, polite: bool = True, mortal: bool = True, info: EngineInfo = INFO) -> None:
        self.channel, self.theirs = pair()
        self.other = BlockingChannel(self.theirs)
        self.killed = False
        self._polite, self._mortal = polite, mortal
        self.other.send(encode(info if starts else EngineFailed("no memory")))

    held_bytes = 0

    @property
    def ended(self) -> bool:
        return (self._mortal and self.killed) or (self._polite and not self.killed and self._hears_nobody())

    def _hears_nobody(self) -> bool:
        try:
            return not self.theirs.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    def kill(self) -> None:
        self.killed = True
        self.theirs.close()

    def beat(self, step_ns: int = 0) -> None:
        self.other.send(encode(Heartbeat(step_ns)))

    def crash(self) -> None:
        self.theirs.close()

    def commands(self) -> list[Any]:
        return [decode_command(message) for message in self.other.receive(1)]


class World:
    """Time, and every process that was launched in it."""

    def __init__(self, **backoff: Any) -> None:
        self.now = 0.0
        self.launches: list[float] = []
        self.processes: list[Process] = []
        self.after: list[EngineInfo | None] = []
        self.next: dict[str, Any] = {}
        self.notes = Notes()
        self.client = EngineClient()
        self.client.observers.append(self.notes)
        self.supervisor = Supervisor(
            self.client, self._launch, TIMEOUT, Backoff(**backoff), lambda: self.now, self._sleep)
        self._sleepers: list[tuple[float, float, asyncio.Future[None]]] = []

    def _launch(self, last: EngineInfo | None) -> Process:
        self.launches.append(self.now)
        self.after.append(last)
        if self.next.get("os_error"):
            raise OSError("no more processes")
        self.processes.append(Process(**self.next))
        return self.processes[-1]

    async def _sleep(self, seconds: float) -> None:
        waking = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, seconds, waking))
        await waking

    async def settle(self) -> None:
        """Let everything run that can."""
        for _ in range(5):
            await asyncio.sleep(0.001)

    async def until(self, now: float) -> None:
        """Turn the clock, waking sleepers in order."""
        await self.settle()
        while self._sleepers and min(sleeper[0] for sleeper in self._sleepers) <= now:
            sleeper = min(self._sleepers, key=lambda sleeper: sleeper[0])
            self._sleepers.remove(sleeper)
            self.now, seconds, waking = sleeper
            if not waking.done():
                waking.set_result(None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if seconds >= 1:  # a pause is over: a process was started, and says something
                await self.settle()
        self.now = now
        await self.settle()


def scenario(play: Callable[[World], Awaitable[None]], **backoff: Any) -> None:
    async def whole() -> None:
        world = World(max_false_starts=3, **backoff)
        world.supervisor.launch()
        await world.supervisor.ready()
        await play(world)
        ending = asyncio.create_task(world.supervisor.end())
        while not ending.done():
            await world.until(world.now + 0.5)
        await ending

    asyncio.run(whole())


def test_pauses_grow_and_begin_anew_after_a_long_life() -> None:
    async def play(world: World) -> None:
        at = 0.0
        for pause in (1, 2, 4, 8):
            world.processes[-1].crash()
            await world.until(at + pause - 0.1)
            assert not world.client.healthy and world.client.state == "down"
            await world.until(at + pause)
            assert world.client.healthy and world.launches[-1] == at + pause
            at += pause
        for turn in range(61):
            world.processes[-1].beat()
            await world.until(at + turn)
        world.processes[-1].crash()
        await world.until(at + 62)
        assert world.client.healthy and len(world.launches) == 6
        assert all(process.killed for process in world.processes[:-1])
        assert world.after == [None] + [INFO] * 5 and world.notes.engines == [INFO] * 6

    scenario(play)


def test_pauses_are_bounded() -> None:
    backoff = Backoff(first=1, longest=60)
    pauses = []
    for _ in range(200):
        backoff.served(1.0)
        pauses.append(backoff.pause)
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, 60] and set(pauses[6:]) == {60}
    assert not backoff.is_hopeless


def test_those_inside_end_once_and_the_next_engine_knows_nothing_of_them() -> None:
    async def play(world: World) -> None:
        generation = world.client.submit(named("a", RequestSpec([1], FOREVER)))
        leaving = world.client.submit(named("b", RequestSpec([1], FOREVER)))
        leaving.finish("stop")
        await world.settle()
        world.processes[0].crash()
        chunks = [chunk async for chunk in generation]
        assert [chunk.finish_reason for chunk in chunks] == ["error"]
        assert "ended" in chunks[-1].message
        with pytest.raises(Refused) as refused:
            world.client.submit(named("c", RequestSpec([1], FOREVER)))
        assert refused.value.kind == "engine_dead"
        await world.until(1)
        assert sorted(world.notes.ends) == [(0, "error"), (1, "stop")]
        world.client.submit(named("a", RequestSpec([1], FOREVER)))
        await world.settle()
        (command,) = world.processes[1].commands()
        assert isinstance(command, Add) and command.name == "a"
        assert world.client.num_live == 1

    scenario(play)


def test_the_next_engine_is_scheduled_as_the_last_one_was_asked_to_be() -> None:
    async def play(world: World) -> None:
        asked = world.client.reschedule({"max_num_seqs": 3})
        assert asked != SCHEDULING
        world.processes[0].crash()
        await world.until(1)
        assert world.processes[1].commands() == [Configure(asked)]
        assert world.client.scheduling == asked

    scenario(play)


def test_a_silent_engine_is_unhealthy_and_then_killed() -> None:
    async def play(world: World) -> None:
        generation = world.client.submit(named("a", RequestSpec([1], FOREVER)))
        await world.until(TIMEOUT / 2 - 1)
        assert world.client.state == "busy" and world.client.healthy
        await world.until(TIMEOUT / 2)
        assert world.client.state == "frozen" and not world.client.healthy
        with pytest.raises(Refused, match="no sign of life"):
            world.client.submit(named("b", RequestSpec([1], FOREVER)))
        assert not generation.ended and not world.processes[0].killed
        await world.until(TIMEOUT)
        assert generation.ended and world.processes[0].killed
        await world.until(TIMEOUT + 1)
        assert world.client.state == "idle" and len(world.processes) == 2

    scenario(play)


def test_an_engine_that_is_busy_for_long_is_left_alone() -> None:
    async def play(world: World) -> None:
        world.client.submit(named("a", RequestSpec([1], FOREVER)))
        for turn in range(1, int(1.2 * TIMEOUT / HEARTBEAT_SECONDS)):
            world.processes[0].beat(int(turn * HEARTBEAT_SECONDS * 1e9))
            await world.until(turn * HEARTBEAT_SECONDS)
            assert world.client.state == "busy"
        world.processes[0].other.send(encode(packed(record_of(0, 0, 0), StepReport)))
        await world.settle()
        assert world.client.last_step_age is not None and world.client.healthy

    scenario(play)


@pytest.mark.parametrize("how", ["says so", "cannot be launched"])
def test_several_false_starts_in_a_row_are_hopeless(how: str) -> None:
    async def play(world: World) -> None:
        world.next = {"starts": False} if how == "says so" else {"os_error": True}
        world.processes[0].crash()
        await world.until(1 + 2)
        assert not world.client.hopeless.is_set() and world.client.state == "down"
        await world.until(1 + 2 + 4)
        assert world.client.hopeless.is_set() and world.launches == [0, 1, 3, 7]
        assert ("no memory" if how == "says so" else "no more processes") in world.client.failure
        await world.until(1000)
        assert len(world.launches) == 4

    scenario(play)


def test_a_good_start_forgives_the_false_ones() -> None:
    async def play(world: World) -> None:
        for _ in range(3):
            world.next = {"starts": False}
            world.processes[-1].crash()
            launched = len(world.launches)
            while len(world.launches) < launched + 2:
                await world.until(world.now + 1)
            world.next = {}
            while not world.client.healthy:
                await world.until(world.now + 1)
        assert not world.client.hopeless.is_set()

    scenario(play)


def test_a_first_start_that_fails_is_told_to_whoever_started_it() -> None:
    async def whole() -> None:
        world = World()
        world.next = {"starts": False}
        world.supervisor.launch()
        with pytest.raises(EngineError, match="no memory"):
            await world.supervisor.ready()
        await world.supervisor.end()
        assert world.processes[0].killed and len(world.launches) == 1

    asyncio.run(whole())


@pytest.mark.parametrize("change", [{"checkpoint": "other"}, {"vocab_size": 7}, {"eos_token_ids": (2,)}])
def test_an_engine_of_a_changed_checkpoint_is_refused(
        change: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    async def play(world: World) -> None:
        world.next = {"info": msgspec.structs.replace(INFO, **change)}
        world.processes[0].crash()
        await world.until(1)
        assert world.client.hopeless.is_set() and not world.client.healthy and world.client.info == INFO
        with pytest.raises(Refused, match="the checkpoint has changed since the start: restart the server"):
            world.client.submit(named("a", RequestSpec([1], FOREVER)))
        await world.until(1000)
        assert len(world.launches) == 2

    scenario(play)
    assert [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()] == [
        "the checkpoint has changed since the start: restart the server"]
    assert all(record.exc_info is None for record in caplog.records)


def test_nothing_is_started_for_a_server_that_is_ending() -> None:
    async def play(world: World) -> None:
        await world.client.drain(1)
        world.processes[0].crash()
        await world.until(100)
        assert len(world.launches) == 1

    scenario(play)


def test_the_end_is_kind_to_a_living_engine_and_quick_with_others() -> None:
    async def ending(world: World) -> float:
        began, task = world.now, asyncio.create_task(world.supervisor.end())
        while not task.done():
            await world.until(world.now + 0.5)
        return world.now - began

    async def whole() -> None:
        for silent, manners, killed, longest in (
                (0, {}, False, 0.5), (0, {"polite": False}, True, EXIT + 1), (TIMEOUT / 2, {}, True, 1),
                (0, {"polite": False, "mortal": False}, True, EXIT + REAP + 1)):
            world = World()
            world.next = manners
            world.supervisor.launch()
            await world.supervisor.ready()
            await world.until(silent)
            assert world.client.healthy == (not silent)
            assert await ending(world) <= longest and world.processes[0].killed == killed

    asyncio.run(whole())


def test_a_supervisor_that_fails_does_not_leave_a_server_that_looks_well() -> None:
    async def play(world: World) -> None:
        def launch(last: EngineInfo | None) -> Process:
            raise RuntimeError("a mistake of ours")

        world.supervisor._launch = launch
        world.processes[0].crash()
        await world.until(1)
        assert world.client.hopeless.is_set() and not world.client.healthy

    scenario(play)


async def rested(world: World) -> None:
    resting = asyncio.create_task(world.supervisor.rest("the model is asleep"))
    await world.until(world.now + EXIT + 1)
    await resting


def test_an_engine_that_rests_ends_and_is_not_replaced() -> None:
    async def play(world: World) -> None:
        request = world.client.submit(named("one", RequestSpec([1], FOREVER)))
        await world.settle()
        assert [command.name for command in world.processes[0].commands()] == ["one"]
        await rested(world)
        assert world.processes[0].ended and not world.processes[0].killed, "it ended by itself"
        chunks = [chunk async for chunk in request]
        assert chunks[-1].finish_reason == "error" and chunks[-1].message == "the model is asleep"
        await world.until(500)
        assert len(world.launches) == 1 and world.client.state == "down" and not world.client.hopeless.is_set()
        waking = asyncio.create_task(world.supervisor.wake())
        await world.settle()
        assert await waking == INFO and world.client.healthy and world.after == [None, INFO]
        world.processes[-1].crash()
        await world.until(502)
        assert world.client.healthy and len(world.launches) == 3, "a lost one is replaced again"

    scenario(play)


def test_an_engine_that_does_not_wake_up_rests_on() -> None:
    async def play(world: World) -> None:
        await rested(world)
        for trouble, message in (({"starts": False}, "no memory"), ({"os_error": True}, "no more processes")):
            world.next = trouble
            with pytest.raises(EngineError, match=message):
                await world.supervisor.wake()
            assert world.client.state == "down"
        await world.until(500)
        assert len(world.launches) == 3, "nothing tries again by itself"
        world.next = {}
        await world.supervisor.wake()
        assert world.client.healthy

    scenario(play)


def test_a_process_that_does_not_end_by_itself_is_killed_when_it_rests() -> None:
    async def play(world: World) -> None:
        world.next = {"polite": False}
        world.processes[-1].crash()
        await world.until(1)
        await rested(world)
        assert world.processes[-1].killed

    scenario(play)
