"""Log-probabilities of prompts in vLLM's shape, in completions and chats."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from support.live_server import Server, eventually, running, unanswered

from slotwise.api.generate.logprobs import PromptFormat, held
from slotwise.api.http.api_errors import ApiError
from slotwise.core.record import TokenLogprobs
from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.text.tokenizer import Tokenizer

PROMPT = list(range(40, 80))


async def as_json(tokenizer: Tokenizer, prompt: list[int], entries: list[TokenLogprobs]) -> object:
    return json.loads(b"".join(await PromptFormat(tokenizer, asyncio.Lock()).parts(prompt, entries)))


def test_entries_of_a_prompt_are_vllms(tokenizer: Tokenizer) -> None:
    entries = [TokenLogprobs(-1.5, 7, (5, 6), (-0.25, -0.5)), TokenLogprobs(-0.25, 1, (9, 6), (-0.25, -0.5)),
               TokenLogprobs(float("nan"), 0, (), ())]
    found = asyncio.run(as_json(tokenizer, [4, 8, 9, 3], entries))
    text = tokenizer.token_text
    assert found == [
        None,
        {"8": {"logprob": -1.5, "rank": 7, "decoded_token": text(8)},
         "5": {"logprob": -0.25, "rank": 1, "decoded_token": text(5)},
         "6": {"logprob": -0.5, "rank": 2, "decoded_token": text(6)}},
        {"9": {"logprob": -0.25, "rank": 1, "decoded_token": text(9)},
         "6": {"logprob": -0.5, "rank": 2, "decoded_token": text(6)}},
        {"3": {"logprob": -9999.0, "rank": 0, "decoded_token": text(3)}},
    ]


@pytest.mark.parametrize("known", [0, 1, 700, 2000])
def test_a_prompt_has_an_entry_for_each_token_even_where_it_was_not_computed(tokenizer: Tokenizer, known: int) -> None:
    prompt = [2 + i % 290 for i in range(2001)]
    found = asyncio.run(as_json(tokenizer, prompt, [TokenLogprobs(-1.0, 1, (), ())] * known))
    assert [entry is not None for entry in found] == [False, *[True] * known, *[False] * (2000 - known)]
    assert asyncio.run(as_json(tokenizer, [7], [])) == [None]


def check(found: list[dict[str, dict[str, object]] | None], prompt: list[int], num_top: int) -> None:
    """As the toy engine has it: the token at position p is the most probable one, with -p / 100."""
    assert found[0] is None and len(found) == len(prompt)
    for position, entry in enumerate(found[1:], 1):
        ids = [str((prompt[position] + i) % 400) for i in range(max(1, num_top))]
        assert list(entry) == ids
        assert entry[ids[0]]["logprob"] == -position / 100 and entry[ids[0]]["rank"] == 1
        assert all(set(one) == {"logprob", "rank", "decoded_token"} for one in entry.values())


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_completions_have_them_in_each_choice(server: Server, num_top: int) -> None:
    body = {"prompt": [PROMPT, [5], PROMPT[:9]], "n": 2, "max_tokens": 2, "prompt_logprobs": num_top, "logprobs": 1}
    choices = server.post("/v1/completions", body).json()["choices"]
    for choice, prompt in zip(choices, [PROMPT, PROMPT, [5], [5], PROMPT[:9], PROMPT[:9]], strict=True):
        check(choice["prompt_logprobs"], prompt, num_top)
        assert len(choice["logprobs"]["tokens"]) == 2 and choice["finish_reason"] == "length"


def test_a_prompt_longer_than_a_step(server: Server) -> None:
    prompt = [2 + i % 300 for i in range(500)]
    asked = [server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 2})
             for _ in range(2)]  # the second finds the blocks of the first, and does not use them
    for response in asked:
        check(response.json()["choices"][0]["prompt_logprobs"], prompt, 2)
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_chats_have_them_in_the_response(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 2, "n": 2}
    plain = server.post("/v1/chat/completions", body).json()
    assert "prompt_logprobs" not in plain
    answer = server.post("/v1/chat/completions", body | {"prompt_logprobs": 1}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None and None not in answer["prompt_logprobs"][1:]
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


def test_what_is_not_requested_is_not_there(server: Server) -> None:
    for asked in ({}, {"prompt_logprobs": None}):
        [choice] = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1} | asked).json()["choices"]
        assert "prompt_logprobs" not in choice


@pytest.mark.parametrize(("fields", "message"), [
    ({"prompt_logprobs": 21}, "<= 20"), ({"prompt_logprobs": -1}, ">= 0"), ({"prompt_logprobs": True}, "int"),
    ({"prompt_logprobs": 1, "stream": True}, "not available when stream is true"),
    ({"prompt_logprobs": 20, "n": 128, "prompt": [[2] * 400] * 2}, "more than 2000000"),
])
def test_refusals(server: Server, fields: dict[str, object], message: str) -> None:
    response = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1} | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"
    assert message in response.json()["error"]["message"]


def test_a_client_that_reads_nothing_of_a_large_response_is_disconnected(
        server: Server, folder: Path, tmp_path: Path) -> None:
    body = {"prompt": [PROMPT] * 60, "n": 8, "max_tokens": 1, "prompt_logprobs": 20}
    quarter = server.post("/v1/completions", body | {"n": 2})  # of a server that waits for slow readers
    assert 4 * len(quarter.content) > 12 << 20, "more than sockets hold"
    with running(folder, tmp_path / "engine", "unread_timeout=0.3", "max_choices=512") as server:

        def num_files() -> int:
            return len(os.listdir(f"/proc/{server.process.pid}/fd"))

        eventually(lambda: server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}).status_code == 200)
        before = num_files()
        with unanswered(server, "/v1/completions", body):
            eventually(lambda: num_files() > before)
            eventually(lambda: num_files() == before)
        assert server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}).status_code == 200


def test_entries_held_for_all_responses_are_bounded() -> None:
    capacity = TenantCapacity("log-probabilities of prompts are held", 1000)
    with held(capacity, "a", 900):
        with pytest.raises(ApiError, match="900 log-probabilities") as refused, held(capacity, "a", 200):
            pass
        assert refused.value.status == 503 and refused.value.code == "logprobs_full"
        with held(capacity, "b", 100):
            assert capacity.total == 1000
    assert capacity.total == 0
    with held(capacity, "a", 0):
        assert capacity.total == 0
