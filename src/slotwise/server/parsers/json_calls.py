"""Calls that a grammar forces, of models whose own format no grammar here describes: a list of objects.

    [{"name": "weather", "parameters": {"city": "Paris"}}]
"""

from __future__ import annotations

from slotwise.server.parsers.grammar import Syntax
from slotwise.server.parsers.json_text import CallObject
from slotwise.server.parsers.parser import FormatParser
from slotwise.server.parsers.reader import Waiting


class JsonCalls(FormatParser):
    SYNTAX = Syntax('{"name": ', ', "parameters": ', "}", opening="[", separator=", ", closing="]")

    def _parse(self) -> Waiting[None]:
        self.reader.keep()
        yield from self.reader.spaces()
        is_list = yield from self.reader.skip("[")
        before = self.reader.pop_kept()
        while is_list:
            self.reader.keep()
            call = CallObject(self.reader, self.tools, self._call, self._argue)
            yield from call.read()
            kept = self.reader.pop_kept()
            if not call.is_call:
                before += kept
                break
            yield from self.reader.spaces()
            before = ""
            if not (yield from self.reader.skip(",")):
                yield from self.reader.skip("]")
                break
        self._say(before)
        yield from self.reader.rest(self._say)
