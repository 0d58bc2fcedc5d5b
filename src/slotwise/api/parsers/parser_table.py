"""The parsers by name, and how the outputs of one model and one request are parsed.

    parsing ─► output() for each choice ─► Choice.read(chunk) ─► Delta.parts: Content, Reasoning, CallName, ...
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slotwise.api.parsers.base_parser import (
    CallName,
    Chain,
    Format,
    Markers,
    OutputParser,
    Part,
    SpellingParser,
    Tools,
    without_reasoning,
)
from slotwise.api.parsers.call_grammar import (
    Schemas,
    call_rules,
    can_write,
    describes,
    grammar,
    tagged_rules,
    terms,
    thinking_rules,
)
from slotwise.api.parsers.harmony import FINAL, LAST, NEXT, NOTE, THOUGHT, Harmony
from slotwise.api.parsers.json_calls import JSON_LIST, ObjectCalls
from slotwise.api.parsers.reasoning import FORMATS as THINKING_PARSERS
from slotwise.api.parsers.reasoning import Tags, has_begun, reasoning_parser_of
from slotwise.api.parsers.tool_formats import ALIASES as TOOL_ALIASES
from slotwise.api.parsers.tool_formats import FORMATS as TOOL_PARSERS
from slotwise.api.parsers.tool_formats import HARMONY, HERMES, tool_parser_of

REASONING_PARSERS: dict[str, Format] = {**THINKING_PARSERS, HARMONY: TOOL_PARSERS[HARMONY]}
REASONING_ALIASES = {  # vLLM's and SGLang's names
    "openai_gptoss": HARMONY, "gpt-oss": HARMONY, "deepseek_v3": "qwen3", "deepseek_v31": "qwen3", "glm45": "qwen3",
    "glm47": "qwen3", "minimax_m2": "deepseek_r1", "minimax_m2_append_think": "deepseek_r1", "olmo3": "deepseek_r1",
    "step3": "deepseek_r1", "step3p5": "deepseek_r1", "nemotron_v3": "deepseek_r1", "hunyuan_a13b": "ernie45",
    "kimi": "kimi_k2", "kimi_k2_thinking": "kimi_k2", "cohere_command3": "cohere", "holo2": "qwen3",
    "deepseek-r1": "deepseek_r1", "deepseek-v3": "qwen3", "qwen3-thinking": "deepseek_r1", "minimax": "deepseek_r1"}
TEXT = "none"  # the name of no parser of reasoning: it is part of the answer
TOOL_CALLS = "tool_calls"  # the finish reason of an output that calls tools
WRITTEN = Format("calls that a grammar writes", ObjectCalls, JSON_LIST)


class OutputFormat:
    """How a model's outputs are parsed, and how grammars write them.

    Args:
        tools, reasoning: names of parsers, "" for none.
        special: ids of the tokenizer's special tokens, by their spelling.

    Raises:
        ValueError: the tokenizer does not have the special tokens of the format.
    """

    def __init__(self, tools: str, reasoning: str, special: Mapping[str, int]) -> None:
        self.tools, self.reasoning = tools, reasoning
        of_tools = TOOL_PARSERS[tools].spellings if tools else ()
        of_reasoning = REASONING_PARSERS[reasoning].spellings if reasoning else ()
        self._both, self._one = Markers(special, (*of_tools, *of_reasoning)), Markers(special, of_reasoning)
        missing = [spelling for spelling in Harmony.SPELLINGS if spelling not in self._both]
        if HARMONY in (tools, reasoning) and missing:
            raise ValueError(f"the parser {HARMONY} needs a tokenizer with the special tokens of harmony; "
                             f"{missing[0]} is none of its own")
        self.last_ids = [special[token] for token in LAST] if HARMONY in (tools, reasoning) else []
        """Tokens that end an answer, whether or not the checkpoint says so."""

    def parses(self, tools: Tools | None) -> bool:
        """Whether outputs are parsed that may call `tools`, or none."""
        return bool(self.reasoning) or (bool(self.tools) and tools is not None)

    @property
    def tags(self) -> Tags | None:
        """What stands around reasoning; None: no tags."""
        layout = REASONING_PARSERS[self.reasoning].layout if self.reasoning else None
        return layout if isinstance(layout, Tags) else None

    def has_begun(self, prompt: str, continued: str | None = None) -> bool | None:
        """Whether a prompt ends within reasoning; see `parsers.reasoning.has_begun`."""
        return has_begun(prompt, continued, self.tags)

    def begins(self, begun: bool | None) -> bool | None:
        """Whether an output begins within reasoning, where the prompt may leave that to the parser, as None says."""
        return (self.tags is not None and self.tags.thinks) or None if begun is None else begun

    def answer_start(self, prompt: str) -> str:
        """What a prompt lacks for the reply to begin with the answer: the end of its reasoning, or harmony's header."""
        if HARMONY in (self.tools, self.reasoning):
            return "" if prompt.endswith(FINAL) else FINAL
        begun, tags = self.has_begun(prompt), self.tags or Tags()
        if begun:
            return f"\n{tags.closing}\n\n"
        return f"{tags.opening}\n\n{tags.closing}\n\n" if self.begins(begun) else ""

    def markers(self, tools: Tools | None) -> Markers:
        """How special tokens stand in the text that a parser reads."""
        return self._one if tools is None else self._both

    def parser(self, tools: Tools | None, begun: bool | None = None, *, is_written: bool = False) -> OutputParser:
        """A parser for one output.

        Args:
            tools: those that may be called; None: calls stay text.
            begun: whether the output begins within reasoning; see `has_begun`.
            is_written: a grammar writes the calls.
        """
        markers = self.markers(tools)
        if self._is_harmony(tools):
            return SpellingParser(Harmony(markers, tools or {}), markers)
        parsers: list[OutputParser] = []
        if self.reasoning:
            form = THINKING_PARSERS[self.reasoning]
            parsers.append(form.parser(markers, {}, form.layout, begun))
        if tools is not None and (self.tools or is_written):
            parsers.append((self._written(tools) if is_written else TOOL_PARSERS[self.tools]).read_by(markers, tools))
        return SpellingParser(Chain(*parsers), markers)

    def grammar_of_calls(self, schemas: Schemas, begun: bool | None) -> str:
        """The grammar of outputs that call at least one tool."""
        return self._grammar("calls", begun, self._calls(schemas))

    def grammar_of_answer(self, answer: str, begun: bool | None, schemas: Schemas | None = None) -> str:
        """The grammar of outputs that match something once they have reasoned, or that call tools.

        Args:
            answer: what they match, as terms of a rule.
        """
        final = f"final: {terms(FINAL, self._both)} answer" if self._is_harmony(None) else "final: answer"
        rules = [final, f"answer: {answer}"]
        if schemas is None:
            return self._grammar("final", begun, rules)
        return self._grammar("(calls | final)", begun, rules, self._calls(schemas))

    def grammar_of_strict(self, schemas: Schemas, begun: bool | None) -> str | None:
        """The grammar of any output whose calls match schemas; None where no grammar describes the format."""
        written = self._written(schemas.tools)
        syntax = written.layout.syntax
        if self._is_harmony({}):
            free = [f"note: {terms(NOTE, self._both)} TEXT {terms(NEXT, self._both)}",
                    f"free: {terms(FINAL, self._both)} TEXT"]
            return self._grammar("note? (calls | free)", begun, free, self._calls(schemas))
        if syntax is None or written is WRITTEN:
            return None
        if syntax.trigger:
            return self._grammar("tagged* TEXT", begun, tagged_rules(syntax, self._both, schemas))
        first = re.escape((syntax.opening or syntax.before)[0])
        return self._grammar("(calls | FREE?)", begun, [rf"FREE: /[^{first}](.|\n)*/"], self._calls(schemas))

    def _written(self, tools: Tools) -> Format:
        """The format of calls that a grammar writes: the model's own, if a grammar can."""
        own = TOOL_PARSERS[HARMONY] if self._is_harmony({}) else TOOL_PARSERS.get(self.tools, WRITTEN)
        syntax = own.layout.syntax
        return own if syntax is not None and can_write(syntax, self._both) and describes(syntax, tools) else WRITTEN

    def _is_harmony(self, tools: Tools | None) -> bool:
        return HARMONY in (self.reasoning, self.tools if tools is not None else "")

    def _calls(self, schemas: Schemas) -> list[str]:
        syntax = self._written(schemas.tools).layout.syntax
        assert syntax is not None
        return call_rules(syntax, self._both, schemas)

    def _grammar(self, start: str, begun: bool | None, *rules: Sequence[str]) -> str:
        if self._is_harmony({}):
            thought = f"thought: {terms(THOUGHT, self._both)} TEXT {terms(NEXT, self._both)}"
            return grammar(f"thought* {start}", [thought], *rules)
        tags = self.tags
        if tags is None or begun is False:
            return grammar(start, *rules)
        inner = thinking_rules(self._both, tags.opening, tags.closing, self.begins(begun))
        return grammar(f"thinking {start}", inner, *rules)


UNPARSED = OutputFormat("", "", {})
"""Outputs are text."""


# -- the outputs of one request ----------------------------------------------------------------------------------------


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
            parts += self._parser.end(is_cut=reason != "stop")
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
    begun: bool | None = None  # an output begins within reasoning; see `parsers.reasoning.has_begun`
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
        tools, reasoning: names of parsers; "": the one that the template calls for.  `TEXT` for reasoning: none.
        has_tools: whether models may call tools unasked; None: where the parser is known.
        template: the chat template's source.
        special: ids of the tokenizer's special tokens, by their spelling.
        ignores_tools: the template does, so the system prompt asks for calls in the form of `HERMES`.

    Raises:
        ValueError: the parser is not known, or does not fit the tokenizer.
    """
    tools, reasoning = TOOL_ALIASES.get(tools, tools), REASONING_ALIASES.get(reasoning, reasoning)
    found = tools or (HERMES if ignores_tools else tool_parser_of(template))
    if not reasoning:
        reasoning = HARMONY if found == HARMONY else reasoning_parser_of(template)
    reasoning = "" if reasoning == TEXT else reasoning
    if has_tools is False:
        return OutputFormat("", reasoning, special)
    if has_tools and not found:
        raise ValueError("--enable-auto-tool-choice: the chat template does not tell how the model calls tools; "
                         f"name a parser with --tool-call-parser: {', '.join(sorted(TOOL_PARSERS))}")
    try:
        return OutputFormat(found, reasoning, special)
    except ValueError:
        if tools or has_tools or reasoning == HARMONY:
            raise
        return OutputFormat("", reasoning, special)
