"""Measures the time of refusals, with a client in a process of its own that sends requests at intervals.

usage: python -m attacks.probe URL PID SECONDS; prints JSON.

Wall time includes all other load of the machine.  So it also measures the API process' computing time in between, for
this refusal and all work before it: an upper bound of the refusal's cost.
"""

from __future__ import annotations

import json
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from attacks.clients import PATH
from attacks.ledger import COMPLETED, HUNG_UP, LOST, REFUSED

PAUSE = 0.1  # seconds
PATIENCE = 2.0  # seconds; accepted requests wait longer and do not count
BODY = json.dumps({"prompt": [5], "max_tokens": 1})


class ProbeAnswer(NamedTuple):
    """The outcome of one request, and its milliseconds."""

    fate: str
    ms: float = 0.0
    computing_ms: float = 0.0  # of the API process' event loop, in between


def computed(pid: int) -> float:
    """Returns the computing time of the main thread of `pid`, which serves every request, in milliseconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) * 1e-6


def once(connection: HTTPConnection, pid: int) -> ProbeAnswer:
    before, began = computed(pid), time.perf_counter()
    try:
        connection.request("POST", PATH, BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    except TimeoutError:
        connection.close()
        return ProbeAnswer(HUNG_UP)
    except (OSError, HTTPException):
        connection.close()
        return ProbeAnswer(LOST)
    ms = 1000 * (time.perf_counter() - began)
    return ProbeAnswer({200: COMPLETED, 503: REFUSED}.get(response.status, LOST), ms, computed(pid) - before)


def main() -> None:
    url, pid, seconds = urlsplit(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    connection = HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE)
    end = time.perf_counter() + seconds
    seen: list[ProbeAnswer] = []
    while time.perf_counter() < end:
        time.sleep(PAUSE)
        seen.append(once(connection, pid))
    refused = [one for one in seen if one.fate == REFUSED]
    print(json.dumps({"fates": [one.fate for one in seen], "refused_ms": [one.ms for one in refused],
                      "computing_ms": [one.computing_ms for one in refused]}))


if __name__ == "__main__":
    main()
