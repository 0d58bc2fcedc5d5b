"""Owns the texts that the real model reads in tests and benchmarks: token ids of this repository's own, frozen.

Results compare only where the same tokens were read, and the documentation changes with every release.  So the token
ids were drawn once, from the pages, the license and the code of one commit, and stand in real_texts.json.  Drawing them
again makes all stored results and `tests/real_weights/reference.json` invalid:

    python -m benchmarks.real_texts
    PYTHONPATH=tests python -m support.real_reference
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from slotwise.compute.model.model_registry import find
from slotwise.measure.bench.results import commit
from slotwise.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")
WINDOW = 1024  # tokens
DOCUMENTS: dict[str, tuple[int, tuple[str, ...]]] = {  # how many windows of which files
    "license": (2, ("LICENSE",)),
    "documentation": (11, ("docs/batching.md", "docs/tutorial.md", "docs/reliability.md", "docs/architecture.md")),
    "code": (7, ("src/slotwise/core/scheduler.py", "src/slotwise/core/kv_manager.py", "src/slotwise/core/request.py")),
}


def draw(model: Path) -> dict[str, Any]:
    """Returns the first tokens of each document, by the tokenizer of `model`, and where they are from."""
    tokenizer, documents = Tokenizer.load(model), {}
    for name, (num_windows, files) in DOCUMENTS.items():
        ids = tokenizer.encode("\n\n".join((ROOT / file).read_text() for file in files), add_special_tokens=False)
        if len(ids) < num_windows * WINDOW:
            raise ValueError(f"{name} has {len(ids)} tokens, fewer than {num_windows} windows of {WINDOW}: add a file")
        documents[name] = {"files": files, "token_ids": ids[: num_windows * WINDOW]}
    return {"version": 1, "commit": commit(), "tokenizer": model.name, "documents": documents}


@cache
def documents() -> dict[str, list[int]]:
    """Returns the token ids of each document, in SmolLM2's vocabulary."""
    return {name: one["token_ids"] for name, one in json.loads(FILE.read_text())["documents"].items()}


def windows(length: int = WINDOW) -> list[list[int]]:
    """Returns the first `length` tokens of each window of `WINDOW` tokens of all documents."""
    return [ids[at : at + length] for ids in documents().values() for at in range(0, len(ids), WINDOW)]


if __name__ == "__main__":
    FILE.write_text(json.dumps(draw(find("smollm2").path), separators=(",", ":")) + "\n")
