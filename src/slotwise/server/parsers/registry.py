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
    ("hermes", ("<tool_call>", '"arguments"'), ("<arg_key>", "<function=")),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("llama3_json", ("<|start_header_id|>", '"parameters"'), ("<tool_call>", "<function=")),
    ("pythonic", ("func_name1(",), ()),
)


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
        kinds = [*([TOOL_PARSERS[tools]] if tools else ()), *([REASONING_PARSERS[reasoning]] if reasoning else ())]
        self.markers = Markers(special, [spelling for kind in kinds for spelling in kind.SPELLINGS])
        missing = [spelling for spelling in Harmony.SPELLINGS if spelling not in self.markers]
        if HARMONY in (tools, reasoning) and missing:
            raise ValueError(f"the parser {HARMONY} needs a tokenizer with the special tokens of harmony; "
                             f"{missing[0]} is none of its own")

    def parser(self, tools: Tools | None, prompt: str = "") -> OutputParser | None:
        """A parser for one output; None where there is nothing to parse.

        Args:
            tools: those that may be called; None: calls stay text.
            prompt: as the chat template wrote it.
        """
        if HARMONY in (self.reasoning, self.tools if tools is not None else ""):
            return Spelled(Harmony(self.markers, tools or {}), self.markers)
        reasoning = THINKING_PARSERS[self.reasoning](self.markers, prompt) if self.reasoning else None
        calls = TOOL_PARSERS[self.tools](self.markers, tools) if self.tools and tools is not None else None
        if reasoning is not None and calls is not None:
            return Spelled(Chain(reasoning, calls), self.markers)
        only: OutputParser | None = reasoning or calls
        return Spelled(only, self.markers) if only is not None else None
