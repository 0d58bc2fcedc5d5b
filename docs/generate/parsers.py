"""The parsers of outputs, and which of llama.cpp's templates render as `transformers` renders them."""

from __future__ import annotations

import sys

from docs.generate.markdown import code, first_sentence, table

from slotwise.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS


def output_parsers() -> str:
    """Returns a table of the parsers, with what their modules say."""
    rows = []
    for option, parsers in (("--tool-call-parser", TOOL_PARSERS), ("--reasoning-parser", REASONING_PARSERS)):
        for name, parser in sorted(parsers.items()):
            told = first_sentence(sys.modules[parser.__module__].__doc__)
            rows.append((code(option), code(name), told.partition(": ")[2].partition(".")[0].rstrip(":") + "."))
    return table(("option", "parser", "models"), rows)
