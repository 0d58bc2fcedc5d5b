"""Tool calls, reasoning and grammars together: `slotwise serve` over a checkpoint that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import scripted
from support.live import Live, serving

CITIES = ["Paris", "Rome"]
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "enum": CITIES}}, "required": ["city"],
    "additionalProperties": False}}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
STRICT: dict[str, Any] = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False}}}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = scripted.write(tmp_path_factory.mktemp("scripted"))
    with serving(str(folder), "--served-model-name", "scripted", "--dtype", "float32", "--reasoning-parser", "qwen3",
                 log=tmp_path_factory.mktemp("log") / "stderr") as started:
        yield started


def asked(live: Live, said: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": said}], "tools": [WEATHER, TIME], "temperature": 0,
            "max_tokens": 200, **fields}
    answer = live.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def calls(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    assert choice["finish_reason"] == "tool_calls"
    return [(call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in choice["message"]["tool_calls"]]


def test_the_model_calls_by_itself(live: Live) -> None:
    choice = asked(live, "Rain? #weather")
    assert choice["message"]["content"] == "I look it up." and calls(choice) == [("weather", {"city": "Paris"})]
    assert asked(live, "Rain? #sunny")["message"]["content"] == "It is sunny."


@pytest.mark.parametrize("said", ["Rain? #weather", "Rain? #sunny", "Rain?"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_required_call_cannot_fail(live: Live, said: str, temperature: float) -> None:
    fields = {"tool_choice": "required", "temperature": temperature, "seed": 3, "parallel_tool_calls": False,
              "tools": [WEATHER]}
    ((name, arguments),) = calls(asked(live, said, **fields))
    assert name == "weather" and arguments["city"] in CITIES


def test_the_named_tool_is_called(live: Live) -> None:
    choice = asked(live, "Rain? #sunny", tool_choice={"type": "function", "function": {"name": "weather"}}, n=2)
    ((name, arguments),) = calls(choice)
    assert name == "weather" and arguments["city"] in CITIES


def test_a_required_call_needs_no_text_that_the_response_format_describes(live: Live) -> None:
    """Agents with tools and an output type send both in every turn."""
    choice = asked(live, "Rain? #weather", tool_choice="required", response_format=PERSON, parallel_tool_calls=False)
    ((name, arguments),) = calls(choice)
    assert name == "weather" and arguments["city"] in CITIES and not choice["message"]["content"]


def test_strict_arguments_match_their_schema(live: Live) -> None:
    assert calls(asked(live, "Rain? #wrong")) == [("weather", {"town": 5, "x": []})]
    ((name, arguments),) = calls(asked(live, "Rain? #wrong", tools=[STRICT, TIME], parallel_tool_calls=False))
    assert name == "weather" and arguments["city"] in CITIES
    assert asked(live, "Rain? #sunny", tools=[STRICT, TIME])["message"]["content"] == "It is sunny."
    assert calls(asked(live, "Rain? #weather", tools=[STRICT, TIME])) == [("weather", {"city": "Paris"})]


def test_a_grammar_begins_after_the_reasoning(live: Live) -> None:
    message = asked(live, "Who? #considered", tools=None, response_format=PERSON)["message"]
    assert message["reasoning_content"] == "She was thirty-six, and that is all."
    assert json.loads(message["content"]) == {"name": "Ada", "age": 36}


def test_an_answer_with_a_schema_or_a_call(live: Live) -> None:
    assert json.loads(asked(live, "Who? #json", response_format=PERSON)["message"]["content"]) == {
        "name": "Ada", "age": 36}
    assert calls(asked(live, "Rain? #wrong", response_format=PERSON, tools=[STRICT]))[0][1]["city"] in CITIES
    regex = asked(live, "Where? #path", tools=None, structured_outputs={"regex": "a/b|c/d"})
    assert regex["message"]["content"] == "a/b" and regex["finish_reason"] == "stop"


@pytest.mark.parametrize(("fields", "param"), [
    ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"tool_choice": "required", "response_format": {"type": "json_schema"}}, "response_format"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"type": "string"}}}]}, "tools"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}]}, "tools"),
])
def test_what_no_grammar_describes_is_refused(live: Live, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]} | fields
    answer = live.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_the_openai_client_streams_a_required_call(live: Live, openai: ModuleType) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none")
    with client.chat.completions.stream(
            model="scripted", messages=[{"role": "user", "content": "Rain? #weather"}], tools=[WEATHER],
            tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in CITIES


HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"]
CALL = 'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
CALLING = {"#weather": f"<|channel|>{CALL}<|call|>No answer.<|end|>"}


def test_harmony_by_the_special_tokens_of_the_checkpoint(tmp_path: Path) -> None:
    """A call ends the answer, though the checkpoint does not say so."""
    folder = scripted.write(tmp_path / "model", CALLING, special=HARMONY)
    with serving(str(folder), "--dtype", "float32", "--tool-call-parser", "openai", log=tmp_path / "log") as live:
        for fields in ({}, {"tool_choice": "required"}, {"tools": [STRICT]}):
            choice = asked(live, "Rain? #weather", **fields)
            assert calls(choice) == [("weather", {"city": "Paris"})] and not choice["message"]["content"]
        ((name, arguments),) = calls(asked(live, "Rain?", tool_choice="required", tools=[WEATHER],
                                           reasoning_effort="none"))
        assert name == "weather" and arguments["city"] in CITIES


def test_harmony_of_a_gguf_file_is_told_by_its_template(tmp_path: Path) -> None:
    from support import gguf_files

    folder = scripted.write(tmp_path / "model", CALLING, scripted.TEMPLATE + "{# <|channel|> <|message|> #}", HARMONY)
    file = gguf_files.write(folder, tmp_path / "model.gguf")
    with serving(str(file), "--dtype", "float32", log=tmp_path / "log") as live:
        choice = asked(live, "Rain? #weather")
        assert calls(choice) == [("weather", {"city": "Paris"})] and not choice["message"]["content"]


@pytest.fixture(scope="module")
def untold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model whose template has no tools, takes a system message only at the beginning, and roles that alternate."""
    template = ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
                "{{ raise_exception('system first') }}{% endif %}"
                "{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
                "{{ raise_exception('must alternate') }}{% endif %}<{{ m.role }}>{{ m.content + '' }}{% endfor %}")
    scripts = {"#weather": scripted.SCRIPTS["#weather"], "</tool_response>": "It is sunny.", "#more": "Nothing."}
    folder = scripted.write(tmp_path_factory.mktemp("untold"), scripts, template)
    with serving(str(folder), "--served-model-name", "scripted", "--dtype", "float32",
                 log=tmp_path_factory.mktemp("log") / "stderr") as started:
        yield started


def test_tools_of_a_template_that_has_none_through_openais_client(untold: Live, openai: ModuleType) -> None:
    client = openai.OpenAI(base_url=f"{untold.url}/v1", api_key="none", max_retries=0)
    turns: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Use tools."},
                        {"role": "user", "content": "Hello."}, {"role": "user", "content": "Rain? #weather"}]
    asked: dict[str, Any] = {"model": "scripted", "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    answer = client.chat.completions.create(messages=turns, extra_body={"return_prompt_text": True}, **asked)
    assert answer.prompt_text.startswith("<system>Be brief.\n\nUse tools.\n\n# Tools")
    assert json.dumps(WEATHER) in answer.prompt_text and answer.prompt_text.endswith("<user>Hello.\n\nRain? #weather")
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content == "I look it up."
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    turns += [message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    sunny = client.chat.completions.create(messages=turns, **asked).choices[0]
    assert (sunny.finish_reason, sunny.message.content) == ("stop", "It is sunny.")
    turns += [sunny.message, {"role": "user", "content": "And? #more"}]
    assert client.chat.completions.create(messages=turns, **asked).choices[0].message.content == "Nothing."
    required = client.chat.completions.create(messages=turns, tool_choice="required", **asked).choices[0].message
    assert {call.function.name for call in required.tool_calls} == {"weather"}


def test_tools_of_a_template_that_has_none_through_openais_responses(untold: Live, openai: ModuleType) -> None:
    client = openai.OpenAI(base_url=f"{untold.url}/v1", api_key="none", max_retries=0)
    tool = {"type": "function", **WEATHER["function"], "strict": False}
    asked: dict[str, Any] = {"model": "scripted", "instructions": "Be brief.", "tools": [tool], "temperature": 0,
                             "max_output_tokens": 100}
    turns: list[Any] = [{"role": "developer", "content": "Use tools."}, {"role": "user", "content": "Hello."},
                        {"role": "user", "content": "Rain? #weather"}]
    first = client.responses.create(input=turns, **asked)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    assert client.responses.create(input=[*turns, *first.output, result], **asked).output_text == "It is sunny."
    assert client.responses.create(
        input=[result], previous_response_id=first.id, **asked).output_text == "It is sunny."


def test_tools_of_a_template_that_has_none_through_anthropics_client(untold: Live, anthropic: ModuleType) -> None:
    client = anthropic.Anthropic(base_url=untold.url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "scripted", "system": "Be brief.", "tools": [
        {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}]}
    turns: list[Any] = [{"role": "user", "content": "Hello."}, {"role": "user", "content": "Rain? #weather"}]
    first = client.messages.create(messages=turns, max_tokens=100, extra_body={"temperature": 0}, **asked)
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == (
        "I look it up.", "weather", {"city": "Paris"}, "tool_use")
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]}]
    assert client.messages.create(
        messages=turns, max_tokens=100, extra_body={"temperature": 0}, **asked).content[0].text == "It is sunny."
    turns[-1]["content"].append({"type": "text", "text": "And? #more"})
    late = [*turns, {"role": "assistant", "content": "Well."}, {"role": "system", "content": "Later."},
            {"role": "user", "content": "And? #more"}]
    for more in (turns, late):
        assert client.messages.create(
            messages=more, max_tokens=100, extra_body={"temperature": 0}, **asked).content[0].text == "Nothing."
        assert client.messages.count_tokens(messages=more, **asked).input_tokens > 100
