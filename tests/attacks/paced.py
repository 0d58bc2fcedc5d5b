"""Reads and times a stream in a process of its own: the reader's wait from one token to the next.

usage: python -m attacks.paced URL PID

Prints JSON lines until it is killed: {"from": s, "to": s, "computing": s} for each wait between two tokens, {"text":
..., "tokens": n} for each complete response, {"failed": why, "at": s} for each failed one.  Times are those of
`time.perf_counter`; computing is that of the main thread of PID, the API process, which serves every stream.
"""

from __future__ import annotations

import json
import sys
import time
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from attacks.clients import PATH
from attacks.probe import computed

BODY = {"prompt": "def main(", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
WORTH_TELLING = 0.02  # seconds; shorter waits are never the largest
PAUSE = 0.2  # seconds after a failed response
PATIENCE = 30.0  # seconds without a byte


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def stream(connection: HTTPConnection, pid: int) -> None:
    """Reads one response.

    Raises:
        OSError, HTTPException, ValueError: the response failed.
    """
    connection.request("POST", PATH, json.dumps(BODY), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read(300).decode(errors='replace')}")
    texts: list[str] = []
    before = computing = 0.0
    while line := response.readline():
        now = time.perf_counter()
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            response.read()
            tell(text="".join(texts), tokens=len(texts))
            return
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(str(event["error"]))
        texts += [choice["text"] for choice in event["choices"]]
        if before and now - before > WORTH_TELLING:
            tell(**{"from": before, "to": now, "computing": computed(pid) / 1000 - computing})
        before, computing = now, computed(pid) / 1000
    raise ValueError("the stream broke off")


def main() -> None:
    url, pid = urlsplit(sys.argv[1]), int(sys.argv[2])
    while True:
        connection = HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE)
        try:
            stream(connection, pid)
        except (OSError, HTTPException, ValueError) as error:
            tell(failed=f"{type(error).__name__}: {error}", at=time.perf_counter())
            time.sleep(PAUSE)
        finally:
            connection.close()


if __name__ == "__main__":
    main()
