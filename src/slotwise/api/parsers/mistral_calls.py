"""`mistral`: all generations.  A list of objects, or since version 11 of its tokenizer a name and its arguments:

    [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, ...]
    [TOOL_CALLS]weather[CALL_ID]D681PevKs[ARGS]{"city": "Paris"}[TOOL_CALLS]...
    [TOOL_CALLS]weather{"city": "Paris"}
"""

from __future__ import annotations

from slotwise.api.parsers.base_parser import NAME, FormatParser, Waiting
from slotwise.api.parsers.json_calls import CallObject, nested


class MistralCalls(FormatParser):
    def _parse(self) -> Waiting[None]:
        opening = self.markers.of("[TOOL_CALLS]")
        while (yield from self.reader.until(self._say, opening)):
            self.reader.keep()
            yield from self.reader.spaces()
            is_list = yield from self.reader.skip("[")
            before = opening + self.reader.pop_kept()
            yield from (self._list(before) if is_list else self._named(before))

    def _list(self, before: str) -> Waiting[None]:
        """Calls after the bracket of a list.  Anything else becomes text, after what stands `before` it."""
        while True:
            self.reader.keep()
            call = CallObject(self.reader, None, self._call, self._argue)
            is_complete = yield from call.read()
            kept = self.reader.pop_kept()
            if not call.is_call:
                self._say(before + kept)
            if not is_complete:
                return
            self.reader.keep()
            yield from self.reader.spaces()
            is_last = not (yield from self.reader.skip(","))
            before = self.reader.pop_kept()
            if is_last:
                yield from self.reader.skip("]")
                return

    def _named(self, before: str) -> Waiting[None]:
        self.reader.keep()
        name = yield from self.reader.all_of(NAME)
        if (yield from self.reader.skip(self.markers.of("[CALL_ID]"))):
            yield from self.reader.all_of(NAME)
        yield from self.reader.skip(self.markers.of("[ARGS]"))
        yield from self.reader.spaces()
        is_call = bool(name) and (yield from self.reader.peek()) == "{"
        kept = self.reader.pop_kept()
        if not is_call:
            self._say(before + kept)
            return
        self._call(name)
        yield from nested(self.reader, self._argue)
