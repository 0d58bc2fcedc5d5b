"""The parsers of outputs."""

from __future__ import annotations

from docs.generate.markdown import code, sentence, table

from slotwise.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS


def output_parsers() -> str:
    """Returns a table of the parsers, with the models that they are for."""
    rows = []
    for option, parsers in (("--tool-call-parser", TOOL_PARSERS), ("--reasoning-parser", REASONING_PARSERS)):
        for name, parser in sorted(parsers.items()):
            rows.append((code(option), code(name), sentence(parser.MODELS)))
    return table(("option", "parser", "models"), rows)
