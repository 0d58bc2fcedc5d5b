"""The parsers of outputs, and how published templates render, from `docs/templates.json`."""

from __future__ import annotations

import json

from docs.generate.blocks import ROOT
from docs.generate.markdown import code, sentence, table

from slotwise.api.parsers.parser_table import REASONING_PARSERS
from slotwise.api.parsers.tool_formats import FORMATS as TOOL_PARSERS


def output_parsers() -> str:
    """Returns a table of the parsers, with the models that they are for."""
    rows = []
    for option, parsers in (("--tool-call-parser", TOOL_PARSERS), ("--reasoning-parser", REASONING_PARSERS)):
        for name, parser in sorted(parsers.items()):
            rows.append((code(option), code(name), sentence(parser.models)))
    return table(("option", "parser", "models"), rows)


def published_templates() -> str:
    """Returns how each template renders beside transformers, what it loses, and its parser of tool calls."""
    content = json.loads((ROOT / "docs" / "templates.json").read_text())
    rows = content["rows"]
    kinds = ("equal", "normalized", "refused", "differ", "sent kept", "sent refused", "sent lost", "sent unlike")
    equal, normalized, refused, differ, kept, not_taken, lost, unlike = [
        sum(row[kind] for row in rows) for kind in kinds]
    head = (f"{len(rows)} templates compared with transformers {content['transformers']}: {equal} renderings are "
            f"equal, in {normalized} transformers refuses or loses something and Slotwise does not, {refused} are "
            f"refused by both, and {differ} differ. Of {kept + not_taken + lost + unlike} further conversations {kept} "
            f"are rendered whole, {not_taken} are refused, and {lost + unlike} lose something.")
    unparsed = [code(row["template"]) for row in rows if not _parser(row)]
    return "\n\n".join((head, table(
        ("template", "equal>", "normalized>", "refused by both>", "differ>", "sent>", "refused>", "lost>",
         "parser of tool calls"),
        [(code(row["template"]), *(str(row[kind]) for kind in kinds[:5]), str(row["sent refused"]),
          str(row["sent lost"] + row["sent unlike"]), _parser(row) or "–") for row in rows]),
        f"{len(unparsed)} templates describe tools in a form that has no parser yet: {', '.join(unparsed)}."))


def _parser(row: dict[str, str]) -> str:
    if row["tools"] == "ignored":
        return code("hermes") + ", generic"
    return code(row["parser"]) if row["parser"] else ""
