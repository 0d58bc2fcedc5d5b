"""How the outputs of a request are parsed: to typed parts, which every route renders in its own way.

    job.parsing ─► output() for each choice ─► Choice.read(chunk) ─► Delta.parts: Content, Reasoning, CallName, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slotwise.server.parsers.parser import OutputParser, Tools
from slotwise.server.parsers.parts import CallName, Part, without_reasoning
from slotwise.server.parsers.registry import (
    HARMONY,
    HERMES,
    REASONING_ALIASES,
    TOOL_ALIASES,
    TOOL_PARSERS,
    OutputFormat,
    tool_parser_of,
)

TOOL_CALLS = "tool_calls"  # the finish reason of an output that calls tools


class ParsedOutput:
    """One output while it comes.

    Args:
        most_calls: the output ends before another one.
        hides_reasoning: reasoning is left out.
    """

    def __init__(self, parser: OutputParser, most_calls: int | None = None, *, hides_reasoning: bool = False) -> None:
        self._parser, self._most_calls, self._hides_reasoning = parser, most_calls, hides_reasoning
        self._num_calls = 0

    def read(self, text: str, reason: str | None) -> tuple[Sequence[Part], str | None]:
        """The parts that `text` completes, and the finish reason.

        Args:
            reason: why no more text comes; None: more may come.
        """
        parts = self._parser.feed(text)
        if reason is not None:
            parts += self._parser.end()
        if self._hides_reasoning:
            parts = list(without_reasoning(parts))
        for place, part in enumerate(parts):
            if isinstance(part, CallName):
                if self._num_calls == self._most_calls:
                    return parts[:place], TOOL_CALLS
                self._num_calls += 1
        return parts, TOOL_CALLS if reason == "stop" and self._num_calls else reason


class Parsing(NamedTuple):
    """How the outputs of one request are parsed."""

    form: OutputFormat
    tools: Tools | None  # those that may be called; None: calls stay text
    begun: bool | None = None  # an output begins within reasoning; see `parsers.thinking.has_begun`
    most_calls: int | None = None  # of an output; None: any number
    hides_reasoning: bool = False
    is_written: bool = False  # a grammar writes the calls

    @property
    def marks(self) -> Mapping[int, str]:
        """How special tokens stand in an output's text."""
        return self.form.markers(self.tools).by_id

    def output(self) -> ParsedOutput:
        """Parses one output."""
        parser = self.form.parser(self.tools, self.begun, is_written=self.is_written)
        return ParsedOutput(parser, self.most_calls, hides_reasoning=self.hides_reasoning)


def output_format(tools: str, reasoning: str, has_tools: bool | None, template: str,
                  special: Mapping[str, int], *, ignores_tools: bool = False) -> OutputFormat:
    """How a model's outputs are parsed.

    Args:
        tools, reasoning: names of parsers; "" for tools: the one that the template calls for.
        has_tools: whether models may call tools unasked; None: where the parser is known.
        template: the chat template's source.
        special: ids of the tokenizer's special tokens, by their spelling.
        ignores_tools: the template does, so the system prompt asks for calls in the form of `HERMES`.

    Raises:
        ValueError: the parser is not known, or does not fit the tokenizer.
    """
    tools, reasoning = TOOL_ALIASES.get(tools, tools), REASONING_ALIASES.get(reasoning, reasoning)
    if has_tools is False:
        return OutputFormat("", reasoning, special)
    if tools or not (found := HERMES if ignores_tools else tool_parser_of(template)):
        if has_tools and not tools:
            raise ValueError("--enable-auto-tool-choice: the chat template does not tell how the model calls tools; "
                             f"name a parser with --tool-call-parser: {', '.join(sorted(TOOL_PARSERS))}")
        return OutputFormat(tools, reasoning, special)
    if found == HARMONY:
        reasoning = reasoning or HARMONY
    try:
        return OutputFormat(found, reasoning, special)
    except ValueError:
        if has_tools or reasoning == HARMONY:
            raise
        return OutputFormat("", reasoning, special)
