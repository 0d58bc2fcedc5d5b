"""Grammars of required and strict calls, compiled by llguidance: what they accept is what the parsers read."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from slotwise.api.parsers.base_parser import gathered
from slotwise.api.parsers.call_grammar import Schemas, lark_of_regex, types_of
from slotwise.api.parsers.parser_table import OutputFormat
from slotwise.api.parsers.tool_formats import FORMATS as TOOL_PARSERS

SPECIAL = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
           "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_calls_section_begin|>",
           "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
           "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
           "<｜tool▁calls▁end｜>",
           "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call|>"]
IDS = {spelling: 257 + index for index, spelling in enumerate(SPECIAL)}
SCHEMAS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                "additionalProperties": False}, "time": {"type": "object"}}
FLEXIBLE = {"x-guidance": {"whitespace_pattern": " ?"}}
PARIS = '{"city": "Paris"}'
REQUIRED = {  # one call, as each format has it
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {PARIS}}}',
    "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}",
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{PARIS}"
               "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PARIS}\n```"
                   "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
                    "<｜tool▁calls▁end｜>",
    "solar": f"<|tool_calls|><|tool_call:begin|>call_7<|tool_call:name|>weather<|tool_call:args|>{PARIS}"
             "<|tool_call:end|><|calls|>",
    "functionary_v31": f"<function=weather>{PARIS}</function>",
    "jamba": f'<tool_calls>[{{"name": "weather", "arguments": {PARIS}}}]</tool_calls>',
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {PARIS}}}]</TOOLCALL>',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]',
    "granite-20b-fc": f'<function_call>{{"name": "weather", "arguments": {PARIS}}}',
    "cohere": f'<|START_ACTION|>[{{"tool_name": "weather", "parameters": {PARIS}}}]<|END_ACTION|>',
    "command_r": f'Action:\n```json\n[{{"tool_name": "weather", "parameters": {PARIS}}}]\n```',
    "apertus": f'<|tools_prefix|>[{{"weather": {PARIS}}}]<|tools_suffix|>',
    "phi4_mini_json": f'functools[{{"name": "weather", "arguments": {PARIS}}}]',
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {PARIS}}}\n<|action_end|>',
    "gigachat3": f'<|function_call|>{{"name": "weather", "arguments": {PARIS}}}<|message_sep|>',
    "longcat": f'<longcat_tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</longcat_tool_call>',
    "xlam": f'[{{"name": "weather", "arguments": {PARIS}}}]',
}
XML = {  # the same call where arguments are not JSON
    "qwen3_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n"
                "</seed:tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "hy3": "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n<arg_key:opensource>city"
           "</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n</tool_call:opensource>\n"
           "</tool_calls:opensource>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
                  "</minimax:tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city">Paris'
                    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city">Paris'
                   "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "step3": '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">'
             '<steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
             "<｜tool_calls_end｜>",
    "muse": '<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
            "</atem:invoke>\n</atem:function_calls>",
    "minicpm5": '<function name="weather"><param name="city">Paris</param></function>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="weather"<|sep|><|open|>argument key="city"<|sep|>Paris<|close|>'
               "argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
}
PYTHON = {"pythonic": '[weather(city="Paris")]', "olmo3": '<function_calls>\nweather(city="Paris")\n</function_calls>',
          "lfm2": '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>'}
REQUIRED |= XML | PYTHON
OTHERS = [name for name in [*TOOL_PARSERS, ""] if name not in REQUIRED]  # no grammar describes them
REQUIRED |= dict.fromkeys(OTHERS, f'[{{"name": "weather", "parameters": {PARIS}}}]')


class Vocabulary:
    """One token for each byte, and the special ones."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"</s>", *map(str.encode, SPECIAL)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return llguidance.LLTokenizer(Vocabulary(), n_vocab=257 + len(SPECIAL), eos_token=256)


def schemas(most: int = 16) -> Schemas:
    return Schemas({name: json.dumps(schema | FLEXIBLE) for name, schema in SCHEMAS.items()}, most)


def accepts(tokenizer: Any, grammar: str | None, text: str) -> bool:
    """Whether a whole output matches."""
    assert grammar is not None
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids, rest = [], text
    while rest:
        spelling = next((one for one in SPECIAL if rest.startswith(one)), None)
        ids += list(rest[0].encode()) if spelling is None else [IDS[spelling]]
        rest = rest[len(spelling or rest[0]):]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def calls(form: OutputFormat, text: str, begun: bool | None = None) -> list[tuple[str, str]]:
    markers = form.markers(SCHEMAS)
    for spelling in SPECIAL:
        text = text.replace(spelling, markers.of(spelling))
    parser = form.parser(SCHEMAS, begun, is_written=True)
    return [(call.name, call.arguments) for call in gathered(parser.feed(text) + parser.end()).calls]


@pytest.mark.parametrize("tools", [*TOOL_PARSERS, ""])
def test_a_required_call(tokenizer: Any, tools: str) -> None:
    form = OutputFormat(tools, "", IDS)
    grammar, text = form.grammar_of_calls(schemas(), None), REQUIRED[tools]
    assert accepts(tokenizer, grammar, text) and calls(form, text) == [("weather", PARIS)]
    for wrong in ("", "Hello", text.replace("city", "town"), text.replace("weather", "other"), text[:-1]):
        assert not accepts(tokenizer, grammar, wrong)


@pytest.mark.parametrize(("tools", "separator"), [("hermes", "\n"), ("llama3_json", "; ")])
def test_several_required_calls(tokenizer: Any, tools: str, separator: str) -> None:
    form = OutputFormat(tools, "", IDS)
    text = separator.join([REQUIRED[tools]] * 3)
    assert accepts(tokenizer, form.grammar_of_calls(schemas(), None), text)
    assert calls(form, text) == [("weather", PARIS)] * 3
    assert not accepts(tokenizer, form.grammar_of_calls(schemas(1), None), text)
    assert not accepts(tokenizer, form.grammar_of_calls(schemas(), None), separator.join([REQUIRED[tools]] * 17))


@pytest.mark.parametrize(("reasoning", "begun", "thoughts", "others"), [
    ("qwen3", None, ["", "<think>\nHm.</think>\n\n"], ["Hm.</think>"]),
    ("qwen3", True, ["Hm.</think>\n\n", "</think>"], ["", "Hm."]), ("qwen3", False, [""], ["<think>Hm.</think>"]),
    ("deepseek_r1", None, ["Hm.\n</think>"], [""]),
])
def test_calls_and_answers_begin_after_the_reasoning(
    tokenizer: Any, reasoning: str, begun: bool | None, thoughts: list[str], others: list[str],
) -> None:
    form = OutputFormat("hermes", reasoning, IDS)
    answer = form.grammar_of_answer(lark_of_regex(r"a/b|\/"), begun)
    for thought in thoughts:
        text = thought + REQUIRED["hermes"]
        assert accepts(tokenizer, form.grammar_of_calls(schemas(), begun), text)
        assert calls(form, text, begun) == [("weather", PARIS)]
        assert accepts(tokenizer, answer, thought + "a/b") and accepts(tokenizer, answer, thought + "/")
        assert not accepts(tokenizer, answer, thought + "c")
    for other in others:
        assert not accepts(tokenizer, form.grammar_of_calls(schemas(), begun), other + REQUIRED["hermes"])


def test_harmony_reasons_before_a_call_and_an_answer(tokenizer: Any) -> None:
    form = OutputFormat("openai", "openai", IDS)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert accepts(tokenizer, form.grammar_of_calls(schemas(), None), thought + REQUIRED["openai"])
    answer = form.grammar_of_answer('"yes"', None, schemas())
    assert accepts(tokenizer, answer, thought + "<|channel|>final<|message|>yes")
    assert accepts(tokenizer, answer, REQUIRED["openai"])
    assert not accepts(tokenizer, answer, "<|channel|>final<|message|>no")


@pytest.mark.parametrize("tools", ["hermes", "llama3_json", "openai", "kimi_k2", "deepseek_v3", "jamba", "xlam",
                                   "cohere", *XML, *PYTHON])
def test_strict_calls_match_their_schemas_and_text_is_free(tokenizer: Any, tools: str) -> None:
    grammar = OutputFormat(tools, "", IDS).grammar_of_strict(schemas(), None)
    text = REQUIRED[tools]
    for right in (text, "Hello {}[]" if tools != "openai" else "<|channel|>final<|message|>Hello"):
        assert accepts(tokenizer, grammar, right)
    if tools in ("hermes", "kimi_k2", "jamba"):
        assert accepts(tokenizer, grammar, f"I look.\n{text}\n{text}\n")
    assert not accepts(tokenizer, grammar, text.replace("city", "town"))
    assert not accepts(tokenizer, grammar, text.replace("weather", "other"))


TRIP: dict[str, Any] = {"type": "object", "properties": {
    "to": {"type": "string"}, "days": {"type": "integer"}, "class": {"enum": ["first", "second"]},
    "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}}, "note": {"type": ["string", "null"]}},
    "required": ["to", "days", "class"], "$defs": {"stop": {"type": "string", "maxLength": 5}}}


@pytest.mark.parametrize("tools", sorted(XML | PYTHON))
def test_arguments_that_are_not_json_match_their_schema(tokenizer: Any, tools: str) -> None:
    form = OutputFormat(tools, "", IDS)
    given = Schemas({"trip": json.dumps(TRIP | FLEXIBLE)}, given={"trip": TRIP})
    syntax = TOOL_PARSERS[tools].layout.syntax
    parameters = syntax.parameters if syntax is not None else None
    assert syntax is not None and parameters is not None

    def written(**values: str) -> str:
        if parameters.is_json:
            values |= {key: json.dumps(values[key], ensure_ascii=False) for key in ("to", "class") if key in values}
        text = (parameters.separator or "\n").join(
            parameters.before + key + parameters.middle + value + parameters.after for key, value in values.items())
        return (syntax.opening + syntax.before + "trip" + syntax.middle + text + syntax.after
                + syntax.closing).replace("\1", "\n")

    right = written(to="Zürich\nHB", days="3", **{"class": "second"}, stops='["Bern", "Olten"]')
    for grammar in (form.grammar_of_calls(given, None), form.grammar_of_strict(given, None)):
        assert accepts(tokenizer, grammar, right)
        for wrong in (written(to="Bern", days="three", **{"class": "first"}), written(to="Bern", days="3"),
                      written(to="Bern", days="3", **{"class": "third"}),
                      written(to="Bern", days="3", **{"class": "first"}, stops='["Romanshorn"]')):
            assert not accepts(tokenizer, grammar, wrong)
    parser = form.parser({"trip": TRIP}, None, is_written=True)
    (call,) = gathered(parser.feed(form.markers({}).of(right)) + parser.end()).calls
    assert json.loads(call.arguments) == {"to": "Zürich\nHB", "days": 3, "class": "second", "stops": ["Bern", "Olten"]}


VERSIONS: dict[str, Any] = {
    "type": "object", "$defs": {"Version": {"enum": ["3.9", "3.10"], "title": "Version"}},
    "properties": {
        "named": {"$ref": "#/$defs/Version"}, "maybe": {"anyOf": [{"$ref": "#/$defs/Version"}, {"type": "null"}]},
        "alone": {"allOf": [{"$ref": "#/$defs/Version"}], "default": "3.9"}, "one": {"const": "1e3"},
        "free": {"$ref": "#/properties/text"}, "text": {"type": "string"}, "count": {"enum": [1, 2]},
        "either": {"enum": ["1.10", None]}}}


@pytest.mark.parametrize("tools", sorted(XML))
def test_texts_that_look_like_numbers_are_texts_where_the_schema_says_so_in_any_way(tokenizer: Any, tools: str) -> None:
    form = OutputFormat(tools, "", IDS)
    schema = VERSIONS | {"required": [*VERSIONS["properties"]]}
    given = Schemas({"f": json.dumps(schema | FLEXIBLE)}, given={"f": schema})
    syntax = TOOL_PARSERS[tools].layout.syntax
    parameters = syntax.parameters if syntax is not None else None
    assert syntax is not None and parameters is not None

    def written(**values: str) -> str:
        text = "\n".join(parameters.before + key + parameters.middle + value + parameters.after
                         for key, value in values.items())
        return (syntax.opening + syntax.before + "f" + syntax.middle + text + syntax.after
                + syntax.closing).replace("\1", "\n")

    values = {"named": "3.10", "maybe": "3.10", "alone": "3.9", "one": "1e3", "free": "1.50", "text": "null",
              "count": "2", "either": "1.10"}
    for right, meant in ((values, values | {"count": 2}), (values | {"maybe": "null", "either": "null"}, values | {
            "count": 2, "maybe": None, "either": None})):
        for grammar in (form.grammar_of_calls(given, None), form.grammar_of_strict(given, None)):
            assert accepts(tokenizer, grammar, written(**right))
            assert not accepts(tokenizer, grammar, written(**right | {"named": "3.11"}))
        for is_written in (True, False):
            parser = form.parser({"f": schema}, None, is_written=is_written)
            (call,) = gathered(parser.feed(form.markers({}).of(written(**right))) + parser.end()).calls
            assert json.loads(call.arguments) == meant


def test_schemas_that_refer_to_themselves_have_an_end() -> None:
    root: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}, "c": {
        "anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/c"}, {"type": "string"}, 5]}}}
    assert types_of({"$ref": "#/$defs/a"}, root) == set() and types_of({"$ref": "#/$defs/c"}, root) == {"string"}
    assert types_of({"$ref": "#/$defs/missing"}, root) == types_of({"$ref": 5, "allOf": 5, "anyOf": 5}, root) == set()


def test_optional_arguments_in_python(tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}}
    given = Schemas({"f": json.dumps(schema | FLEXIBLE), "g": '{"type": "object"}'}, given={"f": schema, "g": {}})
    grammar = OutputFormat("lfm2", "", IDS).grammar_of_calls(given, None)
    for right in ("f()", "f(a=1)", "f(b=1, c=2)", "f(a=1, b=2, c=3), f(c=1)", 'g(x="y", z=[1])', "g()"):
        assert accepts(tokenizer, grammar, f"<|tool_call_start|>[{right}]<|tool_call_end|>")
    for wrong in ("f(b=1, a=2)", "f(a=1 b=2)", "f(a=)", "h()", "f(a=1,)"):
        assert not accepts(tokenizer, grammar, f"<|tool_call_start|>[{wrong}]<|tool_call_end|>")


def test_texts_with_limits_are_written_as_json(tokenizer: Any) -> None:
    """No rule describes a text that is not JSON and has a pattern: then calls are a list of objects, as in vLLM."""
    form = OutputFormat("qwen3_xml", "", IDS)
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^P"}}, "required": ["city"]}
    given = Schemas({"weather": json.dumps(schema | FLEXIBLE)}, given={"weather": schema})
    text = f'[{{"name": "weather", "parameters": {PARIS}}}]'
    assert form.grammar_of_strict(given, None) is None and accepts(tokenizer, form.grammar_of_calls(given, None), text)
    assert not accepts(tokenizer, form.grammar_of_calls(given, None), text.replace("Paris", "Rome"))
    parser = form.parser({"weather": schema}, None, is_written=True)
    assert [call.arguments for call in gathered(parser.feed(text) + parser.end()).calls] == [PARIS]


def test_an_answer_or_a_call(tokenizer: Any) -> None:
    grammar = OutputFormat("hermes", "", IDS).grammar_of_answer('%json {"type": "integer"}', None, schemas())
    assert accepts(tokenizer, grammar, "17") and accepts(tokenizer, grammar, REQUIRED["hermes"])
    assert not accepts(tokenizer, grammar, "x")


def test_formats_that_no_grammar_describes() -> None:
    assert {"minimax_m3", "mistral", "gemma4"} < set(OTHERS)
    for tools in OTHERS:
        assert OutputFormat(tools, "", IDS).grammar_of_strict(schemas(), None) is None
