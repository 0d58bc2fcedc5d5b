"""The parsers of outputs, and how published templates render, from `docs/templates.json`."""

from __future__ import annotations

import json
from typing import Any

from docs.generate.blocks import ROOT
from docs.generate.markdown import code, sentence, table

from slotwise.api.parsers.parser_table import REASONING_ALIASES, REASONING_PARSERS
from slotwise.api.parsers.tool_formats import ALIASES
from slotwise.api.parsers.tool_formats import FORMATS as TOOL_PARSERS

MAX_DEFAULT = 40  # characters of a default that the table shows


def output_parsers() -> str:
    """Returns a table of the parsers, with the models that they are for."""
    rows = []
    for option, parsers, aliases in (("--tool-call-parser", TOOL_PARSERS, ALIASES),
                                     ("--reasoning-parser", REASONING_PARSERS, REASONING_ALIASES)):
        for name, parser in sorted(parsers.items()):
            others = [code(alias) for alias, meant in sorted(aliases.items()) if meant == name]
            rows.append((code(option), code(name), sentence(parser.models), ", ".join(others) or "–"))
    return table(("option", "parser", "models", "other names"), rows)


def published_templates() -> str:
    """Returns how each template renders beside transformers, and what it loses."""
    content = json.loads((ROOT / "docs" / "templates.json").read_text())
    rows = content["rows"]
    kinds = ("equal", "normalized", "refused", "differ", "sent kept", "sent refused", "sent lost", "sent unlike")
    equal, normalized, refused, differ, kept, not_taken, lost, unlike = [
        sum(row[kind] for row in rows) for kind in kinds]
    head = (f"{len(rows)} templates compared with transformers {content['transformers']}: {equal} renderings are "
            f"equal, in {normalized} transformers refuses or loses something and Slotwise does not, {refused} are "
            f"refused by both, and {differ} differ. Of {kept + not_taken + lost + unlike} further conversations {kept} "
            f"are rendered whole, {not_taken} are refused, and {lost + unlike} lose something.")
    return "\n\n".join((head, table(
        ("template", "equal>", "normalized>", "refused by both>", "differ>", "sent>", "refused>", "lost>"),
        [(code(row["template"]), *(str(row[kind]) for kind in kinds[:5]), str(row["sent refused"]),
          str(row["sent lost"] + row["sent unlike"])) for row in rows])))


READ = {  # what the parsers make of calls as the template writes them
    "calls": "calls", "calls, reasoning": "calls and reasoning",
    "text": "–: the template leaves calls out, and they become text",
    "lost": "–: the template refuses them"}


def template_formats() -> str:
    """Returns the formats and the variables of each template."""
    rows = json.loads((ROOT / "docs" / "templates.json").read_text())["rows"]
    return table(("template", "tool calls", "reasoning", "read back", "variables"), [
        (code(row["template"]),
         "no tools in this template: the generic form" if row["tools"] == "ignored" else code(row["parser"]),
         code(row["reasoning"]) if row["reasoning"] else "–", READ[row["read"]],
         ", ".join([_variable(name, about) for name, about in row["variables"].items()]) or "–") for row in rows])


def _variable(name: str, about: dict[str, Any]) -> str:
    values = about.get("values") or ([True, False] if about.get("type") == "boolean" else [])
    default = json.dumps(about["default"], ensure_ascii=False) if "default" in about else ""
    told = [" or ".join(json.dumps(value) for value in values)] * bool(values) + [f"else {default}"] * bool(default)
    return code(name) + (f" ({'; '.join(told)})" if told and len(default) < MAX_DEFAULT else "")
