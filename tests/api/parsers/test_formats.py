"""Each format: what its outputs mean, what becomes of malformed ones, and that cuts make no difference."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotwise.api.parsers.base_parser import CallArguments, CallName, ParsedMessage, Part, gathered, merged
from slotwise.api.parsers.parser_table import REASONING_ALIASES, REASONING_PARSERS, OutputFormat
from slotwise.api.parsers.reasoning import reasoning_parser_of
from slotwise.api.parsers.tool_formats import ALIASES as TOOL_ALIASES
from slotwise.api.parsers.tool_formats import FORMATS as TOOL_PARSERS
from slotwise.api.parsers.tool_formats import tool_parser_of

SPECIAL = {spelling: number for number, spelling in enumerate(
    ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>", "[TOOL_CALLS]",
     "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|tool_call_begin|>",
     "<|tool_calls_section_begin|>", "<|tool_call_end|>", "<｜tool▁sep｜>", "<|tool_call>", "<tool_call|>", '<|"|>',
     "]<]minimax[>[", "｜DSML｜", "<|open|>", "<|close|>", "<|sep|>", "<|START_THINKING|>", "<|END_THINKING|>",
     "<|channel>", "<channel|>", "[THINK]", "[/THINK]"])}
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
    return gathered(parsed(tools, reasoning, coded(tools, reasoning, text)[1], OutputFormat(
        tools, reasoning, SPECIAL).has_begun(prompt)))


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
        ('[weather(city="a\nb\\n\'", where=[1,\n\'c\nd\'])]', "",
         [("weather", '{"city": "a\\nb\\n\'", "where": [1, "c\\nd"]}')]),
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
    "lfm2": [
        ('I look. <|tool_call_start|>[weather(city="Paris"), time()]<|tool_call_end|> Done', "I look. Done",
         [PARIS, ("time", "{}")]),
        ("<|tool_call_start|>[other()]<|tool_call_end|>", "<|tool_call_start|>[other()]<|tool_call_end|>", []),
    ],
    "olmo3": [
        ("<function_calls>\nweather(city='Paris')\ntime()\n</function_calls>", "", [PARIS, ("time", "{}")]),
        ("<function_calls>time(), then", ", then", [("time", "{}")]),
    ],
    "seed_oss": [
        ("<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>", "",
         [PARIS]),
        ("<function=weather><parameter=where>['a', {'b': None}]</parameter></function>", "",
         [("weather", '{"where": ["a", {"b": null}]}')]),
    ],
    "glm45": [
        ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
         "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>", "",
         [("weather", '{"city": "Paris", "days": 2}'), ("time", "{}")]),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>a\n</arg_value></tool_call>", "",
         [("weather", '{"city": "a\\n"}')]),
        ('<tool_call>{"name": "time"}</tool_call>', '<tool_call>{"name": "time"}</tool_call>', []),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value><![CDATA[x]]> and more</arg_value></tool_call>", "",
         [("weather", '{"city": "<![CDATA[x]]> and more"}')]),
    ],
    "hy3": [
        ("<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n<arg_key:opensource>city"
         "</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n</tool_call:opensource>\n"
         "</tool_calls:opensource>", "", [PARIS]),
    ],
    "minimax_m2": [
        ('<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
         '<invoke name="time">\n</invoke>\n</minimax:tool_call>', "", [PARIS, ("time", "{}")]),
        ("<minimax:tool_call>\nno", "<minimax:tool_call>\nno", []),
    ],
    "minimax_m3": [
        (']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>'
         "]<]minimax[>[<where>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<b>x]<]minimax[>["
         "</b>]<]minimax[>[</item>]<]minimax[>[</where>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>", "",
         [("weather", '{"city": "Paris", "where": [1, {"b": "x"}]}')]),
        (']<]minimax[>[<invoke name="weather">]<]minimax[>[<days>3', "", [("weather", "{")]),
    ],
    "deepseek_v32": [
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris'
         "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>", "", [PARIS]),
    ],
    "deepseek_v4": [
        ('<｜DSML｜tool_calls><｜DSML｜invoke name="time"><｜DSML｜parameter name="x" string="true">5'
         "</｜DSML｜parameter>"
         '<｜DSML｜parameter name="y" string="false">[5]</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>', "",
         [("time", '{"x": "5", "y": [5]}')]),
    ],
    "step3": [
        ('<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">'
         '<steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
         "<｜tool_calls_end｜>", "", [PARIS]),
    ],
    "muse": [
        ('<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
         "</atem:invoke>\n</atem:function_calls>", "", [PARIS]),
    ],
    "minicpm5": [
        ('<function name="weather"><param name="city"><![CDATA[a</param>]]></param></function>\n<function name="time">'
         "</function>", "", [("weather", '{"city": "a</param>"}'), ("time", "{}")]),
    ],
    "kimi_k3": [
        ('<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"'
         "<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>", "", [PARIS]),
        ('<|open|>call tool="time"<|sep|><|open|>argument key="x" type="string"<|sep|>5<|close|>argument<|sep|>'
         '<|open|>argument key="y" type="number"<|sep|>5<|close|>argument<|sep|><|close|>call<|sep|>', "",
         [("time", '{"x": "5", "y": 5}')]),
    ],
    "kimi_k2": [
        ("I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
         '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>'
         "<|tool_call_end|><|tool_calls_section_end|>", "I look.", [PARIS, ("time", "{}")]),
        ("<|tool_calls_section_begin|>no<|tool_call_begin|>", "<|tool_calls_section_begin|>no<|tool_call_begin|>", []),
    ],
    "deepseek_v3": [
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
         '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```'
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [PARIS, ("time", "{}")]),
    ],
    "deepseek_v31": [
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
         "<｜tool▁calls▁end｜>", "", [PARIS]),
    ],
    "solar": [
        ("<|tool_calls|><|tool_call:begin|>call-5_a<|tool_call:name|>weather<|tool_call:args|>"
         '{"city": "Paris"}<|tool_call:end|><|calls|>', "", [PARIS]),
    ],
    "functionary_v31": [
        ('<function=weather>{"city": "Paris"}</function><function=time>{}</function>', "", [PARIS, ("time", "{}")]),
        ("<function=weather> no", "<function=weather> no", []),
    ],
    "functionary_v32": [
        ('all\nI look.>>>weather\n{"city": "Paris"}\n>>>time\n{}', "I look.", [PARIS, ("time", "{}")]),
        ('weather\n{"city": "Paris"}', "", [PARIS]), ("Hello >>>you", "Hello >>>you", []),
    ],
    "jamba": [
        ('<tool_calls>[\n    {"name": "weather", "arguments": {"city": "Paris"}},\n    {"name": "time", '
         '"arguments": {}, "id": "x"}\n]</tool_calls>', "", [PARIS, ("time", "{}")]),
        ('<tool_calls>\n{"name": "weather", "arguments": {"city": "Paris"}}\n{"name": "time", "arguments": {}}\n'
         "</tool_calls>", "", [PARIS, ("time", "{}")]),
        ("<tool_calls>[]</tool_calls>", "<tool_calls>[]</tool_calls>", []),
        ('<tool_calls>[{"name": "time"}, 5]', ", 5]", [("time", "{}")]),
    ],
    "nemotron": [
        ('<TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris"}}]</TOOLCALL>', "", [PARIS])],
    "granite": [
        ('<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
        ('<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    ],
    "granite-20b-fc": [('<function_call> {"name": "weather", "arguments": {"city": "Paris"}}', "", [PARIS])],
    "cohere": [
        ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}\n]'
         "<|END_ACTION|>", "", [PARIS]),
    ],
    "command_r": [
        ('Action:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {"city": "Paris"}\n'
         "    }\n]```", "", [PARIS]),
        ('Action: ```json\n[{"tool_name": "other", "parameters": {}}]```',
         'Action: ```json\n[{"tool_name": "other", "parameters": {}}]```', []),
    ],
    "apertus": [
        ('<|tools_prefix|>[{"weather": {"city": "Paris"}}, {"time": {}}]<|tools_suffix|>', "",
         [PARIS, ("time", "{}")]),
        ('<|tools_prefix|>[{"weather": 5}]', '<|tools_prefix|>[{"weather": 5}]', []),
    ],
    "phi4_mini_json": [
        ('functools[{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
        ('<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|/tool_call|>', "", [PARIS]),
        ('use functools[{"name": "wraps", "arguments": {}}]', 'use functools[{"name": "wraps", "arguments": {}}]', []),
    ],
    "internlm": [
        ('Ok<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Paris"}}<|action_end|>', "Ok",
         [PARIS]),
    ],
    "gigachat3": [
        ('<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "weather", "arguments": {"city": "Paris"}}', "",
         [PARIS]),
        ('<|function_call|>{"name": "weather", "arguments": {"city": "Paris"}}<|message_sep|>', "", [PARIS]),
    ],
    "longcat": [
        ('<longcat_tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</longcat_tool_call>', "", [PARIS])],
    "xlam": [
        ('[{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
        ('[{"name": "Bob"}]', '[{"name": "Bob"}]', []),
        ('```json\n[{"name": "weather", "arguments": {"city": "Paris"}}]\n```', "", [PARIS]),
        ("```json\n[1]\n```", "```json\n[1]\n```", []),
    ],
    "gemma4": [
        ('<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>call:time{}<tool_call|>', "",
         [PARIS, ("time", "{}")]),
        ('<|tool_call>call:weather{city:<|"|>a "b"\n{<|"|>,days:2,where:[<|"|>a<|"|>,{b:None,c:-1.5e3}],note:true}', "",
         [("weather", '{"city": "a \\"b\\"\\n{", "days": 2, "where": ["a", {"b": null, "c": -1.5e3}], "note": true}')]),
        ("<|tool_call>no", "<|tool_call>no", []),
        ('<|tool_call>call:weather{city:<|"|>Par', "", [("weather", '{"city": "Par')]),
    ],
    "functiongemma": [
        ("<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", "", [PARIS]),
        ("<start_function_call>call:weather{city:Paris, days:03}<end_function_call>", "",
         [("weather", '{"city": "Paris", "days": "03"}')]),
    ],
}
assert EXAMPLES.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize(("tools", "text", "content", "called"), [
    (tools, *one) for tools, examples in EXAMPLES.items() for one in examples])
def test_what_an_output_means(tools: str, text: str, content: str, called: list[tuple[str, str]]) -> None:
    assert calls(tools, text) == (content, called)


FILE = "<tool_call>\n<function=weather>\n<parameter=city>\n<![CDATA[a]]>\n</parameter>\n"


@pytest.mark.parametrize(("tools", "text", "content", "called"), [
    ("qwen3_xml", FILE + "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", "",
     [("weather", '{"city": "<![CDATA[a]]>", "days": 2}')]),
    ("qwen3_xml", FILE + "<param", "<param", [("weather", '{"city": "<![CDATA[a]]>"')]),
    ("qwen3_xml", FILE + "</func", "</func", [("weather", '{"city": "<![CDATA[a]]>"')]),
    ("qwen3_xml", FILE, "", [("weather", '{"city": "<![CDATA[a]]>"')]),
    ("qwen3_xml", FILE + "</function>", "", [("weather", '{"city": "<![CDATA[a]]>"}')]),
    ("glm45", "<tool_call>wea", "<tool_call>wea", []), ("glm45", "<tool_call>time", "<tool_call>time", []),
    ("minimax_m3", ']<]minimax[>[<invoke name="weather">]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[<c', "",
     [("weather", '{"days": 3')]),
    ("minimax_m3", ']<]minimax[>[<invoke name="weather">]<]minimax[>[<days>3]<]minimax[>[</days>', "",
     [("weather", '{"days": 3')])])
def test_a_call_that_max_tokens_cuts_is_not_complete(
        tools: str, text: str, content: str, called: list[tuple[str, str]]) -> None:
    """A client may execute any call whose arguments are valid JSON."""
    chosen, written = coded(tools, "", text)
    parser = chosen.parser(TOOLS)
    found = gathered([*parser.feed(written), *parser.end(is_cut=True)])
    assert (found.content.strip(), [(call.name, call.arguments) for call in found.calls]) == (content, called)


@pytest.mark.parametrize("tools", ["hermes", "mistral", "llama3_json", "pythonic", "openai"])
def test_a_text_that_spells_a_special_token_is_text(tools: str) -> None:
    for text, _, called in EXAMPLES[tools]:
        if called and any(spelling in text for spelling in SPECIAL) and text[:2] in ("<|", "[T"):
            found = gathered(parsed(tools, "", [text]))
            assert not found.calls and found.content.strip() == text.strip()


THOUGHT = "<think>\nHm.\n\nYes.\n</think>\n\nParis."


REASONED = [  # a parser, an output, its prompt, and what they mean
    ("qwen3", THOUGHT, "", "Hm.\n\nYes.", "Paris."), ("deepseek_r1", THOUGHT, "", "Hm.\n\nYes.", "Paris."),
    ("qwen3", "Hm.</think>Paris.", "<|assistant|><think>\n", "Hm.", "Paris."), ("qwen3", "Hm.", "", "", "Hm."),
    ("deepseek_r1", "Hm.</think>Paris.", "", "Hm.", "Paris."), ("deepseek_r1", "Hm.", "", "Hm.", ""),
    ("deepseek_r1", "Paris. <think>", "<think>\n\n</think>\n\n", "", "Paris. <think>"),
    ("qwen3", "\n\nParis.", "<think></think>", "", "\n\nParis."), ("qwen3", "<think>Hm.", "", "Hm.", ""),
    ("openai", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris.", "",
     "Hm.", "Paris."),
    ("kimi_k2", "<think>Hm.<|tool_calls_section_begin|>", "", "Hm.", "<|tool_calls_section_begin|>"),
    ("ernie45", "Hm.\n</think>\n\n<response>\nParis.\n</response>", "<think>\n", "Hm.", "Paris."),
    ("granite", "Here is my thought process: Hm. Here is my response: Paris.", "", " Hm. ", " Paris."),
    ("granite", "<think>Hm.</think><response>Paris.</response>", "", "Hm.", "Paris."),
    ("seed_oss", "<seed:think>Hm.</seed:think>Paris.", "", "Hm.", "Paris."),
    ("mistral", "[THINK]Hm.[/THINK]Paris.", "", "Hm.", "Paris."),
    ("cohere", "Hm.<|END_THINKING|><|START_RESPONSE|>Paris.<|END_RESPONSE|>", "<|START_THINKING|>", "Hm.", "Paris."),
    ("gemma4", "<|channel>thought\nHm.<channel|>I look.<|channel>thought\nYes.<channel|>Paris.", "", "Hm.Yes.",
     "I look.Paris."),
    ("gemma4", "Paris.", "<|channel>thought\n<channel|>", "", "Paris."),
    ("minimax_m3", "<mm:think>Hm.</mm:think>Paris.", "", "Hm.", "Paris."),
    ("hy3", "Hm.</think:opensource>Paris.", "<think:opensource>", "Hm.", "Paris."),
    ("kimi_k3", "Hm.<|close|>think<|sep|><|open|>response<|sep|>Paris.<|close|>response<|sep|>",
     "<|open|>think<|sep|>", "Hm.", "Paris."),
    ("apriel", "Hm.\n[BEGIN FINAL RESPONSE]\nParis.\n[END FINAL RESPONSE]", "Here are my reasoning steps:\n", "Hm.",
     "Paris.\n"),
    ("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Paris.", "", "Hm.", "Paris."),
    ("solar", "<|think|>Hm.<|end|><|begin|>assistant<|content|>Paris.<|end|>", "", "Hm.", "Paris."),
    ("muse", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Paris.<|eot|>", "", "Hm.", "Paris."),
]
assert {name for name, *_ in REASONED} == REASONING_PARSERS.keys()


@pytest.mark.parametrize(("reasoning", "text", "prompt", "thought", "content"), REASONED)
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
    '{"name": "time", "parameters": {}}', "weather", "time(", "city=", "é🙂", "<tool_", "to=functions.time", "analysis",
    "commentary", "final", "call:", "city", "]]>", "<![CDATA["]


def marks(layout: Iterable[Any]) -> list[str]:
    """The texts that a layout is made of."""
    return [text for one in layout for text in ([one] if isinstance(one, str) else marks(one) if isinstance(one, tuple)
                                                else []) if text]


def texts(tools: str, reasoning: str) -> st.SearchStrategy[str]:
    """Outputs made of what a format is made of, and of other things."""
    chosen = [form for form in (TOOL_PARSERS.get(tools), REASONING_PARSERS.get(reasoning)) if form is not None]
    own = [text for form in chosen for text in (*form.spellings, *marks(form.layout))]
    return st.lists(st.sampled_from(WORDS) | st.sampled_from(own or WORDS), max_size=12).map("".join) | st.sampled_from(
        [text for text, _, _ in EXAMPLES.get(tools, ())] + [text for _, text, *_ in REASONED])


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_cuts_make_no_difference(tools: str, reasoning: str, data: st.DataObject) -> None:
    _, whole = coded(tools, reasoning, data.draw(texts(tools, reasoning)) + data.draw(texts(tools, reasoning)))
    expected = parsed(tools, reasoning, [whole])
    assert parsed(tools, reasoning, whole) == expected
    for place in range(1, len(whole)):
        assert parsed(tools, reasoning, [whole[:place], "", whole[place:]]) == expected
    json.dumps([[str(part)] for part in expected]).encode()
    for part in expected:
        (part.name if isinstance(part, CallName) else part.text).encode()  # no half of a surrogate pair


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_arguments_never_end_within_an_escape(tools: str, reasoning: str, data: st.DataObject) -> None:
    chosen, coded_text = coded(tools, reasoning, data.draw(texts(tools, reasoning)))
    if tools in ("openai", "pythonic", "lfm2", "olmo3", ""):
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
    for source, name in (
            ("<tool_calls>[{'name'...", "jamba"), ("make calls in a single JSON array", "xlam"),
            ("<|start_header_id|> [func_name1(params_name1=params_value1)]", "pythonic"),
            ("<function_calls>\n", "olmo3"), ("<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke", "step3"),
            ("<start_function_call>call:", "functiongemma"), ("<|action_start|><|plugin|>", "internlm"),
            ("<longcat_tool_call>", "longcat"), ("<｜tool▁call▁begin｜>function\n```json", "deepseek_v3"),
            ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini_json")):
        assert tool_parser_of(source) == name
    for source, name in (
            ("<think></think> <response></response>", "granite"), ("<think> <answer>", "ernie45"), ("<think>", "qwen3"),
            ("[THINK]", "mistral"), ("plain", "")):
        assert reasoning_parser_of(source) == name
    assert {*TOOL_ALIASES.values()} <= TOOL_PARSERS.keys() and {*REASONING_ALIASES.values()} <= REASONING_PARSERS.keys()
    assert tool_parser_of("<tool_call>\n<function=f>\n<parameter=a>") == "qwen3_xml"
    with pytest.raises(ValueError, match=r"<\|start\|>"):
        OutputFormat("openai", "", {})


def test_hostile_text_takes_linear_time() -> None:
    """Repeated marks, unclosed values and deep nesting: twice the text takes about twice the time, at any cut."""
    for tools, form in {form.parser: (tools, form) for tools, form in TOOL_PARSERS.items()}.values():
        for mark in {*marks(form.layout), "{", "[", '{"name": "weather", "arguments": ', "weather(a=("}:
            seconds = []
            for count in (100, 1600):
                _, text = coded(tools, "", mark * count)
                began = time.process_time()
                parsed(tools, "", [text[place : place + 7] for place in range(0, len(text), 7)])
                seconds.append((time.process_time() - began) / len(text))
            assert seconds[1] < 8 * seconds[0] + 1e-5, (tools, mark, seconds)
