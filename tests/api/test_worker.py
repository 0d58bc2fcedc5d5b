"""Functions in a process of their own: under limits, one at a time, and gone with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import eventually

from slotwise.api.http.turns import QueueFull, Turns
from slotwise.api.http.worker_process import CallError, CallLimits, CallRefused, Worker, WorkerError
from slotwise.engine.refusals import Refused

TESTS = Path(__file__).parents[1]
LIMITS = CallLimits(seconds=20.0, memory=256 << 20, answer=1 << 20, niceness=7)


@pytest.fixture(autouse=True)
def path_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def with_worker(play: Callable[[Worker], Awaitable[None]], limits: CallLimits = LIMITS) -> None:
    async def whole() -> None:
        worker = Worker("support.worker_calls", limits, Turns(8, 4))
        try:
            await play(worker)
        finally:
            worker.close()

    asyncio.run(whole())


def call(worker: Worker, name: str, *arguments: Any, holder: str = "") -> Awaitable[Any]:
    return worker.call(holder, name, lambda: arguments)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_values_come_back_and_failures_say_why() -> None:
    async def play(worker: Worker) -> None:
        assert await call(worker, "echo", {"a": [1, "é", None, b"\xff"]}) == {"a": [1, "é", None, b"\xff"]}
        assert len(await call(worker, "echo", b"x" * (1 << 20 >> 1))) == 1 << 20 >> 1
        pid = (await call(worker, "process"))["pid"]
        with pytest.raises(CallRefused, match=r"^not today$"):
            await call(worker, "refuse")
        for name in ("fail", "no such function"):
            with pytest.raises(CallError, match=r"^failed: KeyError"):
                await call(worker, name)
        with pytest.raises(CallError, match="gave more than 1 MiB"):
            await call(worker, "give", 2 << 20)
        assert (await call(worker, "process"))["pid"] == pid, "nothing of that costs a process"

    with_worker(play)


def test_pieces_come_first_and_other_tasks_run_between_them() -> None:
    async def play(worker: Worker) -> None:
        ran_at: list[int] = []

        def pieces() -> Iterator[bytes]:
            for number in range(8):
                asyncio.get_running_loop().call_soon(ran_at.append, number)
                yield bytes([number]) * 100_000
                assert number in ran_at, "another task has run meanwhile"

        found = await worker.call("", "lengths", lambda: (b"after",), pieces)
        assert found == [800_000, 5]
        assert await worker.call("", "lengths", lambda: (b"alone",), lambda: [b"", b""]) == [5]
        pid = (await call(worker, "process"))["pid"]
        with pytest.raises(RuntimeError, match="in the middle"):
            await worker.call("", "lengths", tuple, failing)
        assert (await call(worker, "process"))["pid"] != pid, "another call would begin with half of it"

    def failing() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("in the middle")

    with_worker(play)


def test_a_worker_has_nothing_of_its_parent() -> None:
    async def play(worker: Worker) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            os.set_inheritable(listener.fileno(), True)
            process = await call(worker, "process")
        assert process["pid"] != os.getpid() and process["nice"] == min(19, os.nice(0) + 7) and process["heavy"] == []
        assert process["fds"] == 4, "standard input, output and error, and one socket"

    with_worker(play)


@pytest.mark.parametrize(("name", "arguments", "says"), [
    ("compute", (1000,), "took more than 1 seconds"), ("crash", (), "crashed"),
    ("eat", (1 << 30,), "took more than 256 MiB of memory")])
def test_one_that_is_ended_is_followed_by_another(name: str, arguments: tuple[Any, ...], says: str) -> None:
    async def play(worker: Worker) -> None:
        pid = (await call(worker, "process"))["pid"]
        with pytest.raises(CallError, match=f"^{says}$"):
            await call(worker, name, *arguments)
        assert (await call(worker, "process"))["pid"] != pid
        await asyncio.to_thread(eventually, lambda: not is_alive(pid))

    with_worker(play, CallLimits(seconds=1.0, memory=256 << 20, answer=1 << 20))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_something_else_ended_or_stopped_is_replaced_before_the_answer(number: int) -> None:
    async def play(worker: Worker) -> None:
        for is_busy in (False, True):
            pid = (await call(worker, "process"))["pid"]
            if is_busy:
                asked = asyncio.create_task(call(worker, "once_slow", pid))
                await asyncio.sleep(0.1)
            os.kill(pid, number)
            if is_busy:
                assert await asked != pid
            else:
                assert (await call(worker, "process"))["pid"] != pid
            await asyncio.to_thread(eventually, lambda pid=pid: not is_alive(pid))

    with_worker(play, CallLimits(seconds=3.0, memory=256 << 20, answer=1 << 20))


def test_a_call_has_the_time_that_it_computes_and_not_without_end() -> None:
    async def play(worker: Worker) -> None:
        await call(worker, "sleep", 1.0)  # as a process that gets no processor
        with pytest.raises(CallError, match=r"took more than 0.5 seconds"):
            await call(worker, "sleep", 1000)

    with_worker(play, CallLimits(seconds=0.5, memory=256 << 20, answer=1 << 20))


def test_a_worker_that_fails_twice_is_no_fault_of_the_call() -> None:
    async def play(worker: Worker) -> None:
        with pytest.raises(WorkerError, match=r"^crashed$"):
            await call(worker, "crash")
        with pytest.raises(CallError, match="took more than") as found:
            await call(worker, "compute", 1000)
        assert not isinstance(found.value, WorkerError)
        assert await call(worker, "echo", 1) == 1

    with_worker(play, CallLimits(seconds=1.0, memory=256 << 20, answer=1 << 20))


def test_a_call_that_is_cancelled_leaves_no_answer_to_the_next() -> None:
    async def play(worker: Worker) -> None:
        await call(worker, "echo", 0)
        going = asyncio.create_task(call(worker, "sleep", 5))
        waiting = asyncio.create_task(call(worker, "echo", 1))
        behind = asyncio.create_task(call(worker, "echo", 2))
        await asyncio.sleep(0.05)
        waiting.cancel()
        going.cancel()
        assert await behind == 2
        assert await asyncio.gather(going, waiting, return_exceptions=True)
        assert worker.turns.num_waiting == 0

    with_worker(play)


def test_a_start_goes_on_where_the_call_that_began_it_is_cancelled() -> None:
    """Where starting takes longer than calls have time, each would begin anew, and none would ever be answered."""

    async def play(worker: Worker) -> None:
        first = asyncio.create_task(call(worker, "echo", 0))
        while worker._child is None:
            await asyncio.sleep(0)
        started = worker._child
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await call(worker, "echo", 1) == 1 and worker._child is started

    with_worker(play)


def test_a_worker_that_is_closed_ends_and_stays_closed() -> None:
    async def play(worker: Worker) -> None:
        pid = (await call(worker, "process"))["pid"]
        worker.close()
        await asyncio.to_thread(eventually, lambda: not is_alive(pid))
        with pytest.raises(Refused, match="shutting down"):
            await call(worker, "echo", 1)

    with_worker(play)


def is_starting(worker: Worker) -> bool:
    return worker._starting is not None and worker._child is None


def is_started(worker: Worker) -> bool:
    """Whether the process has said that it is ready, and the call that waits for it has not gone on."""
    return worker._starting is None and worker._child is not None and not worker._is_read


def test_a_call_is_refused_whenever_the_worker_is_closed() -> None:
    async def at(worker: Worker, state: Callable[[Worker], bool], name: str) -> None:
        asked = asyncio.create_task(call(worker, name))
        while not state(worker):
            assert not asked.done()
            await asyncio.sleep(0)
        worker.close()
        with pytest.raises(Refused, match="shutting down"):
            await asked
        assert worker._child is None, "or a process would be left"

    def is_replaced(worker: Worker) -> bool:
        """Whether the process that ended is followed by one that has said nothing yet."""
        return worker._child not in (None, first) and worker._starting is not None

    for state in (is_starting, is_started):
        with_worker(lambda worker, state=state: at(worker, state, "process"))
    first = None

    async def play(worker: Worker) -> None:
        nonlocal first
        await call(worker, "process")
        first = worker._child
        await at(worker, is_replaced, "crash")

    with_worker(play)


ORPHAN = """
import asyncio
from slotwise.api.http.turns import Turns
from slotwise.api.http.worker_process import CallLimits, Worker

async def main():
    worker = Worker("support.worker_calls", CallLimits(seconds=60.0, memory=1 << 28, answer=1 << 20), Turns(1, 1))
    print((await worker.call("", "process", tuple))["pid"], flush=True)
    await worker.call("", {what!r}, lambda: {arguments!r})

asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["idle", "busy"])
def test_it_does_not_outlive_its_parent(what: str) -> None:
    program = ORPHAN.format(what="sleep", arguments=(1000,)) if what == "busy" else ORPHAN.format(
        what="echo", arguments=(0,)).replace("asyncio.run", "import time\nasyncio.run").replace(
            "lambda: (0,))", "lambda: (0,))\n    time.sleep(1000)")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: not is_alive(pid))


# -- turns -------------------------------------------------------------------------------------------------------------


def test_clients_take_turns() -> None:
    async def play() -> None:
        turns, order = Turns(100, 50), []

        async def take(holder: str, number: int) -> None:
            async with turns.turn(holder):
                order.append((holder, number))
                await asyncio.sleep(0)

        async with turns.turn("first"):
            tasks = [asyncio.create_task(take("greedy", number)) for number in range(5)]
            await asyncio.sleep(0)
            tasks += [asyncio.create_task(take(holder, 0)) for holder in ("one", "two")]
            await asyncio.sleep(0)
            assert (turns.num_waiting, turns.waiting_of("greedy"), order) == (7, 5, [])
        await asyncio.gather(*tasks)
        assert order == [("greedy", 0), ("one", 0), ("two", 0), *[("greedy", number) for number in range(1, 5)]]
        async with turns.turn("one"):
            assert turns.num_waiting == 0

    asyncio.run(play())


def test_a_queue_is_bounded_in_all_and_for_each() -> None:
    async def play() -> None:
        turns = Turns(3, 2)

        async def take(holder: str) -> None:
            async with turns.turn(holder):
                pass

        async with turns.turn("x"):
            tasks = [asyncio.create_task(take(holder)) for holder in ("one", "one", "two")]
            await asyncio.sleep(0)
            for holder, of_one in (("one", True), ("three", False)):
                with pytest.raises(QueueFull) as caught:
                    await take(holder)
                assert caught.value.of_one is of_one
            tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await take("three")

    asyncio.run(play())


