"""Structured output: from the fields of a request to one grammar.

    response_format                         OpenAI's: text, json_object, json_schema
    structured_outputs                      vLLM's: json, json_object, regex, choice, grammar, structural_tag
    guided_json, guided_regex, ...          vLLM's older names

What a schema may say is what the compiler implements: it refuses other keywords by name (`slotwise.grammar_compiler`).
A JSON schema is enforced whether it is `strict` or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slotwise.compat.vllm import ignored_key
from slotwise.core.params import JSON_SCHEMA, LARK, REGEX, Grammar, in_ascii
from slotwise.grammar_compiler import COMPILER, OF_NAMES

MAX_DEPTH = 64  # values within values, of a schema
MAX_CHOICES = 16_384
MAX_TAGS = 64
MAX_MULTIPLE = 100_000  # of `multipleOf`: compiling takes time in proportion
ANY_OBJECT = {"type": "object"}
LITERALS = ("const", "enum", "default", "examples")  # keywords whose values are data, not schemas
WHITE_SPACE = r" |(\r?\n){1,2}[ \t]{0,32}"  # between JSON's symbols: bounded, for small models never leave it
FIELDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")  # one of them is the constraint
OPTIONS = ("whitespace_pattern", "disable_any_whitespace")
NEUTRAL: dict[str, tuple[Any, ...]] = {  # further fields of vLLM's, with the values that are accepted
    "disable_fallback": (None, False, True), "disable_additional_properties": (None, False), "name": (None,)}
KEYS = {  # of `response_format`, by its type
    "text": (), "json_object": ("schema",), "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers")}


class StructuredOutputError(ValueError):
    """Fields that describe no grammar.  `field` is the request's; the message begins with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def of_response_format(value: Mapping[str, Any]) -> Grammar | None:
    """The grammar of `response_format`; None for text.

    Raises:
        StructuredOutputError: the format is not known.
    """
    field = "response_format"
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise StructuredOutputError(
            field, f"type must be text, json_object, json_schema or structural_tag, not {_shown(kind)}")
    _refuse_others(value, field, "", ("type", *KEYS[kind]))
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return json_schema(ANY_OBJECT if schema is None else schema, field)
    if kind == "json_schema":
        described = value.get("json_schema")
        if not isinstance(described, Mapping) or not isinstance(described.get("name", ""), str):
            raise StructuredOutputError(field, "json_schema must be an object with a name and a schema")
        _refuse_others(described, field, "json_schema.", ("name", "description", "schema", "strict"))
        if not isinstance(described.get("strict"), bool | None):
            raise StructuredOutputError(field, "json_schema.strict must be true or false")
        if (schema := described.get("schema")) is None:
            raise StructuredOutputError(field, "json_schema has no schema")
        return json_schema(schema, field)
    return structural_tag(value, field)


def of_structured_outputs(value: Mapping[str, Any], field: str = "structured_outputs") -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`; None where it constrains nothing.

    Args:
        field: what messages call it.

    Raises:
        StructuredOutputError: an unknown field, or several constraints, or one that is not valid.
    """
    for name, one in value.items():
        if name in NEUTRAL:
            if one not in NEUTRAL[name]:
                raise StructuredOutputError(field, f"{name} is not supported")
        elif name not in FIELDS + OPTIONS and not (name.startswith("_") and one is None):
            raise StructuredOutputError(field, f"there is no {_shown(name)}; one of {', '.join(FIELDS)} is needed")
    given = [name for name in FIELDS if value.get(name) is not None and value[name] is not False]
    if len(given) > 1:
        raise StructuredOutputError(field, f"only one constraint is possible, not {' and '.join(given)}")
    if not given:
        return None
    if given[0] in ("json", "json_object"):
        schema = ANY_OBJECT if given[0] == "json_object" else value["json"]
        return json_schema(schema, field, value.get("whitespace_pattern"), value.get("disable_any_whitespace"))
    if any(value.get(name) for name in OPTIONS):
        raise StructuredOutputError(field, f"{' and '.join(OPTIONS)} are of json alone")
    return {"regex": regex, "choice": choice, "grammar": lark, "structural_tag": structural_tag}[given[0]](
        value[given[0]], field)


def json_schema(schema: object, field: str, whitespace_pattern: object = None, no_whitespace: object = None) -> Grammar:
    """The grammar of the JSON texts that match a schema.

    Args:
        schema: an object, or a text that is one.
        whitespace_pattern: a regular expression for the white space between JSON's symbols.
        no_whitespace: there is none.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise StructuredOutputError(field, f"the schema is not valid JSON ({error})") from error
    if not isinstance(schema, Mapping | bool):
        raise StructuredOutputError(field, f"a schema must be an object, not {_shown(schema)}")
    _check_schema(schema, field)
    if not isinstance(whitespace_pattern, str | None):
        raise StructuredOutputError(field, "whitespace_pattern must be a text")
    if no_whitespace not in (None, False, True):
        raise StructuredOutputError(field, "disable_any_whitespace must be true or false")
    options = {"whitespace_flexible": False} if no_whitespace else {
        "whitespace_pattern": WHITE_SPACE if whitespace_pattern is None else in_ascii(whitespace_pattern)}
    schema = {**({"allOf": [schema]} if isinstance(schema, bool) else _in_ascii(schema)), COMPILER: options}
    return _grammar(JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), field)


def regex(pattern: object, field: str) -> Grammar:
    """The grammar of the texts that a regular expression matches as a whole, in Rust's syntax."""
    if not isinstance(pattern, str):
        raise StructuredOutputError(field, f"a regular expression must be a text, not {_shown(pattern)}")
    return _grammar(REGEX, pattern, field)


def choice(texts: object, field: str) -> Grammar:
    """The grammar of a few texts."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise StructuredOutputError(field, "choices must be a list of texts")
    if not 0 < len(texts) <= MAX_CHOICES:
        raise StructuredOutputError(field, f"there must be 1 to {MAX_CHOICES} choices, not {len(texts)}")
    return _grammar(LARK, f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, texts))}\n", field)


def lark(text: object, field: str) -> Grammar:
    """A grammar in Lark's syntax, or in GBNF."""
    if not isinstance(text, str):
        raise StructuredOutputError(field, f"a grammar must be a text, not {_shown(text)}")
    return _grammar(LARK, text, field)


def structural_tag(value: object, field: str) -> Grammar:
    """The grammar of free text in which a trigger begins one of several tags, whose content matches a schema.

    Args:
        value: `structures`, each with `begin`, `schema` and `end`, and `triggers`; or a text that is such an object.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise StructuredOutputError(field, f"the structural tag is not valid JSON ({error})") from error
    tag: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    structures: Any = tag.get("structures")
    triggers: Any = tag.get("triggers")
    if not _is_list(structures, Mapping) or not _is_list(triggers, str) or not all(triggers):
        raise StructuredOutputError(
            field, f"a structural tag has 1 to {MAX_TAGS} structures (begin, schema, end), and as many triggers")
    _refuse_others(tag, field, "", ("type", *KEYS["structural_tag"]))
    rules = [f"start: ({' | '.join(f'tag_{index}' for index in range(len(structures)))})* TEXT", "TEXT: /(.|\\n)*/"]
    for index, one in enumerate(structures):
        _refuse_others(one, field, f"structures[{index}].", ("begin", "schema", "end"))
        begin, end = one.get("begin"), one.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise StructuredOutputError(field, f"begin and end of structure {index} must be texts")
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise StructuredOutputError(field, f"structure {index} begins with none of the triggers")
        schema = json_schema(one.get("schema", ANY_OBJECT), field).text
        parts = [f"trigger_{index}", _quoted(begin[len(trigger):]), f"%json {schema}", _quoted(end)]
        rules += [f"tag_{index}: {' '.join(parts)}", f"trigger_{index}[lazy]: TEXT {_quoted(trigger)}"]
    return _grammar(LARK, "\n".join(rules) + "\n", field)


def _refuse_others(value: Mapping[str, Any], field: str, where: str, known: Sequence[str]) -> None:
    """Raises StructuredOutputError for a key that is not known, and has a value."""
    if key := ignored_key(value, known, {}):
        raise StructuredOutputError(field, f"{where}{key:.60} is not supported")


def _is_list(value: object, kind: type) -> bool:
    return (isinstance(value, Sequence) and not isinstance(value, str) and 0 < len(value) <= MAX_TAGS
            and all(isinstance(one, kind) for one in value))


def _in_ascii(value: Any) -> Any:
    """A schema with its patterns as `in_ascii` writes them: the compiler misreads a hyphen before a class."""
    if isinstance(value, Mapping):
        return {key: _value_in_ascii(key, one) for key, one in value.items()}
    return [_in_ascii(one) for one in value] if isinstance(value, list) else value


def _value_in_ascii(keyword: str, value: Any) -> Any:
    """The value of a schema's keyword; keys of those in `OF_NAMES` are names, and no keywords."""
    if keyword in LITERALS:
        return value
    if keyword == "pattern" and isinstance(value, str):
        return in_ascii(value)
    if keyword not in OF_NAMES or not isinstance(value, Mapping):
        return _in_ascii(value)
    if keyword != "patternProperties":
        return {name: _in_ascii(one) for name, one in value.items()}
    found: dict[str, list[Any]] = {}
    for name, one in value.items():  # several may become the same
        found.setdefault(in_ascii(name), []).append(_in_ascii(one))
    return {name: ones[0] if len(ones) == 1 else {"allOf": ones} for name, ones in found.items()}


def _check_schema(schema: object, field: str) -> None:
    """Raises StructuredOutputError for one that is too deep, or that would change how schemas are compiled."""
    level: list[Any] = [schema]
    depth = 0
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise StructuredOutputError(field, f"a schema may be at most {MAX_DEPTH} values deep")
        inner: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                _check_object(value, field)
                inner += value.values()
            elif isinstance(value, Sequence) and not isinstance(value, str):
                inner += value
        level = inner


def _check_object(value: Mapping[Any, Any], field: str) -> None:
    if COMPILER in value:
        raise StructuredOutputError(field, f"{COMPILER} is not supported")
    multiple = value.get("multipleOf")
    if isinstance(multiple, int) and multiple > MAX_MULTIPLE:
        raise StructuredOutputError(field, f"multipleOf may be at most {MAX_MULTIPLE}")


def _grammar(kind: str, text: str, field: str) -> Grammar:
    try:
        return Grammar(kind, text, field)
    except ValueError as error:  # it begins with the field
        raise StructuredOutputError(field, str(error).removeprefix(f"{field}: ")) from error


def _quoted(text: str) -> str:
    return json.dumps(text)


def _shown(value: object) -> str:
    return f"{value!r:.40}"
