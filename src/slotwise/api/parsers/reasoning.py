"""Reasoning that stands between tags, before the answer.

    <think>
    The user wants ...
    </think>

    It is sunny.

Many templates end the prompt with the first tag, and with both where the model is not to think.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from slotwise.api.parsers.base_parser import SPACES, Format, FormatParser, Markers, Syntax, Waiting

PROMPT_END = 256  # characters in which a prompt says whether an answer begins within reasoning


class Tags(NamedTuple):
    """What stands around reasoning and answers."""

    opening: str = "<think>"
    closing: str = "</think>"
    thinks: bool = False  # the output begins with reasoning where the prompt does not say
    openings: tuple[str, ...] = ()  # other forms of the opening
    closings: tuple[str, ...] = ()  # other forms of the closing
    calls: tuple[str, ...] = ()  # what begins calls, and ends reasoning, too
    around: tuple[str, ...] = ()  # around an answer, and left out
    again: bool = False  # an answer may be followed by more reasoning

    @property
    def syntax(self) -> Syntax | None:
        return None


def has_begun(prompt: str, continued: str | None = None, tags: Tags | None = None) -> bool | None:
    """Whether a prompt ends within reasoning; None: it does not say.

    Args:
        prompt: as the template wrote it.
        continued: the text of the message that the output continues, if it does.
    """
    tags = tags or Tags()
    openings = [one.strip() for one in (tags.opening, *tags.openings)]
    closings = [one.strip() for one in (tags.closing, *tags.closings)]
    if continued is not None:
        return max(map(continued.rfind, openings)) > max(map(continued.rfind, closings))
    end = prompt[-PROMPT_END:].rstrip()
    return True if end.endswith(tuple(openings)) else False if end.endswith(tuple(closings)) else None


class TaggedReasoning(FormatParser):
    """Args: begun: whether the output begins within reasoning, as `has_begun` says."""

    layout: Tags

    def __init__(self, markers: Markers, tools: Any = None, layout: Tags | None = None,
                 begun: bool | None = None) -> None:
        super().__init__(markers, {}, layout or Tags())
        self._has_begun = self.layout.thinks if begun is None else begun
        self._line_breaks = ""  # at the end of the reasoning so far

    def _parse(self) -> Waiting[None]:
        of, layout, reader = self.markers.of, self.layout, self.reader
        openings = [of(one) for one in (layout.opening, *layout.openings)]
        around = [of(one) for one in layout.around]
        spaces = yield from reader.all_of(SPACES)
        opening = yield from reader.at(*openings)
        reader.take(len(opening))
        is_reasoning = bool(opening) or self._has_begun
        if not is_reasoning:
            self._say(spaces)
        wanted = [*around, *(openings if layout.again else ())]
        while True:
            if is_reasoning:
                yield from self._thought()
            if not wanted:
                yield from reader.rest(self._say)
                return
            found = yield from reader.until(self._say, *wanted)
            if not found:
                return
            is_reasoning = found not in around

    def _thought(self) -> Waiting[None]:
        of, layout = self.markers.of, self.layout
        calls = [of(one) for one in layout.calls]
        yield from self._line_ends()
        found = yield from self.reader.until(
            self._reason, *[of(one) for one in (layout.closing, *layout.closings)], *calls)
        self._line_breaks = ""
        if found in calls:
            self.reader.unread(found)
        else:
            yield from self._line_ends()

    def _line_ends(self) -> Waiting[None]:
        while (yield from self.reader.skip("\n")):
            pass

    def _reason(self, text: str) -> None:
        kept = text.rstrip("\n")
        if kept:
            self._think(self._line_breaks + kept)
            self._line_breaks = ""
        self._line_breaks += text[len(kept) :]


class Recipients(NamedTuple):
    """The marks of messages whose headers name a recipient."""

    start: str = "<|start|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|eom|>", "<|eot|>")
    self_: str = "to=self"  # in the header of reasoning

    @property
    def syntax(self) -> Syntax | None:
        return None


class RecipientReasoning(FormatParser):
    """Messages to the model itself are reasoning, all others content, which may be calls; headers are left out."""

    layout: Recipients

    def __init__(self, markers: Markers, tools: Any, layout: Recipients, begun: bool | None = None) -> None:
        super().__init__(markers, {}, layout)

    def _parse(self) -> Waiting[None]:
        of, layout = self.markers.of, self.layout
        ends = [of(one) for one in (*layout.ends, layout.start)]
        while (yield from self.reader.peek()):
            header: list[str] = []
            found = yield from self.reader.until(header.append, of(layout.message), *ends)
            if found == of(layout.message):
                is_own = layout.self_ in "".join(header)
                yield from self.reader.until(self._think if is_own else self._say, *ends)
            elif found != of(layout.start):
                self._say("".join(header))


FORMATS: dict[str, Format] = {
    name: Format(models, TaggedReasoning, tags) for name, models, tags in (
        ("qwen3", "Qwen3 and most others: reasoning begins with `<think>`, in the prompt or the output", Tags()),
        ("deepseek_r1", "DeepSeek-R1, its distillations and QwQ: the output begins with reasoning", Tags(thinks=True)),
        ("kimi_k2", "Kimi K2: a call ends reasoning, too", Tags(calls=("<|tool_calls_section_begin|>",))),
        ("ernie45", "Ernie 4.5 and Hunyuan A13B: the answer has tags, too",
         Tags(around=("<response>\n", "\n</response>", "<response>", "</response>", "<answer>\n", "\n</answer>",
                      "<answer>", "</answer>"))),
        ("granite", "Granite 3: in sentences, or between tags",
         Tags(openings=("Here is my thought process:", "Here's my thought process:"),
              closings=("Here is my response:", "Here's my response:"), around=("<response>", "</response>"))),
        ("seed_oss", "Seed-OSS", Tags("<seed:think>", "</seed:think>")),
        ("mistral", "Magistral and Ministral 3", Tags("[THINK]", "[/THINK]")),
        ("cohere", "Command R7B, Command A Reasoning and North",
         Tags("<|START_THINKING|>", "<|END_THINKING|>",
              around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"))),
        ("gemma4", "Gemma 4", Tags("<|channel>thought\n", "<channel|>", again=True)),
        ("minimax_m3", "MiniMax-M3", Tags("<mm:think>", "</mm:think>")),
        ("hy3", "Hunyuan 3", Tags("<think:opensource>", "</think:opensource>")),
        ("kimi_k3", "Kimi K3", Tags(
            "<|open|>think<|sep|>", "<|close|>think<|sep|>",
            around=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>",
                    "<|end_of_msg|>"))),
        ("apriel", "Apriel", Tags(
            "Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]",
            around=("[END FINAL RESPONSE]", "[BEGIN FINAL RESPONSE]\n"), calls=("\n<tool_calls>",))),
        ("apertus", "Apertus", Tags("<|inner_prefix|>", "<|inner_suffix|>", again=True)),
        ("solar", "Solar Open", Tags(
            "<|think|>", "<|end|>", around=("<|begin|>assistant<|content|>", "<|begin|>assistant", "<|content|>",
                                            "<|end|>"))),
    )}
FORMATS["muse"] = Format("Muse Glimmer: reasoning is a message to the model itself", RecipientReasoning, Recipients())
"""By name.  A prompt or an output that has no tag has no reasoning, except with `deepseek_r1`."""

SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("seed_oss", ("<seed:think>",)), ("mistral", ("[THINK]",)), ("cohere", ("<|START_THINKING|>",)),
    ("gemma4", ("<|channel>thought",)), ("minimax_m3", ("<mm:think>",)), ("kimi_k3", ("open_tag('think')",)),
    ("apertus", ("<|inner_prefix|>",)), ("hy3", ("<think{}>", "HYTK")), ("solar", ("<|begin|>assistant<|think|>",)),
    ("muse", ("to=self<|message|>",)), ("apriel", ("Here are my reasoning steps:",)),
    ("apriel", ("[BEGIN FINAL RESPONSE]",)), ("qwen3", ("<minimax:tool_call>",)),
    ("granite", ("<think></think>", "<response></response>")),
    ("ernie45", ("<think>", "<response>")), ("ernie45", ("<think>", "<answer>")),
    ("kimi_k2", ("<think>", "<|tool_calls_section_begin|>")),
    ("qwen3", ("<think>",)), ("qwen3", ("</think>",)))
"""What tells a format in a template, the first that holds: its name, and texts that are all there."""


def reasoning_parser_of(template: str) -> str:
    """The name of the parser for reasoning as a chat template writes it; "" if none is known."""
    return next((name for name, signs in SIGNS if all(sign in template for sign in signs)), "")
