"""`hermes`: Hermes 2 and 3, Qwen 2.5 and 3, and many more.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

from slotwise.api.parsers.base_parser import FormatParser, Syntax, Waiting
from slotwise.api.parsers.json_calls import CallObject


class Hermes(FormatParser):
    MODELS = "Hermes 2 and 3, Qwen 2.5 and 3, and many more"
    SYNTAX = Syntax('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "<tool_call>", separator="\n")
    SPELLINGS = ("<tool_call>", "</tool_call>")

    def _parse(self) -> Waiting[None]:
        opening, closing = map(self.markers.of, self.SPELLINGS)
        while (yield from self.reader.until(self._say, opening)):
            self.reader.keep()
            call = CallObject(self.reader, None, self._call, self._argue)
            yield from call.read()
            kept = self.reader.pop_kept()
            if not call.is_call:
                self._say(opening + kept)
                continue
            yield from self.reader.spaces()
            yield from self.reader.skip(closing)
