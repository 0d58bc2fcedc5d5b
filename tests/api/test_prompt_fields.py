"""Fields that say how prompts are encoded and rendered, and what of an output has text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import Server, counted, running
from support.toy_checkpoint import write_checkpoint
from tokenizers import Tokenizer as Inner
from tokenizers.processors import TemplateProcessing

from slotwise.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
            "{{ documents | tojson if documents else '' }}"
            "[{{ reasoning_effort }},{{ enable_thinking }},{{ colour }}]"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer puts <s> before a text, and whose template shows its variables."""
    path = write_checkpoint(tmp_path_factory.mktemp("begun"))
    inner = Inner.from_file(str(path / "tokenizer.json"))
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    return path


@pytest.fixture(scope="module")
def server(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(begun, tmp_path_factory.mktemp("log") / "engine", "trust_request_chat_template=1",
                 "template_seconds=1") as started:
        yield started


@pytest.fixture(scope="module")
def tokenizer(begun: Path) -> Tokenizer:
    return Tokenizer.load(begun)


def ids_of(server: Server, **body: Any) -> list[int]:
    """The token ids of a completion's prompt."""
    response = server.post(COMPLETIONS, {"max_tokens": 1, "return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["prompt_token_ids"])


def prompt_of(server: Server, **body: Any) -> str:
    """What the template wrote."""
    response = server.post(CHAT, {"messages": HELLO, "max_tokens": 1, "return_prompt_text": True, **body})
    assert response.status_code == 200, response.text
    return str(response.json()["prompt_text"])


def refused(server: Server, param: str, body: dict[str, Any]) -> str:
    response = server.post(CHAT if "messages" in body else COMPLETIONS, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    return str(response.json()["error"]["message"])


def test_special_tokens_of_a_prompt(server: Server, tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    for adds, expected in ((None, [0, *plain]), (True, [0, *plain]), (False, plain)):
        assert ids_of(server, prompt="the fox", add_special_tokens=adds) == expected
    assert ids_of(server, prompt=plain, add_special_tokens=True) == plain, "ids are a prompt as they are"


def test_special_tokens_of_a_chat(server: Server, tokenizer: Tokenizer) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
    plain = tokenizer.encode(prompt_of(server), add_special_tokens=False)
    for adds, expected in ((None, plain), (False, plain), (True, [0, *plain])):
        assert server.post(CHAT, body | {"add_special_tokens": adds}).json()["prompt_token_ids"] == expected
        assert server.post("/tokenize", {"messages": HELLO, "add_special_tokens": adds}).json()["tokens"] == expected


@pytest.mark.parametrize(("fields", "kept"), [
    ({"truncate_prompt_tokens": 3}, slice(-3, None)),
    ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
    ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)),
    ({"truncate_prompt_tokens": 512}, slice(None)), ({"truncate_prompt_tokens": -1}, slice(None)),
    ({"truncation_side": "right"}, slice(None))])
def test_a_prompt_is_truncated(server: Server, tokenizer: Tokenizer, fields: dict[str, Any], kept: slice) -> None:
    """The token that the tokenizer adds to a text stays before it."""
    ids = tokenizer.encode("the quick brown fox jumps")
    of_text = [0, *ids[kept][1:]]
    assert ids_of(server, prompt="the quick brown fox jumps", **fields) == of_text
    assert ids_of(server, prompt=ids, **fields) == ids[kept]
    chat = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
    whole = server.post(CHAT, chat).json()["prompt_token_ids"]
    assert server.post(CHAT, chat | fields).json()["prompt_token_ids"] == whole[kept]


def test_a_prompt_beyond_the_context_is_truncated_to_what_fits(server: Server) -> None:
    ids = [2 + i % 200 for i in range(5000)]
    assert ids_of(server, prompt=ids, truncate_prompt_tokens=-1, max_tokens=12) == ids[-500:]
    assert ids_of(server, prompt=ids, truncate_prompt_tokens=-1, max_tokens=None) == ids[-496:]
    assert len(ids_of(server, prompt="the fox " * 9000, truncate_prompt_tokens=100)) == 100
    long = [{"role": "user", "content": "the fox " * 9000}]
    answer = server.post(CHAT, {"messages": long, "truncate_prompt_tokens": -1}).json()
    assert answer["usage"]["prompt_tokens"] == 511 and answer["usage"]["completion_tokens"] == 1
    refused(server, "prompt", {"prompt": ids, "truncate_prompt_tokens": 512})


def test_an_echo_of_a_truncated_prompt_is_what_is_left(server: Server, tokenizer: Tokenizer) -> None:
    body = {"prompt": "the quick brown fox", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 0}
    kept = tokenizer.encode("the quick brown fox")[-1:]  # next to <s>
    assert server.post(COMPLETIONS, body).json()["choices"][0]["text"] == tokenizer.decode(kept)


def test_variables_of_the_template(server: Server) -> None:
    assert prompt_of(server).endswith("[,,]<assistant>")
    assert prompt_of(server, reasoning_effort="high").endswith("[high,True,]<assistant>")
    assert prompt_of(server, reasoning_effort="none").endswith("[none,False,]<assistant>")
    given = {"enable_thinking": "maybe", "colour": "red"}
    assert prompt_of(server, reasoning_effort="low", chat_template_kwargs=given).endswith("[low,maybe,red]<assistant>")
    assert prompt_of(server, add_generation_prompt=False).endswith("[,,]")
    assert '[{"text": "a", "title": 1.0}]' in prompt_of(server, documents=[{"text": "a", "title": 1.0}])
    assert refused(server, "chat_template_kwargs",
                   {"messages": HELLO, "chat_template_kwargs": {"continue_final_message": True}})


@pytest.mark.parametrize("content", ["The answer is ", "", "user", "a", [{"type": "text", "text": "one"},
                                                                       {"type": "text", "text": "two"}]])
def test_the_last_message_is_left_open(server: Server, content: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    text = content if isinstance(content, str) else "one\ntwo"
    for begins in (None, False):
        assert prompt_of(server, messages=messages, continue_final_message=True, add_generation_prompt=begins) == (
            f"<user>hello</user><assistant>{text}")


def test_what_cannot_be_left_open_is_named(server: Server) -> None:
    body = {"messages": HELLO, "continue_final_message": True}
    refused(server, "continue_final_message", body | {"add_generation_prompt": True})
    for content in (None, []):
        refused(server, "continue_final_message", body | {"messages": [{"role": "assistant", "content": content}]})
    message = refused(server, "continue_final_message", body | {"chat_template": "{{ messages[0].content | upper }}"})
    assert "the chat template leaves out the last message" in message
    assert prompt_of(server, chat_template="{{ messages[0].content * 2 }}", continue_final_message=True) == "hellohello"


def test_a_request_brings_its_template(server: Server) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    assert prompt_of(server, chat_template=source) == "hello</s>"
    assert prompt_of(server).startswith("<user>hello</user>"), "the model's own is as before"
    for broken, says in (("{% for %}", "does not compile"), ("{{ messages[9].x.y }}", "failed"),
                         ("{{ raise_exception('not so') }}", "not so"), ("{{ ''.__class__.mro() }}", "failed")):
        assert says in refused(server, "chat_template", {"messages": HELLO, "chat_template": broken})
    refused(server, "chat_template", {"messages": HELLO, "chat_template": "x" * 65_537})


def test_a_template_that_never_ends_delays_no_other_template(server: Server) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert "took more than 1 seconds" in refused(server, "chat_template", {"messages": HELLO, "chat_template": endless})
    assert prompt_of(server, chat_template="<{{ messages[0].content }}>") == "<hello>"


def test_without_trust_a_template_is_refused(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine") as server:
        message = refused(server, "chat_template", {"messages": HELLO, "chat_template": "x"})
        assert "--trust-request-chat-template" in message
        assert server.post(CHAT, {"messages": HELLO, "max_tokens": 1, "chat_template": None}).status_code == 200


def choice_of(server: Server, **body: Any) -> dict[str, Any]:
    """A completion's choice; that of a stream says the same."""
    body = {"prompt": [40], "max_tokens": 60, **body}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    streamed = [event["choices"][0] for event in server.events(COMPLETIONS, body)]
    assert "".join(one["text"] for one in streamed) == choice["text"]
    assert all("stop_reason" not in one for one in streamed[:-1])
    assert [streamed[-1][name] for name in ("finish_reason", "stop_reason")] == [
        choice["finish_reason"], choice["stop_reason"]]
    return choice


def test_a_stop_string_in_the_output(server: Server, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(counted(40, 60))
    stop = [text[20:23], "never"]
    assert choice_of(server, stop=stop)["text"] == text[:20]
    shown = choice_of(server, stop=stop, include_stop_str_in_output=True)
    assert shown["text"] == text[:23] and shown["finish_reason"] == "stop" and shown["stop_reason"] == stop[0]


def test_a_stop_string_at_the_very_end(server: Server, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(counted(40, 10))
    shown = choice_of(server, max_tokens=10, stop=text[-2:], include_stop_str_in_output=True)
    assert shown["text"] == text and shown["stop_reason"] == text[-2:]


def test_reasons_to_stop(server: Server, tokenizer: Tokenizer) -> None:
    assert choice_of(server, max_tokens=5)["stop_reason"] is None
    assert choice_of(server, stop_token_ids=[60])["stop_reason"] == 60
    at_end = choice_of(server, prompt=[298], max_tokens=200, stop_token_ids=[1])
    assert at_end["finish_reason"] == "stop" and at_end["stop_reason"] is None, "the model's own end token"
    assert choice_of(server, prompt=[298], max_tokens=200, stop_token_ids=[1], ignore_eos=True)["stop_reason"] == 1
    body = {"messages": HELLO, "max_tokens": 1}
    assert server.post(CHAT, body).json()["choices"][0]["stop_reason"] is None


def test_stop_tokens_and_special_tokens_in_the_output(server: Server, tokenizer: Tokenizer) -> None:
    before = tokenizer.decode(counted(40, 19))
    for includes, text in ((False, before), (True, tokenizer.decode(counted(40, 20)))):
        assert choice_of(server, stop_token_ids=[60], include_stop_str_in_output=includes)["text"] == text
    for includes, skips, text in ((True, True, ""), (True, False, "<s></s>"), (False, False, "<s>"), (False, True, "")):
        choice = choice_of(server, prompt=[298], max_tokens=200, include_stop_str_in_output=includes,
                           skip_special_tokens=skips)
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == tokenizer.decode([299]) + text


def test_the_larger_interval_of_a_stream_counts(server: Server) -> None:
    body = {"prompt": [40], "max_tokens": 60}
    for tokens, most in ((20, 4), (2**62, 2)):  # a slow reader gets fewer
        assert len(server.events(COMPLETIONS, body | {"stream_interval": tokens})) <= most
