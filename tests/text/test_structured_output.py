"""From the fields of a request to a grammar: what each field may hold, and what is wrong with others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slotwise.core.grammar import JSON_SCHEMA, LARK, MAX_BYTES, REGEX, Grammar
from slotwise.text.grammar_check import check
from slotwise.text.structured_output import (
    WHITE_SPACE,
    StructuredOutputError,
    of_response_format,
    of_structured_outputs,
)

OBJECT = {"type": "object"}


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
