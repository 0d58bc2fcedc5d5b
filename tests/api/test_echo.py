"""Prompts in responses: echoed texts and log-probabilities, token ids, and requests for nothing but the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.live_server import Server, counted, running

from slotwise.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [40, 50, 60]


def completion(server: Server, **body: Any) -> dict[str, Any]:
    response = server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: Server, path: str, param: str, body: dict[str, Any]) -> str:
    response = server.post(path, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    return str(response.json()["error"]["message"])


def test_a_text_stands_before_its_continuation(server: Server, tokenizer: Tokenizer) -> None:
    for prompt in ("the fox", "a\ufffdé"):
        output = completion(server, prompt=prompt)["choices"][0]["text"]
        echoed = completion(server, prompt=prompt, echo=True)
        assert echoed["choices"][0]["text"] == prompt + output and echoed["usage"]["completion_tokens"] == 4
    ids = tokenizer.encode("over the lazy dog " * 400)[:400]
    [choice] = completion(server, prompt=ids, echo=True)["choices"]
    assert choice["text"] == tokenizer.decode(ids + counted(ids[-1], 4))


def test_several_prompts_and_choices_have_their_own(server: Server, tokenizer: Tokenizer) -> None:
    body = {"prompt": [[10], [40, 50]], "n": 2, "echo": True, "max_tokens": 3}
    texts = [choice["text"] for choice in completion(server, **body)["choices"]]
    assert texts == [tokenizer.decode(ids + counted(ids[-1], 3)) for ids in ([10], [10], [40, 50], [40, 50])]
    streamed = [""] * 4
    for event in server.events(COMPLETIONS, body):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts


def test_special_tokens_of_an_echoed_prompt_are_hidden_as_in_the_output(server: Server, tokenizer: Tokenizer) -> None:
    ids = [0, 40, 1, 50]
    for hides in (True, False):
        [choice] = completion(server, prompt=ids, echo=True, max_tokens=2, skip_special_tokens=hides)["choices"]
        assert choice["text"] == tokenizer.decode([*ids, 51, 52], skip_special_tokens=hides)


@pytest.mark.parametrize("num_top", [0, 2])
def test_log_probabilities_of_the_prompt_come_first(server: Server, tokenizer: Tokenizer, num_top: int) -> None:
    """As the toy engine has it: the token at position p of a prompt has -p / 100."""
    body = {"prompt": [PROMPT, [7]], "n": 2, "logprobs": num_top, "max_tokens": 2}
    plain = completion(server, **body)["choices"]
    for without, choice, prompt in zip(plain, completion(server, **body, echo=True)["choices"],
                                       [PROMPT, PROMPT, [7], [7]], strict=True):
        logprobs, tokens = choice["logprobs"], [*prompt, *counted(prompt[-1], 2)]
        texts = [tokenizer.token_text(token) for token in tokens]
        assert logprobs["tokens"] == texts
        assert logprobs["text_offset"] == [len("".join(texts[:at])) for at in range(len(texts))]
        assert logprobs["token_logprobs"] == [None, *[-p / 100 for p in range(1, len(prompt))], -0.25, -0.25]
        assert logprobs["top_logprobs"][0] is None
        assert all(len(top) >= max(1, num_top) for top in logprobs["top_logprobs"][1:])
        assert logprobs["top_logprobs"][len(prompt) :] == without["logprobs"]["top_logprobs"]
        assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("prompt", "split"), [("你好吗", 2), ("the 🙂 fox", 5), ("é<s>the</s>", 4), ("a b", 1)])
def test_offsets_are_characters_of_the_text(server: Server, tokenizer: Tokenizer, prompt: str, split: int,
                                            named: bool) -> None:
    """Evaluations split a text by them: what stands before `split` is the context, the rest is rated."""
    [choice] = completion(server, prompt=prompt, echo=True, logprobs=1, max_tokens=2, return_tokens_as_token_ids=named)[
        "choices"]
    ids, text, offsets = tokenizer.encode(prompt), choice["text"], choice["logprobs"]["text_offset"]
    assert text.startswith(prompt) and len(offsets) == len(ids) + 2
    before = [tokenizer.decode(ids[:at], skip_special_tokens=False).rstrip("\ufffd") for at in range(len(ids))]
    assert offsets[: len(ids)] == list(map(len, before)) and offsets[len(ids)] == len(prompt)
    rated = [token for token, at in zip(ids, offsets, strict=False) if at >= split]
    assert tokenizer.decode(rated, skip_special_tokens=False) == prompt[split:]


def test_hidden_tokens_take_no_place_in_the_text(server: Server, tokenizer: Tokenizer) -> None:
    ids = [0, 40, 1, 50]
    for hides in (True, False):
        body = {"prompt": ids, "max_tokens": 2, "skip_special_tokens": hides, "logprobs": 1}
        [choice] = completion(server, echo=True, **body)["choices"]
        kept = [tokenizer.decode([*ids, 51][:at], skip_special_tokens=hides) for at in range(6)]
        assert choice["logprobs"]["text_offset"] == list(map(len, kept))
        [without] = completion(server, **body)["choices"]
        assert without["logprobs"]["text_offset"] == [0, 1]
        events = server.events(COMPLETIONS, body)
        assert [at for event in events for at in event["choices"][0]["logprobs"]["text_offset"]] == [0, 1]
    [cut] = completion(server, prompt="the quick brown", truncate_prompt_tokens=3, echo=True, logprobs=0, max_tokens=1)[
        "choices"]
    assert cut["logprobs"]["text_offset"][-1] == len(cut["text"]) - len(tokenizer.decode([
        tokenizer.encode("the quick brown")[-1] + 1]))


def test_both_kinds_of_prompt_log_probabilities_at_once(server: Server) -> None:
    [choice] = completion(server, echo=True, logprobs=1, prompt_logprobs=1)["choices"]
    assert len(choice["prompt_logprobs"]) == 3 and len(choice["logprobs"]["tokens"]) == 7
    refused(server, COMPLETIONS, "prompt_logprobs",
            {"prompt": PROMPT, "echo": True, "logprobs": 1, "prompt_logprobs": 2})


def test_a_stream_echoes_texts_but_no_log_probabilities(server: Server, tokenizer: Tokenizer) -> None:
    events = server.events(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "echo": True})
    assert events[0]["choices"][0]["text"].startswith(tokenizer.decode(PROMPT))
    assert "".join(event["choices"][0]["text"] for event in events) == tokenizer.decode([*PROMPT, *counted(60, 4)])
    refused(server, COMPLETIONS, "echo", {"prompt": PROMPT, "echo": True, "logprobs": 0, "stream": True})


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_but_the_prompt(server: Server, tokenizer: Tokenizer, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
    if stream:
        *events, usage = server.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        [choice] = [event["choices"][0] for event in events]
    else:
        usage = completion(server, **body)
        [choice] = usage["choices"]
    assert choice["text"] == tokenizer.decode(PROMPT) and choice["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 0 and usage["usage"]["total_tokens"] == 3


def test_nothing_but_log_probabilities_of_the_prompt(server: Server, tokenizer: Tokenizer) -> None:
    [choice] = completion(server, max_tokens=0, echo=True, logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"] == [tokenizer.token_text(token) for token in PROMPT]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.01, -0.02]
    [choice] = completion(server, prompt=[*PROMPT, 1], max_tokens=0, prompt_logprobs=0, n=1)["choices"]
    assert choice["text"] == "" and len(choice["prompt_logprobs"]) == 4
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1}
    for name in ("max_tokens", "max_completion_tokens"):
        answer = server.post(CHAT, body | {name: 0}).json()
        assert answer["choices"][0]["message"]["content"] == "" and answer["usage"]["completion_tokens"] == 0
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert "echo or prompt_logprobs" in refused(server, CHAT, name, {"messages": body["messages"], name: 0})
    refused(server, COMPLETIONS, "max_tokens", {"prompt": PROMPT, "max_tokens": 0, "logprobs": 1})
    refused(server, COMPLETIONS, "min_tokens", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "min_tokens": 1})


def test_a_prompt_that_fills_the_context_leaves_room_for_nothing(server: Server) -> None:
    assert completion(server, prompt=[5] * 511, max_tokens=0, echo=True)["usage"]["total_tokens"] == 511
    refused(server, COMPLETIONS, "prompt", {"prompt": [5] * 512, "max_tokens": 0, "echo": True})


def test_an_echo_of_a_chat_is_the_assistants_last_message(server: Server) -> None:
    user, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "the fox"}
    body = {"messages": [user, said], "max_tokens": 3}
    plain = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    for echo, messages, before in ((True, [user, said], "the fox"), (False, [user, said], ""), (True, [user], "")):
        answer = server.post(CHAT, body | {"messages": messages, "echo": echo}).json()["choices"][0]["message"]
        assert answer["content"].startswith(before) and (messages == [user] or answer["content"] == before + plain)
    first, *rest = server.events(CHAT, body | {"echo": True})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in rest) == "the fox" + plain


def test_token_ids_of_completions(server: Server) -> None:
    body = {"prompt": [PROMPT, [7]], "n": 2, "max_tokens": 3, "return_token_ids": True}
    for choice, prompt in zip(completion(server, **body)["choices"], [PROMPT, PROMPT, [7], [7]], strict=True):
        assert choice["prompt_token_ids"] == prompt and choice["token_ids"] == counted(prompt[-1], 3)
    events = server.events(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 9, "return_token_ids": True})
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == PROMPT and all("prompt_token_ids" not in one for one in choices[1:])
    assert [token for choice in choices for token in choice["token_ids"]] == counted(60, 9)
    assert "token_ids" not in completion(server)["choices"][0]


def test_token_ids_and_text_of_a_chat(server: Server, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "return_token_ids": True,
            "return_prompt_text": True}
    text, answer = "<user>hello<assistant>", server.post(CHAT, body).json()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert answer["prompt_text"] == text and answer["prompt_token_ids"] == ids
    assert answer["choices"][0]["token_ids"] == counted(ids[-1], 3)
    first, *rest = server.events(CHAT, body)
    assert first["prompt_text"] == text and first["prompt_token_ids"] == ids
    assert all("prompt_text" not in event for event in rest)
    assert [token for event in rest for token in event["choices"][0]["token_ids"]] == counted(ids[-1], 3)


def test_tokens_may_be_named_by_their_ids(server: Server) -> None:
    [choice] = completion(server, logprobs=1, echo=True, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in [*PROMPT, *counted(60, 4)]]
    assert choice["logprobs"]["top_logprobs"][-1] == {"token_id:64": -0.25}
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    named = server.post(CHAT, body | {"return_tokens_as_token_ids": True}).json()["choices"][0]
    [entry] = named["logprobs"]["content"]
    assert entry["token"] == entry["top_logprobs"][0]["token"] and entry["token"].startswith("token_id:")
    assert bytes(entry["bytes"]).decode() == entry["token"]


def test_what_a_response_repeats_is_bounded(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "max_model_len=4096") as server:
        body = {"prompt": ["the quick brown fox " * 400] * 8, "n": 128, "max_tokens": 1}
        assert "8192000 characters" in refused(server, COMPLETIONS, "echo", body | {"echo": True})
        ids = {"prompt": [[5] * 3000] * 8, "n": 128, "max_tokens": 1, "return_token_ids": True}
        assert "3072000 ids" in refused(server, COMPLETIONS, "return_token_ids", ids)
        assert len(completion(server, **ids | {"n": 2})["choices"]) == 16
