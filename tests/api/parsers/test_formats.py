"""Each format: what its outputs mean, what becomes of malformed ones, and that cuts make no difference."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slotwise.api.parsers.base_parser import CallArguments, CallName, ParsedMessage, Part, gathered, merged
from slotwise.api.parsers.parser_table import REASONING_PARSERS, TOOL_PARSERS, OutputFormat, tool_parser_of
from slotwise.api.parsers.reasoning import has_begun

SPECIAL = {spelling: number for number, spelling in enumerate(
    ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>", "[TOOL_CALLS]",
     "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>"])}
TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": ["string", "null"]},
        "where": {"anyOf": [{"type": "array"}, {"type": "object"}]}}},
    "time": {}}
FORMATS = [(tools, "") for tools in TOOL_PARSERS] + [("", reasoning) for reasoning in REASONING_PARSERS] + [
    ("hermes", "qwen3"), ("qwen3_xml", "deepseek_r1"), ("openai", "openai")]


def coded(tools: str, reasoning: str, text: str) -> tuple[OutputFormat, str]:
    """A format, and the text as the detokenizer writes it: with special tokens as characters of their own."""
    chosen = OutputFormat(tools, reasoning, SPECIAL)
    markers = chosen.markers(TOOLS if tools else None)
    for spelling in SPECIAL:
        text = text.replace(spelling, markers.of(spelling))
    return chosen, text


def parsed(tools: str, reasoning: str, pieces: Iterable[str], begun: bool | None = None) -> list[Part]:
    chosen, _ = coded(tools, reasoning, "")
    parser = chosen.parser(TOOLS if tools else None, begun)
    found: list[Part] = []
    for piece in pieces:
        found += parser.feed(piece)
    return merged(found + parser.end())


def message(tools: str, reasoning: str, text: str, prompt: str = "") -> ParsedMessage:
    """The output, fed a character at a time."""
    return gathered(parsed(tools, reasoning, coded(tools, reasoning, text)[1], has_begun(prompt)))


def calls(tools: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    found = message(tools, "", text)
    assert not found.reasoning
    return found.content, [(call.name, call.arguments) for call in found.calls]


PARIS = ("weather", '{"city": "Paris"}')
HARMONY_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
EXAMPLES: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
        ('I look.\n<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>\n<tool_call>\n'
         '{"name": "time"}\n</tool_call>\n', "I look.", [PARIS, ("time", "{}")]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "a\\"}\\ud83d\\ude00</tool_call>"}}</tool_call> so',
         " so", [("weather", '{"city": "a\\"}\\ud83d\\ude00</tool_call>"}')]),
        ("<tool_call>\nnot JSON\n</tool_call>", "<tool_call>\nnot JSON\n</tool_call>", []),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
         []),
        ('<tool_call>{"name": "time", "arguments": [1]}</tool_call>',
         '<tool_call>{"name": "time", "arguments": [1]}</tool_call>', []),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Par', "", [("weather", '{"city": "Par')]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Par\\u00', "", [("weather", '{"city": "Par')]),
        ('<tool_call>{"name": "weather", "arguments": {"city"]} no', "]} no", [("weather", '{"city"')]),
        ("a <tool_cal> b \n", "a <tool_cal> b \n", []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
    ],
    "llama3_json": [
        ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}', "",
         [PARIS, ("time", "{}")]),
        ('{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}\nDone', "\nDone", [PARIS]),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('See {"name": "time", "parameters": {}}', 'See {"name": "time", "parameters": {}}', []),
        ('<|python_tag|>print(1)', "<|python_tag|>print(1)", []),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}]', "",
         [PARIS, ("time", "{}")]),
        ('[TOOL_CALLS]weather[CALL_ID]D681PevKs[ARGS]{"city": "Paris"}[TOOL_CALLS]time[ARGS]{}', "",
         [PARIS, ("time", "{}")]),
        ('Well. [TOOL_CALLS]weather{"city": "Paris"}', "Well.", [PARIS]),
        ("[TOOL_CALLS]oh no", "[TOOL_CALLS]oh no", []),
        ('[TOOL_CALLS][{"name": "time"}, 5]', ", 5]", [("time", "{}")]),
        ("[TOOL_CALLS][5]", "[TOOL_CALLS][5]", []),
    ],
    "qwen3_xml": [
        ("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "",
         [PARIS]),
        ('Ok.\n<function=weather><parameter=city>a "b"\nc</parameter><parameter=days>3</parameter>'
         "<parameter=note>\nnull\n</parameter><parameter=where>[1, {}]</parameter></function>", "Ok.",
         [("weather", '{"city": "a \\"b\\"\\nc", "days": 3, "note": null, "where": [1, {}]}')]),
        ("<tool_call><function=time></function></tool_call>", "", [("time", "{}")]),
        ("<tool_call><function=weather><parameter=days>three\n<parameter=note>5</function></tool_call>", "",
         [("weather", '{"days": "three", "note": "5"}')]),
        ("<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
        ("<function=a\nb>", "<function=a\nb>", []),
        ("<function=time>\noh</function>", "oh</function>", [("time", "{}")]),
        ("<function=weather><parameter=city>Par", "", [("weather", '{"city": "Par')]),
    ],
    "pythonic": [
        ('[weather(city="Paris"), time()]', "", [PARIS, ("time", "{}")]),
        ("<|python_start|>[weather(city='it\\'s, (', days=-3, where=[1, {'a': None}], note=true)]<|python_end|>", "",
         [("weather", '{"city": "it\'s, (", "days": -3, "where": [1, {"a": null}], "note": true}')]),
        ("[weather(city=some thing)]", "", [("weather", '{"city": "some thing"}')]),
        ("[other(a=1)]", "[other(a=1)]", []), ("[1, 2]", "[1, 2]", []), ("Hello [time()]", "Hello [time()]", []),
        ("[time(1)]", "1)]", [("time", "")]),
    ],
    "openai": [
        (HARMONY_CALL + "<|call|>", "", [PARIS]),
        (HARMONY_CALL, "", [PARIS]),
        (" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>" + PARIS[1] + "<|call|>", "",
         [PARIS]),
        ("<|channel|>final<|message|>Hi to=functions.time", "Hi to=functions.time", []),
        ("Hi", "Hi", []), ("<|channel|>fin", "", []),
        ("<|channel|>final<|message|>Hi<|end|> there", "Hi there", []),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + HARMONY_CALL, "I look.", [PARIS]),
    ],
}


@pytest.mark.parametrize(("tools", "text", "content", "called"), [
    (tools, *one) for tools, examples in EXAMPLES.items() for one in examples])
def test_what_an_output_means(tools: str, text: str, content: str, called: list[tuple[str, str]]) -> None:
    assert calls(tools, text) == (content, called)


@pytest.mark.parametrize("tools", ["hermes", "mistral", "llama3_json", "pythonic", "openai"])
def test_a_text_that_spells_a_special_token_is_text(tools: str) -> None:
    for text, _, called in EXAMPLES[tools]:
        if called and any(spelling in text for spelling in SPECIAL) and text[:2] in ("<|", "[T"):
            found = gathered(parsed(tools, "", [text]))
            assert not found.calls and found.content.strip() == text.strip()


THOUGHT = "<think>\nHm.\n\nYes.\n</think>\n\nParis."


@pytest.mark.parametrize(("reasoning", "text", "prompt", "thought", "content"), [
    ("qwen3", THOUGHT, "", "Hm.\n\nYes.", "Paris."), ("deepseek_r1", THOUGHT, "", "Hm.\n\nYes.", "Paris."),
    ("qwen3", "Hm.</think>Paris.", "<|assistant|><think>\n", "Hm.", "Paris."), ("qwen3", "Hm.", "", "", "Hm."),
    ("deepseek_r1", "Hm.</think>Paris.", "", "Hm.", "Paris."), ("deepseek_r1", "Hm.", "", "Hm.", ""),
    ("deepseek_r1", "Paris. <think>", "<think>\n\n</think>\n\n", "", "Paris. <think>"),
    ("qwen3", "\n\nParis.", "<think></think>", "", "\n\nParis."), ("qwen3", "<think>Hm.", "", "Hm.", ""),
    ("openai", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris.", "",
     "Hm.", "Paris."),
])
def test_reasoning_stands_apart(reasoning: str, text: str, prompt: str, thought: str, content: str) -> None:
    found = message("", reasoning, text, prompt)
    assert (found.reasoning, found.content, found.calls) == (thought, content, [])


def test_calls_after_reasoning() -> None:
    text = THOUGHT.replace("Paris.", EXAMPLES["hermes"][0][0])
    found = message("hermes", "qwen3", text)
    assert (found.reasoning, found.content, [call.name for call in found.calls]) == ("Hm.\n\nYes.", "", ["weather"])
    inside = message("hermes", "qwen3", "<think>" + EXAMPLES["hermes"][0][0])
    assert not inside.calls and inside.reasoning == EXAMPLES["hermes"][0][0]


def test_arguments_grow_while_they_come() -> None:
    chosen, text = coded("hermes", "", '<tool_call>{"name": "weather", "arguments": {"city": "Pa\\u00e9')
    parser = chosen.parser(TOOLS)
    parts = [parser.feed(character) for character in text]
    said = [part for one in parts for part in one]
    assert said[0] == CallName(0, "weather")
    assert [part.text for part in said[1:] if isinstance(part, CallArguments)] == [
        "{", '"', "c", "i", "t", "y", '"', ":", " ", '"', "P", "a", "\\u00e9"]


WORDS = [
    "{", "}", "[", "]", "(", ")", '"', "'", "\\", "\\u", "d83d", "\\ude00", ",", ":", "=", ";", " ", "\n", "a", "1",
    "null", '"name"', '"arguments"', '"parameters"', '"weather"', '{"name": "weather", "arguments": {"city": "',
    '{"name": "time", "parameters": {}}', "weather", "time(", "city=", "é🙂", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<function=weather>", "<parameter=city>", "<parameter=days>", "<parameter=", "</parameter>",
    "</function>", "<tool_", "to=functions.time", "analysis", "commentary", "final", *SPECIAL]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join) | st.sampled_from(
    [text for examples in EXAMPLES.values() for text, _, _ in examples])


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
@settings(max_examples=20, deadline=None)
@given(text=TEXTS, more=TEXTS)
@example(text=THOUGHT, more=EXAMPLES["hermes"][1][0])
def test_cuts_make_no_difference(tools: str, reasoning: str, text: str, more: str) -> None:
    _, whole = coded(tools, reasoning, text + more)
    expected = parsed(tools, reasoning, [whole])
    assert parsed(tools, reasoning, whole) == expected
    for place in range(1, len(whole)):
        assert parsed(tools, reasoning, [whole[:place], "", whole[place:]]) == expected
    json.dumps([[str(part)] for part in expected]).encode()
    for part in expected:
        (part.name if isinstance(part, CallName) else part.text).encode()  # no half of a surrogate pair


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
@settings(max_examples=30, deadline=None)
@given(text=TEXTS)
def test_arguments_never_end_within_an_escape(tools: str, reasoning: str, text: str) -> None:
    chosen, coded_text = coded(tools, reasoning, text)
    if tools in ("openai", "pythonic", ""):
        return  # others are the model's own text beyond an object; a whole value
    parser = chosen.parser(TOOLS)
    for character in coded_text:
        for part in parser.feed(character):
            if isinstance(part, CallArguments):
                bare = part.text.replace("\\\\", "")
                assert not bare.endswith("\\") and "\\u" not in bare[-5:]


@settings(max_examples=40, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=6), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8), max_size=4), escaped=st.booleans())
def test_arguments_arrive_as_they_were_meant(arguments: dict[str, Any], escaped: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=escaped)
    for tools, text in (
            ("hermes", '<tool_call>\n{"name": "weather", "arguments": %}\n</tool_call>'),
            ("llama3_json", '{"name": "weather", "parameters": %}'),
            ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": %}]'), ("mistral", "[TOOL_CALLS]weather[ARGS]%"),
            ("openai", HARMONY_CALL.replace(PARIS[1], "%") + "<|call|>")):
        found = gathered(parsed(tools, "", coded(tools, "", text)[1].replace("%", written)))
        assert (found.content, [(call.name, call.arguments) for call in found.calls]) == ("", [("weather", written)])


def test_a_template_tells_its_format() -> None:
    assert tool_parser_of('<tool_call>\n{"name": <name>, "arguments": <args>}') == "hermes"
    assert tool_parser_of("plain {{ messages }}") == ""
    assert tool_parser_of("<tool_call>\n<function=f>\n<parameter=a>") == "qwen3_xml"
    with pytest.raises(ValueError, match=r"<\|start\|>"):
        OutputFormat("openai", "", {})
