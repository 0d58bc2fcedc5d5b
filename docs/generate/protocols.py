"""What Slotwise does with every field of vLLM's and OpenAI's protocols, which `protocols.json` lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from docs.generate.http import properties, values
from docs.generate.markdown import code, sentence, table

from slotwise.server.openapi import BODIES
from slotwise.server.unsupported import HINTS, unsupported_fields

OBEYED, NEUTRAL, REFUSED = "obeyed", "neutral", "refused"
LISTS = Path(__file__).with_name("protocols.json")


def names(protocol: str, path: str) -> list[str]:
    """Returns the fields of `protocol`, "vllm" or "openai", at a route."""
    listed: list[str] = json.loads(LISTS.read_text())[protocol][path]
    return listed


def treatment(kind: type[msgspec.Struct], name: str) -> str:
    """Returns what Slotwise does with a field.  Raises KeyError for one that it does not know."""
    if name in HINTS:
        return NEUTRAL
    if name in (unsupported := unsupported_fields(kind)):
        return NEUTRAL if len(unsupported[name]) > 1 else REFUSED
    if name not in kind.__struct_fields__:
        raise KeyError(name)
    return OBEYED


def beside_vllm() -> str:
    """Returns a table for each route with vLLM's fields."""
    return _tables("vllm")


def beside_openai() -> str:
    """Returns a table for each route with the fields that OpenAI's protocol has and vLLM's does not."""
    return _tables("openai", "vllm")


def _tables(protocol: str, beside: str = "") -> str:
    parts = []
    for path in ("/v1/completions", "/v1/chat/completions"):
        shown = set(names(protocol, path)) - set(names(beside, path) if beside else ())
        if shown:
            kind, schemas = BODIES[path], properties(BODIES[path])
            rows = [(code(name), treatment(kind, name), _accepted(kind, name, schemas[name])) for name in sorted(shown)]
            parts.append(f"`POST {path}`:\n\n" + table(("field", "Slotwise", "values accepted, beside null"), rows))
    return "\n\n".join(parts)


def _accepted(kind: type[msgspec.Struct], name: str, schema: dict[str, Any]) -> str:
    if name not in (unsupported := unsupported_fields(kind)):
        return sentence(values(schema))
    return sentence(" or ".join(code(json.dumps(value)) for value in unsupported[name][1:]) or "none")
