"""Routes, request bodies and errors of the server, from its OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import msgspec
from docs.generate.fields import note_of, notes_of
from docs.generate.markdown import code, first_sentence, listed, number, sentence, table

from slotwise.api.admin.openapi import document
from slotwise.api.app import BODIES, ROUTES
from slotwise.api.asgi import OPEN_TO_ALL
from slotwise.api.limits.tiers import TierSettings, TierTable
from slotwise.api.pooling.pooled_requests import PooledFields
from slotwise.api.protocol.protocol import CompletionRequest, Generate, GenerationFields
from slotwise.api.protocol.unsupported import unsupported_fields
from slotwise.core.params import PARAMETERS
from slotwise.core.setting_fields import INT64, settings_of
from slotwise.engine.scheduling import Scheduling, changes_schema

Json = dict[str, Any]
CHANGES = "/admin/scheduling"
COMPONENTS = "#/components/schemas/"
TYPES = {"integer": "an integer", "number": "a number", "string": "a string", "boolean": "true or false",
         "object": "an object"}
KINDS = {"tiers": "all tiers: docs/tiers.md"}
RETIRED = ("max_step_context",)
UNBOUNDED = 1 << 31  # greater limits only keep numbers representable
NONE = re.compile(r"\bNone\b")


def routes() -> str:
    """Returns the table of routes."""
    described = _document()["paths"]
    rows = []
    for method, path, _ in ROUTES:
        shown = path.replace(":path}", "}")
        rows.append((code(f"{method} {shown}"), sentence(described[shown][method.lower()]["summary"]),
                     "No." if path in OPEN_TO_ALL else "Yes."))
    return table(("route", "response", "needs a key, where the server has keys"), rows)


def bodies() -> str:
    """Returns a section for the body of each route that takes one."""
    shared, parts = _fields_of(Generate), ["## Fields of completions and chats", _shared()]
    for kind in dict.fromkeys(BODIES.values()):
        paths = [path for path, one in BODIES.items() if one is kind]
        parts += [f"## POST {', '.join(paths)}", _docstring(kind),
                  _body(kind, shared if issubclass(kind, Generate) else ())]
    settings = {name: note_of(one) for name, one in settings_of(Scheduling).items()} | KINDS
    tiers = {"tiers": {"type": "array", "items": {"$ref": COMPONENTS + TierSettings.__name__}}}
    parts += [f"## PUT {CHANGES}", _table({"properties": changes_schema()["properties"] | tiers}, settings)]
    return "\n\n".join(filter(None, parts))


def tier_file() -> str:
    """Returns the fields of a `[[tier]]` table."""
    (reference,), components = msgspec.json.schema_components([TierTable], ref_template=COMPONENTS + "{name}")
    schema = components[reference["$ref"].removeprefix(COMPONENTS)]
    schema["properties"] = {name: of for name, of in schema["properties"].items() if name not in RETIRED}
    return _table(schema, notes_of(TierTable))


def statuses() -> str:
    """Returns the table of error statuses, each with the routes that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    paths = _document()["paths"]
    for path, methods in paths.items():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                found.setdefault((status, response["description"]), []).append(path)
    rows = []
    for (status, phrase), where in sorted(found.items()):
        known = sorted(set(where))
        if status != "200":
            rows.append((status, sentence(phrase), "All." if len(known) == len(paths) else listed(known) + "."))
    return table(("status", "meaning", "routes"), rows)


def _document() -> Json:
    content: Json = json.loads(document(ROUTES, OPEN_TO_ALL))
    return content


def _components() -> Json:
    schemas: Json = _document()["components"]["schemas"]
    return schemas


def properties(kind: type) -> Json:
    """Returns the JSON schemas of a body's fields."""
    found: Json = _components()[kind.__name__]["properties"]
    return found


def _fields_of(kind: type) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))


def _docstring(kind: type) -> str:
    """Returns the first sentence of a class' own docstring."""
    return sentence(first_sentence(vars(kind).get("__doc__")))


def _shared() -> str:
    """Returns the fields of both generating routes, as the first of them has them."""
    schema = _components()[CompletionRequest.__name__]
    kept = {name: schema["properties"][name] for name in _fields_of(Generate)}
    return _table({"properties": kept}, _notes(CompletionRequest), unsupported_fields(Generate))


def _body(kind: type, shared: Collection[str]) -> str:
    """Returns the fields of a body that are not in `shared`."""
    schema = _components()[kind.__name__]
    own = {name: of for name, of in schema["properties"].items() if name not in shared}
    return _table(schema | {"properties": own}, _notes(kind),
                  unsupported_fields(kind) if issubclass(kind, Generate | PooledFields) else ())


def _notes(kind: type) -> dict[str, str]:
    return {name: declared.help for name, declared in PARAMETERS.items()} | notes_of(GenerationFields) | notes_of(kind)


def _table(schema: Json, notes: dict[str, str], unsupported: Collection[str] = ()) -> str:
    """Returns the table of a schema's properties, and a sentence about those that are refused."""
    needed = schema.get("required", ())
    rows = []
    for name, of in schema["properties"].items():
        if name not in unsupported:
            meaning = sentence(NONE.sub("null", notes.get(name, "")))
            rows.append((code(name), sentence(values(of)), "Required. " * (name in needed) + meaning))
    text = table(("field", "values", "meaning"), rows)
    if refused := [name for name in schema["properties"] if name in unsupported]:
        text += f"\n\nNot supported, and refused with 400 unless the value has no effect: {listed(refused)}."
    return text


def values(schema: Json) -> str:
    """Returns the values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(values(one) for one in schema["anyOf"] if one != {"type": "null"}))
    if "enum" in schema:
        return " or ".join(code(json.dumps(value)) for value in schema["enum"] if value is not None)
    if "$ref" in schema:
        return f"an object with {listed(_components()[schema['$ref'].removeprefix(COMPONENTS)]['properties'])}"
    if schema.get("type") == "array":
        inner = values(schema["items"]) if schema.get("items") else ""
        return f"a list of ({inner})" if " or " in inner else f"a list of {_plural(inner)}"
    return TYPES.get(schema.get("type", ""), "any value") + _bounds(schema)


def _plural(one: str) -> str:
    noun, space, rest = one.partition(" ")[2].partition(" ")
    return f"{noun}s{space}{rest}"


def _bounds(schema: Json) -> str:
    least, most = schema.get("minimum", -INT64), schema.get("maximum", INT64)
    if "exclusiveMinimum" in schema:
        return f" above {number(schema['exclusiveMinimum'])}, at most {number(most)}"
    if least > -INT64:
        return f" from {number(least)} to {number(most)}" if most < UNBOUNDED else f" of at least {number(least)}"
    return f" of at most {schema['maxLength']:,} characters" if "maxLength" in schema else ""
