"""A server that sends what no client expects: a failed outcome in one line, in bounded memory."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Iterable

import pytest

from slotwise.measure.bench import load_generator as bench
from slotwise.measure.bench.load_generator import BenchTarget, Client, list_models, open_session
from slotwise.measure.bench.measures import COMPLETED, FAILED, RequestOutcome

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
DEEP = b"[" * 200_000
EVENT = b'data: {"choices":[{"text":"a"}]}\n'
END = b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n'
ANSWERS: dict[str, tuple[Iterable[bytes], str]] = {
    "an endless line": (itertools.repeat(b"data: " + b"x" * 65_530), "an event of more than"),
    "an endless line in small parts": (itertools.repeat(b"x" * 97), "an event of more than"),
    "endless events": (itertools.chain([EVENT], itertools.repeat(EVENT * 1000)), "an answer of more than"),
    "endless empty lines": (itertools.repeat(b"\n" * 65_536), "an answer of more than"),
    "a deep event": ([b'data: {"error":' + DEEP + b"\n"], "Error"),
    "a deep unknown field": ([b'data: {"x":' + DEEP + b"\n"], "Error"),
    "a large event": ([b'data: {"choices":[' + b"{}," * 300_000 + b"{}]}\n"], "ended before the answer did"),
    "no number": ([b'data: {"usage":{"completion_tokens":NaN}}\n'], "Error"),
    "a negative number": ([EVENT, b'data: {"usage":{"completion_tokens":-5}}\n', END], ">= 0"),
    "a large number": ([EVENT, b'data: {"usage":{"completion_tokens":1' + b"0" * 4000 + b"}}\n", END], "Error"),
    "no text": ([b"data: \xff\xfe\x00\n"], "Error"),
    "no UTF-8": ([b'data: {"choices":[{"text":"\xff"}]}\n'], "Error"),
    "nothing": ([], "ended before the answer did"),
}  # fmt: skip


def answered(head: bytes, parts: Iterable[bytes]) -> tuple[RequestOutcome, list[bench.ModelCard]]:
    """What a client makes of an answer, to a request and to a question for the models."""
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            for part in parts:
                writer.write(part)
                await writer.drain()
        except OSError:  # the client has had enough
            pass
        finally:
            writer.close()

    async def play() -> tuple[RequestOutcome, list[bench.ModelCard]]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        target = BenchTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        outcome = RequestOutcome(0)
        async with server, open_session() as session:
            await Client(session, target, lambda: 1.0).complete(b"{}", outcome)
            return outcome, await list_models(session, target)

    return asyncio.run(play())


@pytest.mark.parametrize("name", ANSWERS)
def test_a_hostile_answer_is_a_failure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MAX_STREAM", 1 << 21)
    parts, told = ANSWERS[name]
    tracemalloc.start()
    try:
        outcome, models = answered(HEAD, parts)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcome.status == FAILED and told in outcome.error and len(outcome.error) <= bench.MAX_REASON
    assert models == [] and most < (1 << 25 if "endless" in name else 1 << 27)


@pytest.mark.parametrize("body", [DEEP, b'{"error":' + DEEP, b'{"error":' * 500 + b"1" + b"}" * 500, b"\xff" * 9,
                                  b"x" * (1 << 23)])  # fmt: skip
def test_a_hostile_error_is_a_failure_in_one_line(body: bytes) -> None:
    outcome, models = answered(HEAD.replace(b"200 OK", b"500 No"), [body])
    assert outcome.status == FAILED and outcome.error.startswith("500: ") and len(outcome.error) <= 310
    assert models == [] and outcome.error.isprintable()


def test_an_answer_in_any_parts_is_read() -> None:
    whole = EVENT + EVENT + END + b'data: {"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    for size in (1, 7, len(whole)):
        outcome, _ = answered(HEAD, [whole[at:at + size] for at in range(0, len(whole), size)])
        assert (outcome.status, outcome.num_output, len(outcome.token_times)) == (COMPLETED, 2, 2), outcome.error
