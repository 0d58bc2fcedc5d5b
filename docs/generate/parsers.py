"""The parsers of outputs, and how published templates render, from `docs/templates.json`."""

from __future__ import annotations

import json

from docs.generate.blocks import ROOT
from docs.generate.markdown import code, sentence, table

from slotwise.server.parsers.registry import REASONING_PARSERS, TOOL_PARSERS


def output_parsers() -> str:
    """Returns a table of the parsers, with the models that they are for."""
    rows = []
    for option, parsers in (("--tool-call-parser", TOOL_PARSERS), ("--reasoning-parser", REASONING_PARSERS)):
        for name, parser in sorted(parsers.items()):
            rows.append((code(option), code(name), sentence(parser.MODELS)))
    return table(("option", "parser", "models"), rows)


def published_templates() -> str:
    """Returns how many renderings of each template equal those of transformers, and its parser of tool calls."""
    content = json.loads((ROOT / "docs" / "templates.json").read_text())
    rows = content["rows"]
    equal, refused, differ = [sum(row[kind] for row in rows) for kind in ("equal", "refused", "differ")]
    head = (f"{len(rows)} templates beside transformers {content['transformers']}: {equal} renderings are equal, "
            f"{refused} are refused by both, and {differ} differ.")
    return head + "\n\n" + table(("template", "equal>", "refused by both>", "differ>", "parser of tool calls"), [
        (code(row["template"]), str(row["equal"]), str(row["refused"]), str(row["differ"]),
         code(row["parser"]) if row["parser"] else "–") for row in rows])
