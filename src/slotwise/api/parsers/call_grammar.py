"""Grammars of outputs that must call tools, or must match something after the reasoning: in llguidance's Lark syntax.

    start: thinking calls               a call is required, or a tool is named
    start: thinking tagged* TEXT        calls are free, and the arguments of strict tools match their schemas
    start: thinking answer              structured output, after the reasoning
    start: thinking (calls | answer)    with tools next to it

Rules are texts; a special token is written by its name, as `<|message|>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slotwise.api.parsers.base_parser import BREAK, MOST_CALLS, NUMBER, Markers, Parameters, Syntax, Tools
from slotwise.json_pointer import at_pointer

TEXT = r"TEXT: /(.|\n)*/"
FREE = {NUMBER: "/[0-9]+/", BREAK: r"/\n?/"}
LIMITS = ("pattern", "format", "minLength", "maxLength", "allOf", "not", "if", "enum", "const", "$ref")  # of texts
OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions",
              "$schema", "strict", "x-guidance"}  # what a schema may have that is written by parameters
KEY = re.compile(r"[^<>\n\"]+")
NAMED_KEY = re.compile(r"[\w.-]+")
MAX_FREE = 32  # parameters of a tool, where values are JSON
NAMED = re.compile(r"<[^<>\[\]]+>")  # how a grammar can name a special token


class Schemas(NamedTuple):
    """The tools that may be called, each with the JSON schema of its arguments, as text."""

    by_name: Mapping[str, str]
    most: int = MOST_CALLS  # calls of one output
    given: Tools | None = None  # as the request has them; None: the same

    @property
    def tools(self) -> Tools:
        """The schemas by which a parser reads arguments."""
        return self.given if self.given is not None else {
            name: json.loads(schema) for name, schema in self.by_name.items()}


def can_write(syntax: Syntax, markers: Markers) -> bool:
    """Whether a grammar can name the special tokens of a syntax."""
    return all(NAMED.fullmatch(spelling) for spelling in markers.spellings if spelling in "".join(map(str, syntax)))


def terms(text: str, markers: Markers) -> str:
    """A literal text as terms of a rule."""
    special = [*FREE, *[spelling for spelling in markers.spellings if spelling in text]]
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return " ".join([FREE.get(piece, piece) if piece in special else json.dumps(piece, ensure_ascii=False)
                     for piece in pieces if piece])


def call_rules(syntax: Syntax, markers: Markers, schemas: Schemas) -> list[str]:
    """The rule `calls`, one or more of them, and the rule `call`."""
    names = list(schemas.by_name)
    more = min(schemas.most, syntax.most) - 1
    repeated = f"({terms(syntax.separator, markers)} call){{0,{more}}}" if more > 0 else ""
    rules = [f"calls: {terms(syntax.opening, markers)} call {repeated} {terms(syntax.closing, markers)}",
             f"call: {' | '.join(f'call_{index}' for index in range(len(names)))}"]
    return rules + _each(syntax, markers, schemas, syntax.before, "call")


def tagged_rules(syntax: Syntax, markers: Markers, schemas: Schemas) -> list[str]:
    """The rule `tagged`: text, and a call or a list of calls behind it that is whole."""
    trigger = f"trigger{_text_until(syntax.trigger, markers)}"
    if syntax.parameters is not None and syntax.parameters.end:  # marks around calls are text, written or left out
        syntax = syntax._replace(before=syntax.trigger, after=syntax.parameters.end, opening="", closing="")
    if syntax.opening:
        rules = call_rules(syntax._replace(opening=syntax.opening.removeprefix(syntax.trigger)), markers, schemas)
        return ["tagged: trigger calls", trigger, *rules]
    names = range(len(schemas.by_name))
    return [f"tagged: trigger ({' | '.join(f'tag_{index}' for index in names)})", trigger,
            *_each(syntax, markers, schemas, syntax.before.removeprefix(syntax.trigger), "tag")]


def _text_until(spelling: str, markers: Markers) -> str:
    """The end of a rule: any text and a literal one, which begins with a special token or comes as early as it can."""
    is_special = any(token in spelling for token in markers.spellings)
    return f"{'' if is_special else '[lazy]'}: TEXT {terms(spelling, markers)}"


def _each(syntax: Syntax, markers: Markers, schemas: Schemas, before: str, rule: str) -> list[str]:
    rules = []
    for index, (name, schema) in enumerate(schemas.by_name.items()):
        written = json.dumps(name) if syntax.quotes else name
        head, tail = terms(before + written + syntax.middle, markers), terms(syntax.after, markers)
        rules += [f"{rule}_{index}: {head} arguments_{index} {tail}"]
        rules += [f"arguments_{index}: %json {schema}"] if syntax.parameters is None else _parameter_rules(
            syntax.parameters, markers, index, json.loads(schema))
    return rules


def _parameter_rules(syntax: Parameters, markers: Markers, index: int, schema: Any) -> list[str]:
    """The rule `arguments_INDEX`: the parameters of a tool in the order of its schema; any, where it names none."""
    rules, required, optional = list[str](), list[str](), list[str]()
    properties = schema.get("properties") or {}
    for number, (key, given) in enumerate(properties.items()):
        name, one = f"parameter_{index}_{number}", resolved(given, schema)
        after = terms(syntax.after, markers)
        if is_raw := not syntax.is_json and "string" in types_of(one, schema):
            rules.append(f"{name}_value{_text_until(syntax.after, markers)}")
        else:
            shared = {word: schema[word] for word in ("$defs", "definitions", "x-guidance") if word in schema}
            rules.append(f"{name}_value: %json {json.dumps(shared | one)}")
        value = f"{name}_value" if is_raw else f"{name}_value {after}"
        if not syntax.is_json and (texts := _texts_of(one, schema)) is not None:
            rules.pop()
            value = f"({' | '.join(terms(text, markers) for text in texts)}) {after}"
        line = "" if syntax.is_json else FREE[BREAK]
        rules.append(f"{name}: {terms(syntax.before + key + syntax.middle, markers)} {value} {line}")
        (required if key in schema.get("required", ()) else optional).append(name)
    if not properties:
        name = f"parameter_{index}"
        head = f"{terms(syntax.before, markers)} /[^<>()=, \"\\n]+/ {terms(syntax.middle, markers)}"
        if syntax.is_json:
            more = f"({terms(syntax.separator, markers)} {name}){{0,{MAX_FREE - 1}}}"
            return [f"arguments_{index}: ({name} {more})?", f"{name}: {head} {name}_value", f"{name}_value: %json {{}}"]
        return [f"arguments_{index}: {name}*", f"{name}: {head} {name}_value {FREE[BREAK]}",
                f"{name}_value{_text_until(syntax.after, markers)}"]
    return [f"arguments_{index}: {_joined(required, optional, syntax, markers)}", *rules]


def _joined(required: Sequence[str], optional: Sequence[str], syntax: Parameters, markers: Markers) -> str:
    """Rules in this order, with separators between those that are there."""
    separator = terms(syntax.separator, markers)
    if required or not separator:
        return " ".join([f" {separator} ".join(required), *[f"({separator} {name})?" for name in optional]])
    firsts = [" ".join([name, *[f"({separator} {other})?" for other in optional[place + 1 :]]])
              for place, name in enumerate(optional)]
    return f"({' | '.join(firsts)})?"


def describes(syntax: Syntax, tools: Tools) -> bool:
    """Whether a grammar can write the arguments of all tools: texts that are not JSON may have few limits."""
    parameters = syntax.parameters
    return parameters is None or all(_is_plain(schema, is_json=parameters.is_json) for schema in tools.values())


def _is_plain(schema: Mapping[str, Any], *, is_json: bool) -> bool:
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list) or not schema.keys() <= OF_OBJECTS:
        return False
    if is_json and len(properties) > MAX_FREE:
        return False
    return {*map(str, required)} <= properties.keys() and all(
        (NAMED_KEY if is_json else KEY).fullmatch(key) and isinstance(one, dict) and (
            is_json or _is_writable(resolved(one, schema), schema))
        for key, one in properties.items())


def _is_writable(schema: Any, root: Any) -> bool:
    """Whether rules describe a parameter that is not JSON where it is a text: one of several, or any."""
    return _texts_of(schema, root) is not None or "string" not in types_of(schema, root) or not any(
        f'"{limit}": ' in json.dumps(schema) for limit in LIMITS)


def resolved(schema: Any, root: Any) -> Any:
    """Merges the schema that `$ref` names, or the only one of `allOf`, into a schema.  Args: root: of the tool."""
    seen: set[str] = set()
    while isinstance(schema, dict):
        target, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(target, str) and target.startswith("#") and target not in seen:
            seen.add(target)
            name, other = "$ref", at_pointer(root, target.removeprefix("#").removeprefix("/"))
        elif isinstance(parts, list) and len(parts) == 1:
            name, other = "allOf", parts[0]
        else:
            break
        if not isinstance(other, dict):
            break
        schema = other | {key: value for key, value in schema.items() if key != name}
    return schema


def types_of(schema: Any, root: Any) -> set[str]:
    """The types that a value may have; empty: any.  A value that may be a string is written as text, not as JSON."""
    found: set[str] = set()
    waiting, seen = [schema], set[str]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or (str(one.get("$ref", "")) in seen):
            continue
        seen |= {one["$ref"]} if isinstance(one.get("$ref"), str) else set()
        one = resolved(one, root)
        kind = one.get("type")
        kinds = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
        if not kinds and (texts := _listed(one)) is not None:
            kinds = {"null" if text is None else "string" for text in texts}
        found |= kinds
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += one[name] if isinstance(one.get(name), list) else ()
    return found


def _listed(schema: Mapping[str, Any]) -> list[str | None] | None:
    """The only texts that a parameter may have, and None for null; None: any, or others."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    is_known = isinstance(listed, list) and listed and all(one is None or isinstance(one, str) for one in listed)
    return listed if is_known else None


def _texts_of(schema: Any, root: Any) -> list[str] | None:
    """The only texts that a parameter may have, as they are written; None: any."""
    alternatives = [schema] if "enum" in schema else next(
        (schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), [schema])
    found: list[str] = []
    for one in alternatives:
        one = resolved(one, root)
        listed = [None] if one == {"type": "null"} else _listed(one) if isinstance(one, dict) else None
        if listed is None:
            return None
        found += ["null" if text is None else text for text in listed]
    return found or None


def thinking_rules(markers: Markers, opening: str, closing: str, begun: bool | None) -> list[str]:
    """The rule `thinking`: what stands before an answer.

    Args:
        begun: the output begins within reasoning; None: it may begin with reasoning.
    """
    inner = [f"reasoned{_text_until(closing, markers)}", r"BREAKS: /\n{0,4}/"]
    if begun:
        return ["thinking: reasoned BREAKS", *inner]
    return [rf"thinking: ({terms(opening, markers)} reasoned BREAKS)?", *inner]


def lark_of_regex(pattern: str) -> str:
    """A regular expression as a term of a rule."""
    return "/" + re.sub(r"\\.|/", lambda found: r"\/" if found.group() == "/" else found.group(), pattern,
                        flags=re.DOTALL) + "/"


def grammar(start: str, *rules: Sequence[str]) -> str:
    """A whole grammar."""
    return "\n".join([f"start: {start}", *[rule for some in rules for rule in some], TEXT]) + "\n"
