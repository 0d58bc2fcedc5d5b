"""`llama3_json`: Llama 3.1, 3.2 and 3.3.  The answer begins with a call, and may have several:

    {"name": "weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}

Only the name of a tool distinguishes a call from another object, so only the request's tools are called.
"""

from __future__ import annotations

from typing import NamedTuple

from slotwise.api.parsers.base_parser import SPACES, FormatParser, Syntax, Waiting
from slotwise.api.parsers.json_calls import CallObject


class LlamaLayout(NamedTuple):
    tag: str = "<|python_tag|>"  # before calls, in some answers

    @property
    def syntax(self) -> Syntax | None:
        return Syntax('{"name": ', ', "parameters": ', "}", separator="; ")


class Llama3Json(FormatParser):
    layout: LlamaLayout

    def _parse(self) -> Waiting[None]:
        tag = self.markers.of(self.layout.tag)
        self._say((yield from self.reader.all_of(SPACES)))
        separated = ""  # what was read between two calls
        has_tag = yield from self.reader.skip(tag)
        while True:
            self.reader.keep()
            call = CallObject(self.reader, self.tools, self._call, self._argue)
            yield from call.read()
            kept = self.reader.pop_kept()
            if not call.is_call:
                self._say((tag if has_tag else "") + separated + kept)
                if not (yield from self.reader.until(self._say, tag)):
                    return
                has_tag, separated = True, ""
                continue
            has_tag, separated = False, (yield from self._separator())

    def _separator(self) -> Waiting[str]:
        self.reader.keep()
        yield from self.reader.spaces()
        yield from self.reader.skip(";")
        yield from self.reader.spaces()
        return self.reader.pop_kept()
