"""Server-sent events as vLLM's benchmark client cuts them from the bytes of the network.

Rules (vllm/benchmarks/lib/endpoint_request_func.py): what arrives at once is stripped of white space at both ends; an
event ends at a blank line, or where what is left is complete: `data: [DONE]` or `data: ` with valid JSON.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator

DATA = "data: "
DONE = "[DONE]"


def events(arriving: Iterable[bytes]) -> Iterator[str]:
    """The data of each event.  Raises AssertionError for bytes that no event takes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = ""
    for part in arriving:
        held += decoder.decode(part.strip())
        *complete, held = held.split("\n\n")
        if _is_complete(held):
            complete, held = [*complete, held], ""
        for event in map(str.strip, complete):
            if event and not event.startswith(":"):
                yield event.removeprefix(DATA)
    assert not held, f"the stream ends within an event: {held!r}"


def _is_complete(text: str) -> bool:
    data = text.removeprefix(DATA).strip()
    if not text.startswith(DATA) or data == DONE:
        return text.startswith(DATA)
    try:
        json.loads(data)
    except json.JSONDecodeError:
        return False
    return True
