"""Runs functions that call a client, and writes what each returned or raised as JSON.

Runs in the client's environment: standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Server:
    url: str  # without /v1
    base_url: str  # with /v1
    model: str
    key: str


def server() -> Server:
    """The server that the program was started with."""
    return Server(**json.loads(sys.argv[1]))


def run(*calls: Callable[[], Any]) -> None:
    """Calls each function, awaiting those that are coroutines, and writes the results under the functions' names."""
    results = {}
    for call in calls:
        try:
            returned = call()
            results[call.__name__] = {"returned": asyncio.run(returned) if inspect.iscoroutine(returned) else returned}
        except Exception:
            results[call.__name__] = {"raised": traceback.format_exc()}
    Path(sys.argv[2]).write_text(json.dumps(results))
