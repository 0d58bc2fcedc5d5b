"""The tables of clients, from `docs/clients.json`, which `make clients` and `make clients-more` write."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from docs.generate.blocks import ROOT
from docs.generate.markdown import code, escaped, sentence, table

RESULTS = {"works": "Works.", "refused": "Refused: {}.", "fails": "**Fails**: {}.", "not run": "Not run: {}"}


def clients() -> str:
    """Returns a row for each client: how to point it at a server, and how much of what it does works."""
    return table(("client", "version", "setting", "tried"), [
        (client["client"], client["version"], sentence(_linked(client["setting"])), _counted(client["rows"]))
        for client in _read()])


def what_clients_do() -> str:
    """Returns when the clients were run, and a row for each thing that they did."""
    read = _read()
    dates = sorted({client["date"] for client in read})
    pythons = sorted({client["python"] for client in read})
    rows = [(client["client"], row) for client in read for row in client["rows"]]
    head = (f"Run on {' and '.join(dates)} with Python {' and '.join(pythons)}; {len(rows)} rows "
            f"({_counted(row for _, row in rows)}).")
    return head + "\n\n" + table(("client", "what it does", "result"), [
        (client, sentence(_linked(row["does"])), _result(row)) for client, row in rows])


def _read() -> list[dict[str, Any]]:
    return json.loads((ROOT / "docs" / "clients.json").read_text())


def _counted(rows: Iterable[dict[str, str]]) -> str:
    counts = Counter(row["result"] for row in rows)
    return ", ".join(f"{result}: {counts[result]}" for result in RESULTS if counts[result])


def _linked(text: str) -> str:
    """Text of a test, whose links are relative to docs/clients.md."""
    return text.replace("](#", "](../clients.md#").replace("](apis.md", "](../apis.md")


def _result(row: dict[str, str]) -> str:
    reason = escaped(row["reason"]) if row["result"] == "not run" else code(row["reason"].replace("`", "'"))
    return RESULTS[row["result"]].format(reason)
