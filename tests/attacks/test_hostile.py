"""The attack harness in short: hostile exchanges, the kept corpus, seconds of faults; and that it sees what is wrong.

Laws of time are not judged here: limits are stretched, and gaps are not looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.server import serving

from attacks import attacked, clients, exchanges, hostile, ledger, watch

PATIENCE = 5.0  # by which limits of time are stretched
SEED = 23


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serving(*attacked.OPTIONS) as server:
        yield server


def bites(server: Any, played: list[Any]) -> list[str]:
    """What is wrong with the answers, or with what the server writes meanwhile; it must be well afterwards."""
    journal = watch.Journal(SEED)
    stderr = watch.Stderr(server.log, journal)
    stderr.look()
    found = asyncio.run(hostile.play_all(server.url, played, limit=exchanges.LIMIT * PATIENCE))
    leaked, status = asyncio.run(afterwards(server))
    assert (leaked, status) == (0, 200)
    stderr.look()
    return [f"{one.name}: {wrong}: {one.as_line()[:300]}" for one, wrong, _ in found] + [
        f"{violation.law}: {violation.what}" for violation in journal.violations]


async def afterwards(server: Any) -> tuple[int, int]:
    async with clients.session() as http:
        await clients.quiet(http, server)
        return await clients.leaked(http, server), (await clients.health(http, server))[0]


@pytest.mark.slow
def test_hostile_exchanges_are_answered_and_by_no_5xx(server: Any) -> None:
    assert bites(server, hostile.generate(SEED, 120)) == []


@pytest.mark.slow
def test_what_once_bit_bites_no_more(server: Any) -> None:
    corpus = exchanges.read_corpus(hostile.CORPUS)
    assert len(corpus) > 10
    assert bites(server, corpus) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_faults_break_no_law() -> None:
    row, journal = attacked.random_faults(8, SEED, PATIENCE)
    assert journal.counts == {}, journal.violations[:10]
    assert row.broken == [] and row.leaked == 0
    assert row.fates[ledger.COMPLETED] > 5
    assert row.figures["hostile_exchanges"] > 10 and len(journal.actions) >= 2


# -- the harness itself ------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_exchanges() -> None:
    once, again = hostile.generate(7, 120), hostile.generate(7, 120)
    assert once == again != hostile.generate(8, 120)
    assert [exchanges.Exchange.of_line(one.as_line()) for one in once] == once
    assert len({one.name for one in once}) > 30
    for one in once:
        for action in one.actions:
            assert action[0] in ("send", "repeat", "pause", "half_close", "reset", "close", "read")
            if action[0] in ("send", "repeat"):
                action[1].encode("latin-1")


@pytest.mark.parametrize(("said", "expect", "wrong"), [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "answered", ""),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n", "answered", ""),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "answered", ""),
    (b"HTTP/1.1 503 No\r\nConnection: close\r\n\r\nno", "answered", ""),
    (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\noops", "settled", "status 500: oops"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "answered", "0 of 1 answers"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "settled", "no HTTP"),
    (b"hello", "settled", "no HTTP"), (b"", "settled", ""), (b"", "answered", "0 of 1 answers"),
    (b"", "begun", "no answer begun"),
])
def test_answers_are_judged(said: bytes, expect: str, wrong: str) -> None:
    """As a real socket's other end says them, a byte at a time."""
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        for place in range(len(said)):
            writer.write(said[place:place + 1])
            await writer.drain()
        writer.close()

    async def played() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            return await exchanges.play(f"http://127.0.0.1:{port}", exchange)

    exchange = exchanges.Exchange("x", [["send", "GET / HTTP/1.1\r\n\r\n"]], expect)
    found = asyncio.run(played()).objection(exchange)
    assert found.startswith(wrong) and bool(found) == bool(wrong)


def test_silence_is_judged() -> None:
    async def played() -> Any:
        gone = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await gone.wait()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            outcome = await exchanges.play(f"http://127.0.0.1:{port}", exchange, limit=0.2)
            gone.set()
            return outcome

    exchange = exchanges.Exchange("x", [["send", "GET / HTTP/1.1\r\n\r\n"]])
    assert asyncio.run(played()).objection(exchange).startswith("neither answered nor closed")


def test_windows_excuse_what_they_overlap() -> None:
    journal = watch.Journal(SEED)
    before = time.perf_counter()
    with journal.window("a kill"):
        within = time.perf_counter()
    after = time.perf_counter() + watch.SETTLE + 0.1
    assert journal.excused(before, within) and journal.excused(within, after)
    assert not journal.excused(after, after + 1) and not journal.excused(before - 2, before - 1)
    gaps = watch.Gaps(waits=[(within, within + 0.5), (after, after + 0.25), (after + 1, after + 1.1)])
    assert [round(seconds, 3) for seconds, _ in gaps.largest(before, after + 9, journal.excused)] == [0.25, 0.1]


def test_tracebacks_are_seen_once(tmp_path: Path) -> None:
    log, journal = tmp_path / "stderr", watch.Journal(SEED)
    log.write_text('{"message": "ready"}\n{"message": "a request failed", "exception": "Tr\\nKeyError: 1"')
    stderr = watch.Stderr(log, journal)
    assert [line["message"] for line in stderr.look()] == ["ready"] and not journal.counts  # the rest is still coming
    with log.open("a") as file:
        file.write("}\nTraceback (most recent call last):\n")
    stderr.look()
    stderr.look()
    assert journal.counts == {"no traceback in stderr": 2}
    assert "KeyError: 1" in journal.violations[0].what


def test_health_that_lies_is_told() -> None:
    journal = watch.Journal(SEED)
    health = watch.HealthWatch(None, journal)
    health.changes = [(1.0, 200), (5.0, 503), (8.0, 200)]
    down, well = (lambda status: status != 200), (lambda status: status == 200)
    assert health.first(down, 2.0) == 3.0 and health.first(down, 6.0) == 0.0 and health.first(well, 5.0) == 3.0
    assert health.first(down, 9.0) == float("inf")
    health._judge(time.perf_counter(), 503, "no engine")
    health._judge(time.perf_counter(), 503, "no engine")
    assert journal.counts == {"/health tells the truth": 1}  # a stretch of it is told once
