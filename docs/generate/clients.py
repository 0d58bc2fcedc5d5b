"""The table of clients, from `docs/clients.json`, which `make clients` writes."""

from __future__ import annotations

import json
from collections import Counter

from docs.generate.blocks import ROOT
from docs.generate.markdown import code, escaped, sentence, table

RESULTS = {"works": "Works.", "refused": "Refused: {}.", "fails": "**Fails**: {}.", "not run": "Not run: {}"}


def clients() -> str:
    """Returns when the clients were run, and a row for each thing that they did."""
    content = json.loads((ROOT / "docs" / "clients.json").read_text())
    rows = content["rows"]
    counts = Counter(row["result"] for row in rows)
    told = ", ".join(f"{result}: {counts[result]}" for result in RESULTS if counts[result])
    head = f"Run on {content['date']} with Python {content['python']}; {len(rows)} rows ({told})."
    return head + "\n\n" + table(("client", "version", "what it does", "result"), [
        (row["client"], row["version"], sentence(row["does"]).replace("](#", "](../clients.md#"), _result(row))
        for row in rows])


def _result(row: dict[str, str]) -> str:
    reason = escaped(row["reason"]) if row["result"] == "not run" else code(row["reason"].replace("`", "'"))
    return RESULTS[row["result"]].format(reason)
