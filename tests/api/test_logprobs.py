"""Log-probabilities of many tokens are formatted in slices, and their number is bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.live_server import Server, running

from slotwise.api.generate.choice import Delta
from slotwise.api.generate.logprobs import (
    MAX_ENTRIES,
    SLICE,
    ChatLogprobs,
    CompletionLogprobs,
    LogprobFormat,
    LogprobsWriter,
    most_tokens,
)
from slotwise.core.record import TokenLogprobs
from slotwise.text.detokenizer import TextOffsets, detokenizer
from slotwise.text.tokenizer import Tokenizer

TOP = 20
LONGEST = MAX_ENTRIES // (128 * (TOP + 1))  # tokens of each of 128 choices


def delta(first: int, count: int) -> Delta:
    tokens = [2 + (first + i) % 290 for i in range(count)]
    entries = [TokenLogprobs(-0.5, 1, tuple(range(token, token + TOP)), tuple(-0.5 - i for i in range(TOP)))
               for token in tokens]
    return Delta("", tokens, entries, None)


class Counted:
    """The real format, which counts the entries formatted in each pass of the event loop."""

    def __init__(self, inner: LogprobFormat, passes: list[int]) -> None:
        self._inner, self._passes = inner, passes

    def of(self, piece: Delta) -> dict[str, object]:
        self._passes[-1] += len(piece.token_ids) * (TOP + 1)
        return self._inner.of(piece)


def of_completions(tokenizer: Tokenizer) -> CompletionLogprobs:
    return CompletionLogprobs(tokenizer, TextOffsets(detokenizer(tokenizer)).of)


@pytest.mark.parametrize("shape", [ChatLogprobs, of_completions])
def test_choices_share_one_slice_in_each_pass_of_the_loop(
        tokenizer: Tokenizer, shape: Callable[[Tokenizer], LogprobFormat]) -> None:
    format_of = partial(shape, tokenizer)

    async def formatted() -> list[list[bytes]]:
        turn, passes = asyncio.Lock(), [0]
        writers = [LogprobsWriter(Counted(format_of(), passes), turn) for _ in range(5)]
        work = asyncio.gather(*[writer.add(delta(i, 300)) for i, writer in enumerate(writers)])
        while not work.done():
            passes.append(0)
            await asyncio.sleep(0)
        await work
        assert sum(passes) == 5 * 300 * (TOP + 1)
        assert max(passes) <= SLICE
        return [writer.pop() for writer in writers]

    for i, parts in enumerate(asyncio.run(formatted())):
        assert json.loads(b"".join(parts)) == format_of().of(delta(i, 300))


def test_parts_of_a_stream_are_those_of_the_whole(tokenizer: Tokenizer) -> None:
    async def formatted() -> list[dict[str, list[object]]]:
        writer, events = LogprobsWriter(of_completions(tokenizer), asyncio.Lock()), []
        for first, count in ((0, 1), (1, 0), (1, 2), (3, 97)):
            await writer.add(delta(first, count))
            events.append(json.loads(b"".join(writer.pop())))
        return events

    events = asyncio.run(formatted())
    whole = of_completions(tokenizer).of(delta(0, 100))
    assert {name: [one for event in events for one in event[name]] for name in whole} == whole


def test_a_response_of_many_parts(server: Server) -> None:
    body = {"prompt": [2], "n": 32, "max_tokens": 300, "ignore_eos": True, "logprobs": TOP}
    response = server.post("/v1/completions", body)
    assert len(response.content) > 1 << 20 and int(response.headers["content-length"]) == len(response.content)
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(32))
    assert all(len(choice["logprobs"]["top_logprobs"]) == 300 for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 9600
    assert server.get("/health").status_code == 200  # the same connection serves the next request


def test_the_number_of_log_probabilities_is_bounded(server: Server) -> None:
    body = {"prompt": [[2], [3]], "n": 128, "max_tokens": 500, "logprobs": TOP}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "logprobs"
    message = response.json()["error"]["message"]
    assert all(number in message for number in ("256", "500", "21", "2688000", "2000000"))
    assert server.post("/v1/completions", body | {"max_tokens": 1}).status_code == 200


@pytest.fixture(scope="module")
def long(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of long sequences."""
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "max_model_len=4096") as started:
        yield started


def test_a_default_length_stays_within_the_bound(long: Server) -> None:
    """A client that names no length gets what fits; one that names it is told what does not."""
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 128, "logprobs": True, "top_logprobs": TOP,
            "stop_token_ids": list(range(2, 400, 2))}
    response = long.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] <= 2 * 128
    for name in ("max_tokens", "max_completion_tokens"):
        assert long.post("/v1/chat/completions", body | {name: LONGEST}).status_code == 200
        refused = long.post("/v1/chat/completions", body | {name: LONGEST + 1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"


def test_the_longest_within_the_bound() -> None:
    assert most_tokens(1, None) is None and most_tokens(128, TOP) == LONGEST == 744
    assert most_tokens(MAX_ENTRIES, 5) == 1
