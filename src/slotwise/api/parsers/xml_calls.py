"""Calls whose arguments are elements, each with its key and a text.

    <tool_call>                                                                             `qwen3_xml`
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
    <tool_call>weather                                                                      `glm45`
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
    <minimax:tool_call>                                                                     `minimax_m2`
    <invoke name="weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>

`minimax_m3` writes objects and lists as elements, too, with `item` for those of a list.  A parameter is text; an
attribute of its element or the tool's schema says which JSON type it is.  Text streams as it comes, any other value
whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from slotwise.api.parsers.base_parser import ANY, BREAK, FormatParser, Markers, Parameters, Syntax, Tools, Waiting
from slotwise.api.parsers.call_grammar import resolved, types_of
from slotwise.api.parsers.json_calls import dumped

NAME = re.compile(rf"[^<>\n\"{ANY}]+")
ATTRIBUTES = re.compile(rf"[^<>\n{ANY}]*")
TEXT = {"string"}
WORDS = {"True": True, "False": False, "None": None}  # of Python, which models write, too
MAX_LITERAL = 1 << 16  # characters of a value that may be Python's
EMPTY = {"array": "[]", "object": "{}"}  # what an element without content means
MAX_NESTED = 64  # elements within each other
Content = str | list[tuple[str, "Content"]]  # of an element
CDATA = ("<![CDATA[", "]]>")


class Xml(NamedTuple):
    """The marks of calls and their parameters."""

    call: str  # before a call's name
    name_end: str  # "": a line break, or what comes next
    parameter: str  # before a key
    key_end: str
    value_end: str
    end: str  # of a call
    value: str = ""  # before a value, after white space
    tag_end: str = ""  # after the attributes that follow a name or a key
    sections: tuple[tuple[str, str], ...] = ()  # marks that stand around each call, or may
    around: tuple[str, str] = ("", "")  # marks that stand around all calls, or may
    has_breaks: bool = False  # a value stands on lines of its own
    is_lenient: bool = False  # a value ends where the next parameter begins, or the call ends, too
    has_cdata: bool = False  # a value may be a section of CDATA

    @property
    def syntax(self) -> Syntax | None:
        line = "\n" if self.has_breaks else ""
        before = "".join([begin + BREAK for begin, _ in self.sections])
        after = "".join([BREAK + end for _, end in self.sections[::-1]])
        opening, closing = (self.around[0] + BREAK, BREAK + self.around[1]) if self.around[0] else ("", "")
        tag_end = self.tag_end
        parameters = Parameters(
            self.parameter, self.key_end + tag_end + (BREAK + self.value if self.value else "") + line,
            line + self.value_end, self.end)
        return Syntax(before + self.call, self.name_end + tag_end + BREAK, self.end + after, self.call, opening, BREAK,
                      closing, quotes=False, parameters=parameters)


class XmlCalls(FormatParser):
    """A call counts once its name and the end of its tag are known."""

    layout: Xml

    def __init__(self, markers: Markers, tools: Tools, layout: Xml) -> None:
        of = markers.of
        coded: dict[str, Any] = {name: of(text) for name, text in layout._asdict().items() if isinstance(text, str)}
        sections = [layout.around, *layout.sections] if layout.around[0] else layout.sections
        coded["sections"] = tuple([(of(begin), of(end)) for begin, end in sections])
        super().__init__(markers, tools, layout._replace(**coded))

    def _parse(self) -> Waiting[None]:
        layout, reader = self.layout, self.reader
        sections = [begin for begin, _ in layout.sections]
        while found := (yield from reader.until(self._say, layout.call, *sections)):
            reader.keep()
            mark = found
            while mark and mark != layout.call:
                yield from reader.spaces()
                mark = yield from reader.at(layout.call, *sections)
                reader.take(len(mark))
            name = (yield from self._name(layout.name_end)) if mark else ""
            kept = reader.pop_kept()
            if not name:
                self._say(found + kept)
                continue
            self._call(name)
            yield from self._parameters(self.tools.get(name, {}))
            for _, end in layout.sections[::-1]:
                yield from reader.spaces()
                yield from reader.skip(end)

    def _name(self, end: str) -> Waiting[str]:
        """Reads a call's name and the end of its tag; "", and the name unread, if the tag does not end."""
        reader, layout = self.reader, self.layout
        name = yield from reader.all_of(NAME)
        if end:
            is_whole = yield from reader.skip(end)
        else:
            yield from reader.spaces()
            is_whole = bool((yield from reader.at(layout.parameter, layout.end))) or not (
                (yield from reader.peek()) or reader.is_cut)
        if is_whole and layout.tag_end:
            yield from reader.all_of(ATTRIBUTES)
            is_whole = yield from reader.skip(layout.tag_end)
        elif not is_whole and end:
            reader.unread(name)
        return name.strip() if is_whole else ""

    def _key(self) -> Waiting[tuple[str, str]]:
        """Reads a key, and the attributes of its tag; ("", "") if the tag does not end, and the key unread."""
        reader, layout = self.reader, self.layout
        key, attributes = (yield from reader.all_of(NAME)), ""
        is_whole = yield from reader.skip(layout.key_end)
        if not is_whole:
            reader.unread(key)
            return "", ""
        if layout.tag_end:
            attributes = yield from reader.all_of(ATTRIBUTES)
            yield from reader.skip(layout.tag_end)
        if layout.value:
            yield from reader.spaces()
            yield from reader.skip(layout.value)
        return key.strip(), attributes

    def _parameters(self, schema: Mapping[str, Any]) -> Waiting[None]:
        reader, layout = self.reader, self.layout
        self._argue("{")
        separator = ""
        while True:
            yield from reader.spaces()
            if not (yield from reader.skip(layout.parameter)):
                break
            key, attributes = yield from self._key()
            if not key:
                reader.unread(layout.parameter)
                break
            self._argue(f"{separator}{_written(key)}: ")
            separator = ", "
            types = _told(attributes, types_of(_property(schema, key, schema), schema))
            if not (yield from (self._text() if types == TEXT else self._value(types))):
                return  # the output was cut
        if (yield from reader.skip(layout.end)) or not reader.is_cut:
            self._argue("}")

    def _value(self, types: set[str]) -> Waiting[bool]:
        parts: list[str] = []
        is_whole = yield from self._raw(parts.append)
        if is_whole:
            self._argue(_meant(self.markers.spelled("".join(parts)), types))
        return is_whole

    def _text(self) -> Waiting[bool]:
        self._argue('"')
        is_whole = yield from self._raw(lambda text: self._argue(_written(text)[1:-1]))
        if is_whole:
            self._argue('"')
        return is_whole

    def _raw(self, emit: Callable[[str], object]) -> Waiting[bool]:
        """Reads a value up to the end of its tag, without the line breaks around it.  Returns whether it ends."""
        reader, layout = self.reader, self.layout
        closings = [layout.value_end]
        if layout.has_breaks:
            yield from reader.skip("\n")
            closings.append("\n" + layout.value_end)
        if layout.has_cdata and (yield from reader.skip(CDATA[0])):
            return bool((yield from reader.until(emit, CDATA[1] + layout.value_end)))
        others = ["\n" + layout.parameter, "\n" + layout.end, layout.end] if layout.is_lenient else []
        found = yield from reader.until(emit, *closings, *others)
        if found in others:
            reader.unread(found.removeprefix("\n"))
        return bool(found)


class NestedXml(NamedTuple):
    """The mark before each tag, and the tags around calls."""

    mark: str
    opening: str
    closing: str

    @property
    def syntax(self) -> Syntax | None:
        return None


class NestedXmlCalls(FormatParser):
    """Parameters are elements named by their keys, which contain text or elements."""

    layout: NestedXml

    def _parse(self) -> Waiting[None]:
        reader, mark = self.reader, self.markers.of(self.layout.mark)
        opening, call = mark + self.layout.opening, mark + '<invoke name="'
        while found := (yield from reader.until(self._say, opening, call)):
            reader.keep()
            if found == opening:
                yield from reader.spaces()
            is_begun = found == call or (yield from reader.skip(call))
            name = (yield from reader.all_of(NAME)) if is_begun else ""
            is_call = bool(name) and (yield from reader.skip('">'))
            kept = reader.pop_kept()
            if not is_call:
                self._say(found + kept)
                continue
            self._call(name.strip())
            yield from self._parameters(mark, self.tools.get(name.strip(), {}))
            yield from reader.spaces()
            yield from reader.skip(mark + self.layout.closing)

    def _parameters(self, mark: str, schema: Mapping[str, Any]) -> Waiting[None]:
        self._argue("{")
        separator = ""
        while True:
            yield from self.reader.spaces()
            if (yield from self.reader.at(mark + "</", mark + "<")) != mark + "<":
                break
            element = yield from self._element(mark, MAX_NESTED)
            if element is None:
                return  # the output was cut, or is nested too deeply
            key, content = element
            of_key = _property(schema, key, schema)
            self._argue(f"{separator}{_written(key)}: {_json_of(content, of_key, schema)}")
            separator = ", "
        if (yield from self.reader.skip(mark + "</invoke>")) or not self.reader.is_cut:
            self._argue("}")

    def _element(self, mark: str, depth: int) -> Waiting[tuple[str, Content] | None]:
        """Reads an element: its key, and its text or its elements; None: it has no end, or too many others in it."""
        reader = self.reader
        yield from reader.skip(mark + "<")
        key = (yield from reader.all_of(NAME)).strip()
        if not depth or not (yield from reader.skip(">")):
            return None
        texts: list[str] = []
        inner: list[tuple[str, Content]] = []
        while found := (yield from reader.until(texts.append, mark + "</", mark + "<")):
            if found == mark + "</":
                yield from reader.all_of(NAME)
                yield from reader.skip(">")
                return key, inner or self.markers.spelled("".join(texts))
            reader.unread(found)
            element = yield from self._element(mark, depth - 1)
            if element is None:
                return None
            inner.append(element)
        return None


def _property(schema: Any, key: str, root: Any) -> Any:
    """The schema of a property.  Args: root: of the tool, which other schemas in it refer to."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return resolved(properties.get(key), root) if isinstance(properties, dict) else None


def _json_of(content: Content, schema: Any, root: Any) -> str:
    """The JSON of an element: a list where its elements are items, an object where they are others, else its text."""
    if isinstance(content, str):
        types = types_of(schema, root)
        empty = [EMPTY[kind] for kind in types if kind in EMPTY and not content.strip()]
        return empty[0] if empty else _meant(content, types)
    if all(key == "item" for key, _ in content):
        items = resolved(schema.get("items"), root) if isinstance(schema, dict) else None
        return f"[{', '.join([_json_of(one, items, root) for _, one in content])}]"
    return "{" + ", ".join([f"{_written(key)}: {_json_of(one, _property(schema, key, root), root)}"
                            for key, one in content]) + "}"


def _told(attributes: str, types: set[str]) -> set[str]:
    """The types of a value, as far as the attributes of its element say; else those of the tool's schema."""
    if 'string="true"' in attributes or 'type="string"' in attributes:
        return TEXT
    return set() if "string=" in attributes or "type=" in attributes else types


def _written(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _meant(text: str, types: set[str]) -> str:
    """The JSON that a parameter's text means: itself where it is JSON that its types allow, else a string.

    Objects and lists may be Python's: some templates write those of earlier turns so.
    """
    stripped = text.strip()
    try:
        value = WORDS[stripped] if stripped in WORDS else json.loads(stripped, parse_constant=str)
        if "string" in types and (value is not None or "null" not in types):
            return _written(text)
        return dumped(value)
    except (ValueError, RecursionError):
        if "string" in types or not stripped.startswith(("[", "{")) or len(stripped) > MAX_LITERAL:
            return _written(text)
    try:
        return dumped(ast.literal_eval(stripped))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _written(text)
