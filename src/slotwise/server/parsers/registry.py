"""The parsers by name, and the one that a chat template calls for."""

from __future__ import annotations

from collections.abc import Mapping

from slotwise.server.parsers.harmony import Harmony
from slotwise.server.parsers.hermes import Hermes
from slotwise.server.parsers.llama3_json import Llama3Json
from slotwise.server.parsers.markers import Markers
from slotwise.server.parsers.mistral import Mistral
from slotwise.server.parsers.parser import Chain, FormatParser, OutputParser, Spelled, Tools
from slotwise.server.parsers.pythonic import Pythonic
from slotwise.server.parsers.qwen3_xml import Qwen3Xml
from slotwise.server.parsers.thinking import DeepSeekR1, Qwen3

HARMONY = "openai"  # one format for both
TOOL_PARSERS: dict[str, type[FormatParser]] = {
    "hermes": Hermes, "llama3_json": Llama3Json, "mistral": Mistral, HARMONY: Harmony, "pythonic": Pythonic,
    "qwen3_xml": Qwen3Xml}
THINKING_PARSERS: dict[str, type[Qwen3]] = {"deepseek_r1": DeepSeekR1, "qwen3": Qwen3}
REASONING_PARSERS: dict[str, type[FormatParser]] = {**THINKING_PARSERS, HARMONY: Harmony}
SIGNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (  # a template has all of these, none of those
    (HARMONY, ("<|channel|>", "<|message|>"), ()),
    ("qwen3_xml", ("<tool_call>", "<function=", "<parameter="), ()),
    ("hermes", ("<tool_call>", '"arguments"'), ("<arg_key>", "<function=", "<tool_calls>")),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("llama3_json", ("<|start_header_id|>", '"parameters"'), ("<tool_call>", "<function=")),
    ("pythonic", ("func_name1(",), ()),
)


TOOL_ALIASES = {"qwen3_coder": "qwen3_xml"}  # vLLM's names
REASONING_ALIASES = {"openai_gptoss": HARMONY}


def tool_parser_of(template: str) -> str:
    """The name of the parser for calls as a chat template writes them; "" if none is known."""
    for name, signs, others in SIGNS:
        if all(sign in template for sign in signs) and not any(other in template for other in others):
            return name
    return ""


class OutputFormat:
    """How a model's outputs are parsed.

    Args:
        tools, reasoning: names of parsers, "" for none.
        special: ids of the tokenizer's special tokens, by their spelling.

    Raises:
        ValueError: the tokenizer does not have the special tokens of the format.
    """

    def __init__(self, tools: str, reasoning: str, special: Mapping[str, int]) -> None:
        self.tools, self.reasoning = tools, reasoning
        of_tools = TOOL_PARSERS[tools].SPELLINGS if tools else ()
        of_reasoning = REASONING_PARSERS[reasoning].SPELLINGS if reasoning else ()
        self._both, self._one = Markers(special, (*of_tools, *of_reasoning)), Markers(special, of_reasoning)
        missing = [spelling for spelling in Harmony.SPELLINGS if spelling not in self._both]
        if HARMONY in (tools, reasoning) and missing:
            raise ValueError(f"the parser {HARMONY} needs a tokenizer with the special tokens of harmony; "
                             f"{missing[0]} is none of its own")

    def parses(self, tools: Tools | None) -> bool:
        """Whether outputs are parsed that may call `tools`, or none."""
        return bool(self.reasoning) or (bool(self.tools) and tools is not None)

    def markers(self, tools: Tools | None) -> Markers:
        """How special tokens stand in the text that a parser reads."""
        return self._one if tools is None else self._both

    def parser(self, tools: Tools | None, begun: bool | None = None) -> OutputParser:
        """A parser for one output.

        Args:
            tools: those that may be called; None: calls stay text.
            begun: whether the output begins within reasoning; see `thinking.has_begun`.
        """
        markers = self.markers(tools)
        if HARMONY in (self.reasoning, self.tools if tools is not None else ""):
            return Spelled(Harmony(markers, tools or {}), markers)
        parsers: list[OutputParser] = []
        if self.reasoning:
            parsers.append(THINKING_PARSERS[self.reasoning](markers, begun))
        if self.tools and tools is not None:
            parsers.append(TOOL_PARSERS[self.tools](markers, tools))
        return Spelled(Chain(*parsers), markers)


UNPARSED = OutputFormat("", "", {})
"""Outputs are text."""
