"""`deepseek_r1` and `qwen3`: reasoning stands between tags, before the answer.

    <think>
    The user wants ...
    </think>

    It is sunny.

Many templates end the prompt with the first tag, and with both where the model is not to think.
"""

from __future__ import annotations

from slotwise.api.parsers.base_parser import SPACES, FormatParser, Markers, Waiting

OPENING, CLOSING = "<think>", "</think>"


def has_begun(prompt: str, continued: str | None = None) -> bool | None:
    """Whether a prompt ends within reasoning; None: it does not say.

    Args:
        prompt: as the template wrote it.
        continued: the text of the message that the output continues, if it does.
    """
    if continued is not None:
        return continued.rfind(OPENING) > continued.rfind(CLOSING)
    end = prompt[-256:].rstrip()
    return True if end.endswith(OPENING) else False if end.endswith(CLOSING) else None


class Qwen3(FormatParser):
    """Args: begun: whether the output begins within reasoning, as `has_begun` says."""

    MODELS = "Qwen3: reasoning begins with `<think>`, in the prompt or the output"
    SPELLINGS = (OPENING, CLOSING)
    THINKS = False  # where the prompt does not say

    def __init__(self, markers: Markers, begun: bool | None = None) -> None:
        super().__init__(markers, {})
        self._has_begun = self.THINKS if begun is None else begun
        self._line_breaks = ""  # at the end of the reasoning so far

    def _parse(self) -> Waiting[None]:
        opening, closing = map(self.markers.of, self.SPELLINGS)
        spaces = yield from self.reader.all_of(SPACES)
        if (yield from self.reader.skip(opening)) or self._has_begun:
            yield from self._line_ends()
            yield from self.reader.until(self._reason, closing)
            yield from self._line_ends()
        else:
            self._say(spaces)
        yield from self.reader.rest(self._say)

    def _line_ends(self) -> Waiting[None]:
        while (yield from self.reader.skip("\n")):
            pass

    def _reason(self, text: str) -> None:
        kept = text.rstrip("\n")
        if kept:
            self._think(self._line_breaks + kept)
            self._line_breaks = ""
        self._line_breaks += text[len(kept) :]


class DeepSeekR1(Qwen3):
    """The model thinks first, even where neither prompt nor output has the first tag."""

    MODELS = "DeepSeek-R1, its distillations and QwQ: the output begins with reasoning"
    THINKS = True
