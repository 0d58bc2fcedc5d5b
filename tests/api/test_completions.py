from __future__ import annotations

import asyncio
import json
from types import ModuleType
from typing import Any

import pytest
from support.live_server import Server, counted

from slotwise.text.tokenizer import Tokenizer


def completion(server: Server, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {"model": "toy", "prompt": [2], **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_whole_completion(server: Server, tokenizer: Tokenizer) -> None:
    answer = completion(server, max_tokens=40)
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": tokenizer.decode(counted(2, 40)), "logprobs": None, "finish_reason": "length",
                      "stop_reason": None}
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 40, "total_tokens": 41,
                               "prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["object"] == "text_completion" and answer["model"] == "toy" and answer["id"].startswith("cmpl-")


def test_a_stream_says_the_same_as_the_whole(server: Server) -> None:
    whole = completion(server, max_tokens=100)["choices"][0]
    events = server.events("/v1/completions", {"prompt": [2], "max_tokens": 100})
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


def test_the_default_is_sixteen_tokens_or_what_fits(server: Server) -> None:
    assert completion(server)["usage"]["completion_tokens"] == 16
    assert completion(server, prompt=[7] * 508)["usage"]["completion_tokens"] == 4


def test_usage_in_streams(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = server.events("/v1/completions", {"prompt": [2, 40], "max_tokens": 30, "stream_options": options})
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 32
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 30
    del options["continuous_usage_stats"]
    *events, last = server.events("/v1/completions", {"prompt": [2, 40], "max_tokens": 30, "stream_options": options})
    assert all(event["usage"] is None for event in events) and last["usage"]["completion_tokens"] == 30


def test_the_end_token_ends_and_is_not_shown(server: Server, tokenizer: Tokenizer) -> None:
    answer = completion(server, prompt=[290], max_tokens=200)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == tokenizer.decode(counted(290, 110))  # round through 0 to the end token, 1
    assert answer["usage"]["completion_tokens"] == 111
    assert completion(server, prompt=[290], max_tokens=200, ignore_eos=True)["usage"]["completion_tokens"] == 200


def test_stop_token_ids_end_and_are_not_shown(server: Server, tokenizer: Tokenizer) -> None:
    choice = completion(server, prompt=[40], max_tokens=50, stop_token_ids=[60])["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"] == tokenizer.decode(counted(40, 19))
    late = completion(server, prompt=[40], max_tokens=50, stop_token_ids=[60], min_tokens=40)["choices"][0]
    assert late["finish_reason"] == "length"


@pytest.mark.parametrize("at", range(3))
def test_a_stop_string_over_several_tokens(server: Server, tokenizer: Tokenizer, at: int) -> None:
    """Single characters are tokens here, so every stop string of three spans tokens."""
    text = tokenizer.decode(counted(40, 60))
    stop = text[20 + at : 23 + at]
    body = {"prompt": [40], "max_tokens": 60, "stop": [stop, "never"]}
    answer = completion(server, **body)
    assert answer["choices"][0]["text"] == text[: 20 + at]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 23 + at
    streamed = [event["choices"][0] for event in server.events("/v1/completions", body)]
    assert "".join(choice["text"] for choice in streamed) == text[: 20 + at]
    assert streamed[-1]["finish_reason"] == "stop"


def test_what_only_began_a_stop_string_is_shown_at_the_end(server: Server, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(counted(40, 10))
    answer = completion(server, prompt=[40], max_tokens=10, stop=text[-4:] + "!")
    assert answer["choices"][0]["text"] == text and answer["choices"][0]["finish_reason"] == "length"


def test_no_stop_string_before_min_tokens(server: Server, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(counted(40, 30))
    assert completion(server, prompt=[40], max_tokens=30, stop=text[3], min_tokens=10)["choices"][0]["text"] == text


def test_several_prompts_and_choices_stand_in_order(server: Server, tokenizer: Tokenizer) -> None:
    answer = completion(server, prompt=[[10], [40, 50], [90]], n=2, max_tokens=12)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    expected = [tokenizer.decode(counted(first, 12)) for first in (10, 10, 50, 50, 90, 90)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 72
    texts = [""] * 6
    for event in server.events("/v1/completions", {"prompt": [[10], [40, 50], [90]], "n": 2, "max_tokens": 12}):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == expected


def test_strings_are_tokenized(server: Server, tokenizer: Tokenizer) -> None:
    prompts = ["the fox", "over the lazy dog " * 10]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    answer = completion(server, prompt=prompts, max_tokens=3)
    assert [c["text"] for c in answer["choices"]] == [tokenizer.decode(counted(one[-1], 3)) for one in ids]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_logprobs(server: Server, tokenizer: Tokenizer) -> None:
    choice = completion(server, prompt=[40], max_tokens=3, logprobs=5)["choices"][0]
    tokens = [tokenizer.token_text(token) for token in counted(40, 3)]
    assert choice["logprobs"]["tokens"] == tokens and choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [-0.25] * 3
    first = choice["logprobs"]["top_logprobs"][0]
    assert list(first.values()) == [-0.25, -1.25, -2.25, -9999.0, -9999.0] and next(iter(first)) == tokens[0]
    events = server.events("/v1/completions", {"prompt": [40], "max_tokens": 3, "logprobs": 0})
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [token for part in streamed for token in part["tokens"]] == tokens
    assert [offset for part in streamed for offset in part["text_offset"]] == [0, 1, 2]


def test_logprobs_end_with_the_stop_string(server: Server, tokenizer: Tokenizer) -> None:
    stop = tokenizer.decode(counted(40, 10))[-2:]
    answer = completion(server, prompt=[40], max_tokens=30, logprobs=1, stop=stop)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 10


def test_request_ids(server: Server) -> None:
    response = server.post("/v1/completions", {"prompt": [2]}, **{"X-Request-Id": "trace 7"})
    assert response.headers["x-request-id"] == "trace 7" and response.json()["id"] == "cmpl-trace 7"
    response = server.post("/v1/completions", {"prompt": [2], "request_id": "mine", "priority": 3})
    assert response.headers["x-request-id"] == "mine" and response.json()["id"] == "cmpl-mine"
    assert len(server.post("/v1/completions", {"prompt": [2]}).headers["x-request-id"]) == 32


def test_equal_request_ids_at_once_are_no_conflict(server: Server, openai: ModuleType) -> None:
    async def both() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
            return await asyncio.gather(*[
                client.completions.create(model="toy", prompt=[2], max_tokens=50, extra_headers={"X-Request-Id": "a"})
                for _ in range(4)])

    assert [answer.usage.completion_tokens for answer in asyncio.run(both())] == [50] * 4


def test_the_openai_client(server: Server, tokenizer: Tokenizer, openai: ModuleType) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    text = tokenizer.decode(counted(40, 25))
    answer = client.completions.create(model="toy", prompt=[40], max_tokens=25, temperature=0, logprobs=2)
    assert answer.choices[0].text == text and len(answer.choices[0].logprobs.tokens) == 25
    stream = client.completions.create(model="toy", prompt=[40], max_tokens=25, stream=True,
                                       stream_options={"include_usage": True})
    parts = list(stream)
    assert "".join(part.choices[0].text for part in parts[:-1]) == text
    assert parts[-1].usage.completion_tokens == 25 and parts[-1].choices == []
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="toy", prompt=[40], max_tokens=100_000)
    assert caught.value.param == "max_tokens" and caught.value.code == "context_length_exceeded"


def test_many_streams_at_once_end_with_their_own_text(
        server: Server, tokenizer: Tokenizer, openai: ModuleType) -> None:
    firsts = [20 + i for i in range(100)]

    async def one(client: openai.AsyncOpenAI, first: int) -> str:
        stream = await client.completions.create(model="toy", prompt=[first], max_tokens=60, stream=True)
        return "".join([part.choices[0].text async for part in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*[one(client, first) for first in firsts])

    assert asyncio.run(everyone()) == [tokenizer.decode(counted(first, 60)) for first in firsts]


def test_events_are_valid_json_whatever_the_text(server: Server, tokenizer: Tokenizer) -> None:
    """The vocabulary holds quotes, backslashes and all control characters."""
    events = server.events("/v1/completions", {"prompt": [2], "max_tokens": 300})
    assert "".join(event["choices"][0]["text"] for event in events) == tokenizer.decode(counted(2, 300))
    assert json.loads(json.dumps(events)) == events
