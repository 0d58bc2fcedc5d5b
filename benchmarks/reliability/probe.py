"""A client that does nothing but ask now and then, in a process of its own: how long a refusal takes.

usage: python -m benchmarks.reliability.probe URL SECONDS; prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from .clients import PATH
from .ledger import COMPLETED, HUNG_UP, LOST, REFUSED

PAUSE = 0.1  # seconds
PATIENCE = 2.0  # seconds; who was let in waits for long, and is not what this is about
BODY = json.dumps({"prompt": [5], "max_tokens": 1})


def once(connection: HTTPConnection) -> tuple[str, float]:
    """What became of one request, and after how many milliseconds."""
    began = time.perf_counter()
    try:
        connection.request("POST", PATH, BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    except TimeoutError:
        connection.close()
        return HUNG_UP, 0.0
    except (OSError, HTTPException):
        connection.close()
        return LOST, 0.0
    return {200: COMPLETED, 503: REFUSED}.get(response.status, LOST), 1000 * (time.perf_counter() - began)


def main() -> None:
    url, seconds = urlsplit(sys.argv[1]), float(sys.argv[2])
    connection = HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE)
    end = time.perf_counter() + seconds
    seen = []
    while time.perf_counter() < end:
        time.sleep(PAUSE)
        seen.append(once(connection))
    print(json.dumps({"fates": [fate for fate, _ in seen], "refused_ms": [ms for fate, ms in seen if fate == REFUSED]}))


if __name__ == "__main__":
    main()
