"""Arguments of tool calls reach a template as objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slotwise.text import normalization
from slotwise.text.chat_template import ChatTemplate, ChatTemplateError
from slotwise.text.normalization import with_parsed_arguments

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}")
ARGUMENTS = {"city": "Zürich", "days": [1, {"n": 2.5}], "metric": True, "none": None}


def asking(arguments: Any, role: str = "assistant") -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": role, "content": None, "tool_calls": [call]}


def parsed(arguments: Any) -> Any:
    return with_parsed_arguments(asking(arguments))["tool_calls"][0]["function"]["arguments"]


def rendered(messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(TEMPLATE, {}).render(messages)


def test_a_text_is_encoded_once_as_transformers_does_with_objects(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    history = [{"role": "user", "content": "weather?"}, asking(ARGUMENTS), {"role": "tool", "content": "sun"}]
    expected = theirs.apply_chat_template(history, chat_template=TEMPLATE, tokenize=False)
    assert rendered([history[0], asking(json.dumps(ARGUMENTS)), history[2]]) == expected == rendered(history)


def test_the_message_of_the_caller_stays_as_it_is() -> None:
    message = asking('{"a": 1}')
    before = json.dumps(message)
    assert rendered([message]) == '<assistant>[weather {"a": 1}]'
    assert json.dumps(message) == before


@pytest.mark.parametrize("empty", [None, "", "{}"])
def test_no_arguments_are_an_empty_object(empty: str | None) -> None:
    assert parsed(empty) == {}


@pytest.mark.parametrize("text", [
    "{", "city: Zürich", "[1]", "5", '"x"', "null", "true", '{"a": NaN}', '{"a": Infinity}', "{'a': 1}",
    '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_json_object_stays_a_text(text: str) -> None:
    assert parsed(text) == text


def test_an_object_stays_an_object() -> None:
    assert parsed(ARGUMENTS) == ARGUMENTS and parsed([1]) == [1]


@pytest.mark.parametrize("role", ["user", "tool", "system"])
def test_other_roles_are_left_alone(role: str) -> None:
    message = asking('{"a": 1}', role)
    assert with_parsed_arguments(message) == message


def test_an_empty_list_of_calls_is_left_out() -> None:
    assert with_parsed_arguments({"role": "assistant", "content": "a", "tool_calls": []}) == {
        "role": "assistant", "content": "a"}


@pytest.mark.parametrize("calls", [None, 5, "x", {"function": 1}, [None], [5], [{}], [{"function": "f"}], [[]]])
def test_what_has_not_the_shape_of_a_call_is_left_alone(calls: Any) -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    assert with_parsed_arguments(message) == message


@pytest.mark.parametrize(("text", "told"), [
    ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 levels deep"),
    ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than 64 levels deep"),
    ('{"a": "' + "x" * normalization.MAX_ARGUMENTS + '"}', "characters, more than 1048576")])
def test_what_is_too_large_is_refused(text: str, told: str) -> None:
    with pytest.raises(ChatTemplateError, match=told):
        rendered([asking(text)])


def test_the_bounds_themselves_are_allowed() -> None:
    deep = '{"a":' * 64 + "1" + "}" * 64
    assert json.dumps(parsed(deep)).replace(" ", "") == deep
    long = '{"a": "' + "x" * (normalization.MAX_ARGUMENTS - 9) + '"}'
    assert len(long) == normalization.MAX_ARGUMENTS and len(parsed(long)["a"]) == normalization.MAX_ARGUMENTS - 9
