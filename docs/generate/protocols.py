"""What Slotwise does with every field of vLLM's and OpenAI's protocols, and every argument of vLLM's offline API.

`protocols.json` lists them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from docs.generate.fields import note_of, notes_of
from docs.generate.http import properties, values
from docs.generate.markdown import code, sentence, table

from slotwise.api.app import BODIES
from slotwise.api.protocol.unsupported import AS_ANOTHER, HINTS, unsupported_fields
from slotwise.compat.vllm import ANY, RULES, SAME
from slotwise.core.params import PARAMETERS, RANGES
from slotwise.core.setting_fields import Range, settings_of
from slotwise.engine.config import EngineConfig
from slotwise.offline.arguments import OWN, SETTINGS
from slotwise.offline.sampling_params import INSTEAD, NAMES, UNSUPPORTED, SamplingParams

OBEYED, NEUTRAL, REFUSED = "obeyed", "neutral", "refused"
LISTS = Path(__file__).with_name("protocols.json")


def names(protocol: str, path: str) -> list[str]:
    """Returns the fields of `protocol`, "vllm" or "openai", at a route; those of a class for "vllm offline"."""
    listed: list[str] = json.loads(LISTS.read_text())[protocol][path]
    return listed


def paths_of(protocol: str) -> list[str]:
    """Returns the routes whose fields are listed."""
    return [path for path in json.loads(LISTS.read_text())[protocol] if path in BODIES]


def treatment(kind: type[msgspec.Struct], name: str) -> str:
    """Returns what Slotwise does with a field.  Raises KeyError for one that it does not know."""
    if name in HINTS or name in AS_ANOTHER:
        return NEUTRAL
    if name in (unsupported := unsupported_fields(kind)):
        return NEUTRAL if len(unsupported[name]) > 1 else REFUSED
    if name not in kind.__struct_fields__:
        raise KeyError(name)
    return OBEYED


def compared_with_vllm() -> str:
    """Returns a table for each route with vLLM's fields."""
    return _tables("vllm")


def compared_with_openai() -> str:
    """Returns a table for each route with the fields that OpenAI's protocol has and vLLM's does not."""
    return _tables("openai", "vllm")


def offline_treatment(kind: str, name: str) -> tuple[str, tuple[Any, ...]]:
    """Returns what `LLM` or `SamplingParams` does with an argument, and the values accepted where it is not obeyed.

    Raises:
        KeyError: it is not known.
    """
    unsupported = {one: rule.accepted for one, rule in RULES.items()} if kind == "LLM" else UNSUPPORTED
    if name in unsupported:
        return NEUTRAL if unsupported[name] else REFUSED, unsupported[name]
    if name not in ((*SETTINGS, *OWN) if kind == "LLM" else NAMES):
        raise KeyError(name)
    return OBEYED, ()


def offline_arguments() -> str:
    """Returns the table of the arguments of vLLM's `LLM`."""
    declared = settings_of(EngineConfig)
    ruled = {name: rule.told(str)[not rule.accepted] for name, rule in RULES.items()}
    return _offline("LLM", {name: note_of(one) for name, one in declared.items()} | OWN | ruled, {
        name: one.range for name, one in declared.items() if one.range is not None})


def offline_parameters() -> str:
    """Returns the table of the arguments of vLLM's `SamplingParams`."""
    helps = {name: declared.help for name, declared in PARAMETERS.items()}
    return _offline("SamplingParams", helps | notes_of(SamplingParams) | INSTEAD, RANGES)


def _offline(kind: str, notes: Mapping[str, str], ranges: Mapping[str, Range]) -> str:
    rows = []
    for name in sorted(names("vllm offline", kind)):
        done, accepted = offline_treatment(kind, name)
        values = {OBEYED: str(ranges.get(name, "")), REFUSED: "none"}.get(done) or " or ".join(map(_written, accepted))
        rows.append((code(name), done, " ".join(filter(None, (sentence(values), sentence(notes.get(name, "")))))))
    return table(("argument", "Slotwise", "values accepted, other than `None`, and what holds"), rows)


def _written(value: object) -> str:
    if value is ANY[0]:
        return "any value"
    return "the value of `model`" if value == SAME else code(repr(value))


def _tables(protocol: str, other: str = "") -> str:
    parts = []
    for path in paths_of(protocol):
        shown = set(names(protocol, path)) - set(names(other, path) if other else ())
        if shown:
            kind, schemas = BODIES[path], properties(BODIES[path])
            rows = [(code(name), treatment(kind, name), _accepted(kind, name, schemas[name])) for name in sorted(shown)]
            parts.append(f"`POST {path}`:\n\n" + table(("field", "Slotwise", "values accepted, other than null"), rows))
    return "\n\n".join(parts)


def _accepted(kind: type[msgspec.Struct], name: str, schema: dict[str, Any]) -> str:
    if name in AS_ANOTHER:
        return sentence(f"the value of {code(AS_ANOTHER[name])}")
    if name not in (unsupported := unsupported_fields(kind)):
        return sentence(values(schema))
    return sentence(" or ".join(code(json.dumps(value)) for value in unsupported[name][1:]) or "none")
