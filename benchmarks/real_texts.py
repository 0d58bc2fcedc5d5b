"""Owns the texts that models read in tests and benchmarks, as token ids that were frozen.

Results compare only where the same tokens were read, and the documentation changes with every release, as Python's
library does.  So the token ids were drawn once: for the real model from the pages, the license and the code of one
commit of this repository (real_texts.json), and for the built-in one from functions of Python 3.11.7's library that
`training/corpus.py` holds out, tests excluded (builtin_texts.json).  Drawing them again makes all stored results and
`tests/real_weights/reference.json` invalid:

    python -m benchmarks.real_texts
    PYTHONPATH=tests python -m support.real_reference
"""

from __future__ import annotations

import json
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

from slotwise import builtin
from slotwise.compute.model.model_registry import find
from slotwise.measure.bench.results import commit
from slotwise.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
FILE, BUILTIN_FILE = (Path(__file__).with_name(f"{name}_texts.json") for name in ("real", "builtin"))
NUM_FUNCTIONS = 300
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


def draw_functions() -> dict[str, Any]:
    """Returns held-out functions in token ids of the built-in model, end token included."""
    sys.path.append(str(ROOT / "training"))
    from corpus import library_sample, read_documents, split, standard_library

    tokenizer = Tokenizer.load(builtin.path())
    _, held_out = split(read_documents(standard_library()))
    found = [[*tokenizer.encode(document.text), 1] for document in library_sample(held_out, NUM_FUNCTIONS, seed=2)]
    return {"version": 1, "python": platform.python_version(), "functions": found}


@cache
def functions() -> list[list[int]]:
    """Returns the token ids of each held-out function, in the built-in model's vocabulary."""
    found: list[list[int]] = json.loads(BUILTIN_FILE.read_text())["functions"]
    return found


@cache
def documents() -> dict[str, list[int]]:
    """Returns the token ids of each document, in SmolLM2's vocabulary."""
    return {name: one["token_ids"] for name, one in json.loads(FILE.read_text())["documents"].items()}


def windows(length: int = WINDOW) -> list[list[int]]:
    """Returns the first `length` tokens of each window of `WINDOW` tokens of all documents."""
    return [ids[at : at + length] for ids in documents().values() for at in range(0, len(ids), WINDOW)]


if __name__ == "__main__":
    FILE.write_text(json.dumps(draw(find("smollm2").path), separators=(",", ":")) + "\n")
    BUILTIN_FILE.write_text(json.dumps(draw_functions(), separators=(",", ":")).replace("],[", "],\n[") + "\n")
