"""`qwen3_xml`: Qwen3-Coder, Qwen 3.5, Nemotron 3 and others.

    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A parameter is text; the tool's schema says which JSON type it is.  Text streams as it comes, any other value whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from slotwise.api.parsers.base_parser import ANY, FormatParser, Waiting
from slotwise.api.parsers.json_calls import dumped

NAME = re.compile(rf"[^<>\n{ANY}]+")
CLOSING = "</parameter>"
ENDS = ("\n" + CLOSING, CLOSING, "\n<parameter=", "\n</function>", "</function>")  # of a value
TEXT = {"string"}
WORDS = {"True": True, "False": False, "None": None}  # of Python, which models write, too


class Qwen3Xml(FormatParser):
    MODELS = "Qwen3-Coder, Qwen 3.5, Nemotron 3 and others"
    SPELLINGS = ("<tool_call>", "</tool_call>")

    def _parse(self) -> Waiting[None]:
        opening, closing = map(self.markers.of, self.SPELLINGS)
        while found := (yield from self.reader.until(self._say, opening, "<function=")):
            self.reader.keep()
            if found == opening:
                yield from self.reader.spaces()
            is_begun = found != opening or (yield from self.reader.skip("<function="))
            name = (yield from self._name()) if is_begun else ""
            kept = self.reader.pop_kept()
            if not name:
                self._say(found + kept)
                continue
            self._call(name)
            yield from self._parameters(self.tools.get(name, {}))
            yield from self.reader.spaces()
            yield from self.reader.skip(closing)

    def _name(self) -> Waiting[str]:
        """Reads a name and the end of its tag; "", and the name unread, if the tag does not end."""
        name = yield from self.reader.all_of(NAME)
        if not (yield from self.reader.skip(">")):
            self.reader.unread(name)
            return ""
        return name.strip()

    def _parameters(self, schema: Mapping[str, Any]) -> Waiting[None]:
        types = schema.get("properties")
        types = types if isinstance(types, dict) else {}
        self._argue("{")
        separator = ""
        while True:
            yield from self.reader.spaces()
            if not (yield from self.reader.skip("<parameter=")):
                break
            name = yield from self._name()
            if not name:
                self.reader.unread("<parameter=")
                break
            self._argue(f"{separator}{_written(name)}: ")
            separator = ", "
            if not (yield from (self._text() if _types(types.get(name)) == TEXT else self._value(types.get(name)))):
                return  # the output was cut
        yield from self.reader.skip("</function>")
        self._argue("}")

    def _value(self, schema: Any) -> Waiting[bool]:
        parts: list[str] = []
        is_whole = yield from self._raw(parts.append)
        if is_whole:
            self._argue(_meant(self.markers.spelled("".join(parts)), schema))
        return is_whole

    def _text(self) -> Waiting[bool]:
        self._argue('"')
        is_whole = yield from self._raw(lambda text: self._argue(_written(text)[1:-1]))
        if is_whole:
            self._argue('"')
        return is_whole

    def _raw(self, emit: Callable[[str], object]) -> Waiting[bool]:
        """Reads a value up to the end of its tag, without the line breaks around it.  Returns whether it ends."""
        yield from self.reader.skip("\n")
        found = yield from self.reader.until(emit, *ENDS)
        if found and CLOSING not in found:
            self.reader.unread(found.removeprefix("\n"))
        return bool(found)


def _written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any) -> set[str]:
    """The types that a value may have; empty: any."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    types = {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        for one in schema[name] if isinstance(schema.get(name), list) else ():
            types |= _types(one)
    return types


def _meant(text: str, schema: Any) -> str:
    """The JSON that a parameter's text means: itself where it is JSON that the schema allows, else a string."""
    types = _types(schema)
    stripped = text.strip()
    try:
        value = WORDS[stripped] if stripped in WORDS else json.loads(stripped, parse_constant=str)
        if "string" in types and (value is not None or "null" not in types):
            return _written(text)
        return dumped(value)
    except (ValueError, RecursionError):
        return _written(text)
