"""From the fields of a request to a grammar: what each field may hold, and what is wrong with others."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_schemas import random_schema, random_text

from slotwise.core.params import JSON_SCHEMA, LARK, MAX_BYTES, REGEX, Grammar
from slotwise.grammar_compiler import compiled, tokenizer_of
from slotwise.text.grammar_check import check
from slotwise.text.structured_output import (
    WHITE_SPACE,
    StructuredOutputError,
    json_schema,
    of_response_format,
    of_structured_outputs,
)

OBJECT = {"type": "object"}
NUM_BYTES = 256
BYTES = tokenizer_of([*(bytes([byte]) for byte in range(NUM_BYTES)), b"<end>"], [], [NUM_BYTES], NUM_BYTES + 1,
                     lambda text: list(text.encode()))


def matches(kind: str, grammar: str, text: str) -> bool:
    """Whether a whole text matches, as the engine decides it."""
    matcher, objection = compiled(BYTES, kind, grammar)
    assert not objection, objection
    said = list(text.encode())
    return matcher.validate_tokens(said) == len(said) and matcher.consume_tokens(said) and matcher.is_accepting()


def schema_of(grammar: Grammar | None) -> Any:
    assert grammar is not None and grammar.kind == JSON_SCHEMA
    schema = json.loads(grammar.text)
    options = schema.pop("x-guidance")
    assert options == {"whitespace_pattern": WHITE_SPACE}
    return schema


def test_response_formats() -> None:
    assert of_response_format({"type": "text"}) is None
    for more in ({}, {"schema": None}):
        assert schema_of(of_response_format({"type": "json_object"} | more)) == OBJECT
    assert schema_of(of_response_format({"type": "json_object", "schema": {"const": 5}})) == {"const": 5}
    for strict in (True, False, None):
        described = {"name": "x", "schema": {"const": 5}, "strict": strict, "description": "a number"}
        assert schema_of(of_response_format({"type": "json_schema", "json_schema": described})) == {"const": 5}


def test_structured_outputs() -> None:
    assert of_structured_outputs({}) is of_structured_outputs({"json_object": False, "json": None}) is None
    assert schema_of(of_structured_outputs({"json": OBJECT})) == schema_of(of_structured_outputs({"json": "{\"type\":"
                                                                                                 "\"object\"}"}))
    assert schema_of(of_structured_outputs({"json": "true"})) == {"allOf": [True]}
    assert of_structured_outputs({"regex": "a+"}) == Grammar(REGEX, "a+")
    assert of_structured_outputs({"grammar": 'start: "a"'}, "guided_grammar") == Grammar(
        LARK, 'start: "a"', "guided_grammar")
    for texts in (["a"], ["a\n", '"é\\', "", "😀"]):
        grammar = of_structured_outputs({"choice": texts})
        assert grammar is not None and not check(grammar.kind, grammar.text, [])
    for options in ({"disable_any_whitespace": True}, {"whitespace_pattern": "[ ]?"}):
        grammar = of_structured_outputs({"json": OBJECT} | options)
        assert grammar is not None and WHITE_SPACE not in grammar.text and not check(grammar.kind, grammar.text, [])


# What Python's `re` reads in the same way, with its flag ASCII, and what it does not.
PLAIN = [r"\d", r"\D", r"\w", r"\W", r"[\d.]", r"[^\d]", r"[\w-]", r"[-\d]", r"[\D]", r"[^\W]", r"\\d", r"[\\d]", r"\."]
OTHERS = [r"\s", r"\S", r"[^\w\s]", r"[\d-z]", r"[a-z-\d]", r"[\w&&[^\d]]", r"[\w--\d]", r"(?i:\w)", ".", r"\p{L}",
          r"\p{Nd}"]
COUNTS = ["", "?", "+", "{2}"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLAIN + OTHERS), st.sampled_from(COUNTS)), min_size=1, max_size=3),
       st.text(st.sampled_from("5\u0967aé\u212az_-. \\d\u00a0\u3000/你"), max_size=4))
def test_a_regular_expression_means_the_same_wherever_it_stands(atoms: list[tuple[str, str]], text: str) -> None:
    r"""`\d` and `\w` are ASCII's, as in JSON schemas; Unicode's have names."""
    pattern = "".join(atom + count for atom, count in atoms)
    schema = json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"})
    in_schema = matches(JSON_SCHEMA, schema, json.dumps(text, ensure_ascii=False))
    assert matches(REGEX, pattern, text) == in_schema
    lark = f'start: "/\\\\d/" A //  /\\d "\nA: /{pattern}/  # /"\\w\n'
    assert matches(LARK, lark, "/\\d/" + text) == in_schema
    if {atom for atom, _ in atoms} <= {*PLAIN}:
        assert in_schema == bool(re.fullmatch(pattern, text, re.ASCII))


def test_digits_are_asciis_in_every_field() -> None:
    """Of a regular expression, of a grammar and what it embeds, of white space, and of names of properties."""
    devanagari = "\u0967\u0968\u0969"
    names = {"type": "object", "patternProperties": {r"^\d{3}$": {}}, "additionalProperties": False}
    for found, form in (
            (of_structured_outputs({"regex": r"\d{3}"}), "%s"),
            (of_structured_outputs({"grammar": r"start: /\d{3}/"}), "%s"),
            (of_structured_outputs({"grammar": 'start: %json {"type": "string", "pattern": "^\\\\d{3}$"}'}), '"%s"'),
            (of_structured_outputs({"json": {"type": "array"}, "whitespace_pattern": r"(\d{3})?"}), "[%s]"),
            (of_structured_outputs({"json": names, "disable_any_whitespace": True}), '{"%s":1}')):
        assert found is not None
        assert matches(found.kind, found.text, form % "123") and not matches(found.kind, found.text, form % devanagari)
    assert matches(REGEX, r"\p{Nd}{3}", devanagari)


@pytest.mark.parametrize("schema, text, other", [
    ({"properties": {"default": {"type": "string", "pattern": r"^[+-\d]+$"}}}, '{"default":"-1"}', '{"default":",1"}'),
    ({"patternProperties": {r"^[+-\d]+$": {"type": "integer"}}, "additionalProperties": False}, '{"-1":1}', '{",1":1}'),
    ({"patternProperties": {r"^[+-\d]$": {"minimum": 3}, r"^[+\-\d]$": {"type": "integer"}},
      "additionalProperties": False}, '{"-":3}', '{"-":2}')])
def test_a_hyphen_before_a_class_is_itself_wherever_a_schema_has_expressions(
    schema: dict[str, Any], text: str, other: str,
) -> None:
    found = of_structured_outputs({"json": {"type": "object"} | schema, "disable_any_whitespace": True})
    assert found is not None
    assert matches(found.kind, found.text, text) and not matches(found.kind, found.text, other)


def test_a_hyphen_before_a_class_is_itself() -> None:
    literal = {"pattern": r"[+-\d]"}
    patterned = {"type": "string", "pattern": r"^[+-\d]+$"}
    schema = of_structured_outputs({"json": {"anyOf": [patterned, {"const": literal}]}})
    regex = of_structured_outputs({"regex": r"[+-\d]+"})
    assert schema is not None and regex is not None
    for text, holds in (("+-5", True), ("+ 5", False), (".", False)):
        assert matches(schema.kind, schema.text, json.dumps(text)) == matches(regex.kind, regex.text, text) == holds
    assert matches(schema.kind, schema.text, json.dumps(literal))


def test_structural_tags() -> None:
    tag = {"structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}, {"begin": "<f=b>", "end": ""}],
           "triggers": ["<f="]}
    for grammar in (of_response_format({"type": "structural_tag"} | tag),
                    of_structured_outputs({"structural_tag": json.dumps(tag)})):
        assert grammar is not None and not check(grammar.kind, grammar.text, [])


@pytest.mark.parametrize(("fields", "says"), [
    ({"regx": "a"}, "there is no 'regx'"), ({"regex": "a", "choice": ["b"]}, "only one constraint"),
    ({"json": 5}, "a schema must be an object"), ({"json": "{"}, "not valid JSON"), ({"json": "[" * 5000}, "not valid"),
    ({"regex": 5}, "must be a text"), ({"choice": "ab"}, "a list of texts"), ({"choice": []}, "1 to 16384 choices"),
    ({"choice": ["a"] * 16_385}, "1 to 16384 choices"), ({"grammar": None, "regex": ["a"]}, "must be a text"),
    ({"regex": "a", "whitespace_pattern": "b"}, "of json alone"), ({"json": {}, "whitespace_pattern": 1}, "a text"),
    ({"json": {}, "disable_any_whitespace": "no"}, "true or false"),
    ({"regex": "a", "disable_additional_properties": True}, "disable_additional_properties is not supported"),
    ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance is not supported"),
    ({"json": {"items": {"multipleOf": 10**7}}}, "multipleOf may be at most"),
    ({"json": json.loads("[" * 80 + "]" * 80) and {"a": json.loads("[" * 80 + "]" * 80)}}, "64 values deep"),
    ({"regex": "a" * (MAX_BYTES + 1)}, "bytes are more"), ({"structural_tag": "{}"}, "structures"),
    ({"structural_tag": {"structures": [{"begin": "a", "end": "b"}], "triggers": ["x"]}}, "none of the triggers")])
def test_what_is_wrong_is_said(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(StructuredOutputError, match=says) as wrong:
        of_structured_outputs(fields, "the_field")
    assert wrong.value.field == "the_field" and str(wrong.value).startswith("the_field: ")


@pytest.mark.parametrize("value", [
    {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "a"}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}},
    {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}])
def test_formats_that_are_none(value: dict[str, Any]) -> None:
    with pytest.raises(StructuredOutputError, match=r"^response_format: "):
        of_response_format(value)


def test_keywords_without_an_implementation_are_named() -> None:
    for keyword, value in (("uniqueItems", True), ("propertyNames", {}), ("not", {}), ("contains", {}), ("if", {})):
        assert keyword in check(JSON_SCHEMA, json.dumps({keyword: value}), [])


INTEGER = {"type": "integer"}
USED_UP = {"type": "object", "properties": {"k": INTEGER}, "patternProperties": {"^k$": {}},
           "additionalProperties": False}


@pytest.mark.parametrize("schema", [
    USED_UP,
    USED_UP | {"required": ["k"]},
    {"type": "object", "patternProperties": {"^(a|b)$": INTEGER}, "required": ["a", "b"],
     "additionalProperties": False},
    {"type": "object", "properties": {"deep": {"type": "array", "items": {"anyOf": [{"type": "null"}, USED_UP]}}}},
    {"$defs": {"used": USED_UP}, "type": "array", "items": {"$ref": "#/$defs/used"}}])
def test_a_pattern_whose_names_are_used_up_is_refused_with_its_place(schema: dict[str, Any]) -> None:
    """It compiled, and an output that went on behind the last name ended in `NoExtensionBias` after a 200."""
    said = refused(schema)
    assert "no token follows" in said and "patternProperties" in said, said


@pytest.mark.parametrize("target", [
    {"$ref": "#/$defs/x"},
    {"allOf": [{"$ref": "#/$defs/x"}]},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]},
    {"type": "array", "prefixItems": [{"$ref": "#/$defs/x"}], "minItems": 1},
    {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 2},
    {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]}])
def test_a_reference_without_end_is_refused_by_name(target: dict[str, Any]) -> None:
    for use in ({"properties": {"a": {"$ref": "#/$defs/x"}}}, {"additionalProperties": {"$ref": "#/$defs/x"}},
                {"patternProperties": {"^a": {"items": {"$ref": "#/$defs/x"}}}}):
        said = refused(use | {"type": "object", "$defs": {"x": target, "y": {"$ref": "#/$defs/x"}}})
        assert said.startswith("$ref '#/$defs/") and "ever ends" in said


def test_rules_that_never_end_and_schemas_within_them_are_refused() -> None:
    assert "no token follows" in check(LARK, 'start: "a" x\nx: x "b"\n', [])
    assert "patternProperties" in check(LARK, f'start: "a" %json {json.dumps(USED_UP)}\n', [])


@pytest.mark.parametrize("schema", [
    {"$defs": {"x": {"type": "object", "properties": {"next": {"$ref": "#/$defs/x"}, "n": INTEGER}}},
     "$ref": "#/$defs/x"},
    {"$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"},
    {"$defs": {"x": {"anyOf": [INTEGER, {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}},
                                         "required": ["x"]}]}}, "$ref": "#/$defs/x"},
    {"$defs": {"unused": {"$ref": "#/$defs/unused"}}, "type": "object"},
    {"type": "object", "properties": {"x": INTEGER}, "patternProperties": {"^x": INTEGER},
     "additionalProperties": False},
    {"type": "object", "properties": {"k": INTEGER}, "patternProperties": {"^k$": INTEGER}},
    {"type": "object", "patternProperties": {"^[0-9]{3}$": INTEGER, "^[a-z]$": {}}, "additionalProperties": False}])
def test_schemas_that_end_pass(schema: dict[str, Any]) -> None:
    assert refused(schema) == ""


def refused(schema: dict[str, Any]) -> str:
    grammar = json_schema(schema, "json")
    return check(grammar.kind, grammar.text, [])


def test_of_random_schemas_none_that_passes_has_a_text_that_dies() -> None:
    """Longer texts than the check writes, of schemas with a fixed seed; those that it refuses do die."""
    draw, passed, died = random.Random(7), 0, 0
    for number in range(100):
        schema = random_schema(draw, 3)
        grammar = json_schema(schema, "json")
        said = check(grammar.kind, grammar.text, [])
        died += "no token follows" in said
        if said:
            continue
        passed += 1
        matcher, objection = compiled(BYTES, grammar.kind, grammar.text)
        assert not objection
        for _ in range(4):
            text, why = random_text(matcher, random.Random(number), 200)
            assert not why, (schema, text, why)
    assert passed > 20 and died
