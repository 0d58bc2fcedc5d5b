"""Calls whose name stands between marks, before arguments that are an object of JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>                                                            `kimi_k2`
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>...
    <function=weather>{"city": "Paris"}</function>
    >>>weather
    {"city": "Paris"}                                        `functionary_v3`: every part of an answer has a recipient
"""

from __future__ import annotations

import re
from typing import NamedTuple

from slotwise.api.parsers.base_parser import ANY, NAME, NUMBER, FormatParser, Syntax, Waiting
from slotwise.api.parsers.json_calls import nested

ID = re.compile(rf"[^<>{ANY}]+")


class Named(NamedTuple):
    """The marks of a call."""

    before: str
    middle: str
    after: str
    section: tuple[str, str] = ("", "")  # around all calls of an answer
    fence: tuple[str, str] = ("", "")  # of a code block around the arguments
    id_end: str = ""  # after an id, which stands before the name
    prefix: str = ""  # of the name, which a number follows then

    @property
    def syntax(self) -> Syntax | None:
        middle = (f":{NUMBER}" if self.prefix else "") + self.middle + self.fence[0]
        before = self.before + (f"call_{NUMBER}{self.id_end}" if self.id_end else "") + self.prefix
        return Syntax(before, middle, self.fence[1] + self.after, self.section[0] or self.before, self.section[0], "",
                      self.section[1], quotes=False)


class NamedCalls(FormatParser):
    """A call counts once an object follows its name, or what ends a call without arguments."""

    layout: Named

    def _parse(self) -> Waiting[None]:
        before, section = self.markers.of(self.layout.before), self.markers.of(self.layout.section[0])
        while found := (yield from self.reader.until(self._say, *filter(None, (section, before)))):
            head = found
            if found != before:
                self.reader.keep()
                yield from self.reader.spaces()
                is_begun = yield from self.reader.skip(before)
                head += self.reader.pop_kept()
                if not is_begun:
                    self._say(head)
                    continue
            yield from self._read(head)

    def _read(self, head: str) -> Waiting[None]:
        """Reads a call after the mark before it.  Args: head: read already; text where this is not a call."""
        reader, layout = self.reader, self.layout
        middle, after = self.markers.of(layout.middle), self.markers.of(layout.after)
        reader.keep()
        if layout.id_end:
            yield from reader.all_of(ID)
            yield from reader.skip(self.markers.of(layout.id_end))
        name = yield from reader.all_of(NAME)
        for mark in (middle, layout.fence[0].strip()):
            yield from reader.spaces()
            if mark:
                yield from reader.skip(mark)
        yield from reader.spaces()
        has_arguments = (yield from reader.peek()) == "{"
        is_call = bool(name) and (has_arguments or bool((yield from reader.at(after))))
        kept = reader.pop_kept()
        if not is_call:
            self._say(head + kept)
            return
        if layout.prefix:
            name = name.removeprefix(layout.prefix).partition(":")[0] or name
        self._call(name)
        if has_arguments:
            if not (yield from nested(reader, self._argue)):
                return
        else:
            self._argue("{}")
        for mark in (layout.fence[1].strip(), after, self.markers.of(layout.section[1])):
            if mark:
                yield from reader.spaces()
                yield from reader.skip(mark)


class Functionary(FormatParser):
    """Parts of an answer, each for a recipient: `all` is the user, any other a tool.  The prompt may end with `>>>`."""

    MARK, USER = ">>>", "all"

    def _parse(self) -> Waiting[None]:
        yield from self.reader.spaces()
        found = self.MARK if (yield from self.reader.skip(self.MARK)) else ""
        is_first = True
        while found or is_first:
            self.reader.keep()
            name = yield from self.reader.all_of(NAME)
            is_whole = yield from self.reader.skip("\n")
            is_call = is_whole and name in self.tools and (yield from self.reader.peek()) == "{"
            kept = self.reader.pop_kept()
            is_first = False
            if is_call:
                self._call(name)
                yield from nested(self.reader, self._argue)
                yield from self.reader.spaces()
            elif not is_whole or name != self.USER:
                self._say(found + kept)
            found = yield from self.reader.until(self._say, self.MARK)
