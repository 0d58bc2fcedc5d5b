"""The table of clients, from `docs/clients.json`, which `make clients` writes."""

from __future__ import annotations

import json
from collections import Counter

from docs.generate.blocks import ROOT
from docs.generate.markdown import sentence, table

RESULTS = {"works": "Works.", "refused": "Refused: {}", "fails": "**Fails**: {}", "not run": "Not run: {}"}


def clients() -> str:
    """Returns when the clients were run, and a row for each thing that they did."""
    content = json.loads((ROOT / "docs" / "clients.json").read_text())
    rows = content["rows"]
    counts = Counter(row["result"] for row in rows)
    told = ", ".join(f"{counts[name]} {name}" for name in ("works", "refused", "fails", "not run") if counts[name])
    head = f"Run on {content['date']} with Python {content['python']}; rows by their result: {told}."
    return head + "\n\n" + table(("client", "version", "what it does", "result"), [
        (row["client"], row["version"], sentence(row["does"]), _result(row)) for row in rows])


def _result(row: dict[str, str]) -> str:
    reason = sentence(row["reason"]) if row["reason"] else ""
    return RESULTS[row["result"]].format(reason)
