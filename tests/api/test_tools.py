"""Tool calls and reasoning through a live server, whose engine says what stands in the prompt: see `engine_process`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.live_server import Server, running
from tokenizers import AddedToken
from tokenizers import Tokenizer as Inner

from slotwise.api.parsers.parser_table import output_format

HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"]
TEMPLATE = ("<copy>{{ messages[-1].content }}<copy>{% for m in messages[:-1] %}{{ m | tojson }}{% endfor %}"
            "{% if tools %}{{ tools | tojson }}{% endif %}"
            "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
TIME = {"type": "function", "function": {"name": "time"}}
PATH = "/v1/chat/completions"
ARGUMENTS = '{"city": "Zürich \\u00e9\\ud83d\\ude00"}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>\nWhere?\n</think>\n\n"


@pytest.fixture(scope="module")
def copying(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens of harmony and Mistral, and a template that makes the engine copy."""
    path = tmp_path_factory.mktemp("copying")
    inner = Inner.from_file(str(folder / "tokenizer.json"))
    tokens = ["<copy>", *HARMONY, "[TOOL_CALLS]", "[ARGS]"]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    assert inner.token_to_id("<copy>") == 300
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    return path


@pytest.fixture(scope="module")
def hermes(copying: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(copying, tmp_path_factory.mktemp("log") / "engine", "tool_call_parser=hermes", "max_model_len=2048",
                 "reasoning_parser=qwen3") as started:
        yield started


@pytest.fixture(scope="module")
def harmony(copying: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(copying, tmp_path_factory.mktemp("log") / "engine", "tool_call_parser=openai", "max_model_len=1024",
                 "reasoning_parser=openai") as started:
        yield started


@pytest.fixture(scope="module")
def mistral(copying: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(copying, tmp_path_factory.mktemp("log") / "engine", "tool_call_parser=mistral",
                 "reasoning_parser=none", "max_model_len=1024") as started:
        yield started


def body(said: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}], "tools": [WEATHER, TIME], **fields}


def whole(server: Server, said: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, body(said, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(server: Server, said: str, **fields: Any) -> dict[str, Any]:
    """A choice as the deltas of a stream add up."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    reason = None
    for event in server.events(PATH, body(said, **fields)):
        choice = event["choices"][0]
        assert reason is None
        reason = choice["finish_reason"]
        for name in ("content", "reasoning_content", "reasoning"):
            message[name] += choice["delta"].get(name, "")
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function" and call["id"] and call["function"]["name"]
                message["tool_calls"].append({"id": call["id"], "type": "function", "function": {
                    "name": call["function"]["name"], "arguments": ""}})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            added = call["function"]["arguments"]
            assert not added.endswith("\\") and "\\u" not in added[-5:].replace("\\ude00", "")
            message["tool_calls"][call["index"]]["function"]["arguments"] += added
    return {"message": message, "finish_reason": reason}


def said_of(choice: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]], str]:
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert message.get("reasoning") == message.get("reasoning_content")
    return message.get("reasoning") or "", message["content"] or "", calls, choice["finish_reason"]


CASES: list[tuple[str, str, tuple[str, str, list[tuple[str, str]], str]]] = [
    ("hermes", "I look.\n" + HERMES, ("", "I look.", [("weather", ARGUMENTS)], "tool_calls")),
    ("hermes", THOUGHT + HERMES + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>',
     ("Where?", "", [("weather", ARGUMENTS), ("time", "{}")], "tool_calls")),
    ("hermes", THOUGHT + "Here.\n", ("Where?", "Here.\n", [], "stop")),
    ("hermes", '<tool_call>{"name": "time", oh</tool_call>', (
        "", '<tool_call>{"name": "time", oh</tool_call>', [], "stop")),
    ("harmony", "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary "
     f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}", (
         "Where?", "", [("weather", ARGUMENTS)], "tool_calls")),
    ("harmony", "<|channel|>final<|message|>Hi", ("", "Hi", [], "stop")),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}", (
        "", "", [("weather", ARGUMENTS), ("time", "{}")], "tool_calls")),
    ("mistral", "Well[TOOL_CALLS] no", ("", "Well[TOOL_CALLS] no", [], "stop")),
]


@pytest.mark.parametrize(("name", "said", "expected"), CASES)
def test_an_answer_whole_and_streamed(
    request: pytest.FixtureRequest, name: str, said: str, expected: tuple[str, str, list[tuple[str, str]], str],
) -> None:
    server = request.getfixturevalue(name)
    assert said_of(whole(server, said)) == expected
    assert said_of(streamed(server, said)) == expected
    assert said_of(streamed(server, said, stream_interval=5)) == expected


def test_arguments_come_in_many_events(hermes: Server) -> None:
    events = [event["choices"][0]["delta"] for event in hermes.events(PATH, body(HERMES))]
    grown = [call["function"]["arguments"] for delta in events for call in delta.get("tool_calls", ())]
    assert len(grown) > 5 and "".join(grown) == ARGUMENTS
    ids = {call["id"] for delta in events for call in delta.get("tool_calls", ()) if "id" in call}
    assert len(ids) == 1


def test_without_tools_a_call_is_text_and_reasoning_still_stands_apart(hermes: Server, mistral: Server) -> None:
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        assert said_of(whole(hermes, THOUGHT + HERMES, **fields)) == ("Where?", HERMES, [], "stop")
        assert said_of(whole(mistral, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", **fields)) == (
            "", f"weather{ARGUMENTS}", [], "stop")  # special tokens have no text
    prompts = [whole_prompt(hermes, tool_choice=choice) for choice in ("none", "auto")]
    assert WEATHER["function"]["name"] not in prompts[0] and json.dumps([WEATHER, TIME]) in prompts[1]


def whole_prompt(server: Server, **fields: Any) -> str:
    return str(server.post(PATH, body("x", return_prompt_text=True, **fields)).json()["prompt_text"])


def test_a_stream_has_no_empty_content_around_calls(hermes: Server) -> None:
    deltas = [event["choices"][0]["delta"] for event in hermes.events(PATH, body(THOUGHT + HERMES))]
    assert deltas[0] == {"role": "assistant"} and deltas[-1] == {}
    assert any("tool_calls" in delta for delta in deltas)
    assert all(delta["content"] for delta in deltas if "content" in delta)


@pytest.mark.parametrize("stop", ["<|start|>", "<|start|>user"])
def test_a_special_token_stops_completions_and_streams(hermes: Server, stop: str) -> None:
    fields = {"prompt": "<copy>Hello.<|start|>user<copy>", "max_tokens": 50, "stop": [stop]}
    choice = hermes.post("/v1/completions", fields).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hello.", "stop", stop)
    events = [event["choices"][0] for event in hermes.events("/v1/completions", fields)]
    assert "".join(event["text"] for event in events) == "Hello." and events[-1]["stop_reason"] == stop


def test_reasoning_can_be_left_out(hermes: Server) -> None:
    for read in (whole, streamed):
        assert said_of(read(hermes, THOUGHT + "Here.", include_reasoning=False)) == ("", "Here.", [], "stop")


def test_a_template_may_end_the_reasoning(hermes: Server) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    assert whole_prompt(hermes, **fields).endswith("<think></think>")
    assert said_of(whole(hermes, "Here.", **fields)) == ("", "Here.", [], "stop")


def test_one_call_where_calls_are_not_parallel(hermes: Server) -> None:
    said = HERMES + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    for read in (whole, streamed):
        assert said_of(read(hermes, said, parallel_tool_calls=False))[2:] == ([("weather", ARGUMENTS)], "tool_calls")


def test_an_answer_that_is_cut_keeps_its_reason(hermes: Server) -> None:
    for read in (whole, streamed):
        *_, calls, reason = said_of(read(hermes, HERMES, max_tokens=60))
        assert reason == "length" and calls[0][0] == "weather" and ARGUMENTS.startswith(calls[0][1])


def test_several_choices_are_parsed_each(hermes: Server) -> None:
    answer = hermes.post(PATH, body(HERMES, n=3)).json()
    assert [said_of(choice)[2] for choice in answer["choices"]] == [[("weather", ARGUMENTS)]] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}) == 3


def test_what_a_parser_does_not_change(hermes: Server) -> None:
    choice = whole(hermes, THOUGHT + "Here.", logprobs=True, return_token_ids=True)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert bytes([byte for entry in choice["logprobs"]["content"][:-1] for byte in entry["bytes"]]).decode() == (
        THOUGHT + "Here.")
    assert said_of(whole(hermes, THOUGHT + "Here. Gone.", stop=[" Gone"])) == ("Where?", "Here.", [], "stop")


def test_earlier_turns_go_to_the_template_as_they_are(hermes: Server) -> None:
    turns = [{"role": "user", "content": "?"},
             {"role": "assistant", "content": None, "tool_calls": [
                 {"id": "a", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}]},
             {"role": "tool", "tool_call_id": "a", "content": "sunny"}]
    assert said_of(whole(hermes, "", messages=turns)) == ("", "sunny", [], "stop")


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": [5]}, "tools"), ({"tools": [{}]}, "tools"), ({"tools": [{"type": "custom", "custom": {}}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools"),
    ({"tools": [TIME, TIME]}, "tools"), ({"tools": [{"type": "function", "function": {"name": "f\n"}}]}, "tools"),
    ({"tool_choice": "must"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"), ({"include_reasoning": "no"}, "include_reasoning"),
])
def test_what_is_not_valid_is_refused_by_name(hermes: Server, fields: dict[str, Any], param: str) -> None:
    answer = hermes.post(PATH, body("x", **fields))
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param), answer.text


def test_tools_need_a_parser(server: Server) -> None:
    answer = server.post(PATH, body("x"))
    assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]


def test_the_openai_client(hermes: Server, openai: ModuleType) -> None:
    client = openai.OpenAI(base_url=hermes.url + "/v1", api_key="none")
    asked = {"model": "toy", "messages": [{"role": "user", "content": THOUGHT + "Ok.\n" + HERMES}], "tools": [WEATHER]}
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content == "Ok." and message.reasoning_content == "Where?"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Zürich é😀"}
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == ARGUMENTS


def test_how_a_format_is_chosen() -> None:
    special = {token: number for number, token in enumerate(HARMONY)}
    template = "<|channel|>analysis<|message|>"
    form = output_format("", "", None, template, special)
    assert (form.tools, form.reasoning) == ("openai", "openai")
    form = output_format("", "", None, '<tool_call>{"name", "arguments"}', {})
    assert (form.tools, form.reasoning) == ("hermes", "")
    assert output_format("", "deepseek_r1", False, '<tool_call>{"name", "arguments"}', {}).tools == ""
    assert output_format("qwen3_coder", "openai_gptoss", None, "", special).tools == "qwen3_xml"
    with pytest.raises(ValueError, match="--tool-call-parser"):
        output_format("", "", True, "plain", {})
    with pytest.raises(ValueError, match="special tokens"):
        output_format("openai", "", None, "", {})


THINKER = ("{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}<{{ enable_thinking }}|"
           "{{ reasoning_effort | default('medium') }}|{{ thinking_budget | default(-1) }}|"
           "{% if thinking_mode == 'enabled' %}E{% elif thinking_mode == 'disabled' %}D{% endif %}>"
           "{{ messages[-1].content }}{% if add_generation_prompt %}<seed:think>{% endif %}{# </seed:think> #}")


def test_a_server_says_what_its_template_reads_and_passes_it_on(copying: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((copying / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(THINKER)
    with running(tmp_path, tmp_path / "engine") as server:
        (card,) = server.client.get(f"{server.url}/v1/models").json()["data"]
        assert (card["tool_call_parser"], card["reasoning_parser"]) == (None, "seed_oss")
        assert card["chat_template_kwargs"] == {
            "enable_thinking": {"type": "boolean", "default": True},
            "thinking_budget": {"type": "number", "default": -1},
            "reasoning_effort": {"type": "string", "default": "medium"},
            "thinking_mode": {"type": "string", "values": ["enabled", "disabled"]}}
        for given, written in (
                ({}, "<True|medium|-1|>"), ({"reasoning_effort": "high"}, "<True|high|-1|E>"),
                ({"reasoning_effort": "none"}, "<False|none|-1|D>"),
                ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "<False|low|-1|E>"),
                ({"chat_template_kwargs": {"thinking_budget": 512, "colour": "red"}}, "<True|medium|512|>")):
            asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "return_prompt_text": True}
            answer = server.post(PATH, asked | given)
            assert answer.json()["prompt_text"] == f"{written}hello<seed:think>", answer.text
            assert ("colour" in answer.headers.get("x-slotwise-warning", "")) == ("colour" in str(given))
            assert not answer.json()["choices"][0]["message"]["content"]  # all of it is reasoning


def test_anthropics_client_gets_thinking_text_and_calls(hermes: Server, anthropic: ModuleType) -> None:
    client = anthropic.Anthropic(base_url=hermes.url, api_key="x", max_retries=0)
    tools = [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]},
             {"name": "time", "input_schema": {"type": "object"}}]
    said = THOUGHT + "I look.\n" + HERMES + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    asked = {"model": "toy", "max_tokens": 400, "tools": tools, "messages": [{"role": "user", "content": said}]}
    whole_message = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed_message = stream.get_final_message()
    for message in (whole_message, streamed_message):
        thinking, text, weather, time = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "Where?")
        assert (text.type, text.text) == ("text", "I look.")
        assert (weather.type, weather.name, weather.input) == ("tool_use", "weather", {"city": "Zürich é😀"})
        assert (time.type, time.name, time.input) == ("tool_use", "time", {}) and weather.id != time.id
        assert message.stop_reason == "tool_use"
    one = client.messages.create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"] and one.stop_reason == "tool_use"
    hidden = client.messages.create(**asked, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["text", "tool_use", "tool_use"]
    turns = [*asked["messages"], {"role": "assistant", "content": whole_message.content},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": whole_message.content[2].id,
                                           "content": "sunny"}]}]
    assert client.messages.create(**asked | {"messages": turns}).content[0].text == "sunny"


def test_openais_responses_have_reasoning_text_and_calls(hermes: Server, openai: ModuleType) -> None:
    client = openai.OpenAI(base_url=hermes.url + "/v1", api_key="x", max_retries=0)
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in (WEATHER, TIME)]
    said = THOUGHT + "I look.\n" + HERMES + '\n<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    asked = {"model": "toy", "input": said, "tools": tools}
    whole_response = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed_response = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds and "response.function_call_arguments.done" in kinds
    for response in (whole_response, streamed_response):
        reasoning, message, weather, time = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Where?")
        assert (message.type, response.output_text) == ("message", "I look.")
        assert (weather.type, weather.name, json.loads(weather.arguments)) == (
            "function_call", "weather", {"city": "Zürich é😀"})
        assert (time.name, time.arguments) == ("time", "{}") and weather.call_id != time.call_id
        assert response.status == "completed"
        tokens = hermes.post("/tokenize", {"prompt": "<think>\nWhere?", "add_special_tokens": False}).json()["count"]
        assert response.usage.output_tokens_details.reasoning_tokens == tokens
        assert response.usage.output_tokens > tokens
    output = {"type": "function_call_output", "call_id": whole_response.output[2].call_id, "output": "sunny"}
    answer = client.responses.create(model="toy", input=[output], previous_response_id=whole_response.id, tools=tools)
    assert answer.output_text == "sunny"
    again = [{"role": "user", "content": said}, *[item.to_dict() for item in whole_response.output], output]
    assert client.responses.create(model="toy", input=again, tools=tools, store=False).output_text == "sunny"


def test_tokens_of_messages_are_counted_with_the_tools(hermes: Server) -> None:
    asked = body("hello", max_tokens=1, return_token_ids=True)
    prompt = hermes.post(PATH, asked).json()["prompt_token_ids"]
    counted = hermes.post("/tokenize", {"messages": asked["messages"], "tools": asked["tools"]}).json()
    assert counted["tokens"] == prompt
    assert hermes.post("/tokenize", {"messages": asked["messages"]}).json()["count"] < len(prompt)


def test_a_grammar_in_gbnf_stands_alone(hermes: Server) -> None:
    said = hermes.post(PATH, body("hello", structured_outputs={"grammar": 'root ::= "a"'}))
    assert (said.status_code, said.json()["error"]["param"]) == (400, "structured_outputs")
    assert "GBNF" in said.json()["error"]["message"]


@pytest.mark.parametrize(("name", "reason"), [
    ("hermes", "no single token"), ("harmony", "reasoning parser"), ("mistral", "--reasoning-parser")])
def test_a_budget_needs_a_token_that_ends_reasoning(name: str, reason: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(name)
    answer = server.post(PATH, body("x", thinking_token_budget=3))
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "thinking_token_budget"
    assert server.post(PATH, body("x", thinking_token_budget=-1)).status_code == 200
