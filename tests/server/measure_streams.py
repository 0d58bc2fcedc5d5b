"""CPU time of the API process for each streamed token: 64 streams, an engine that only sleeps.

usage: python tests/server/measure_streams.py [STREAMS] [SECONDS_PER_STEP] [BODY_AS_JSON]

The time is all of the process: decoding reports, metrics, detokenizing, JSON, sockets, and the kernel's share of them.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from live_server import POSTED, running
from toy_checkpoint import write_checkpoint

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def read_all(connections: list[socket.socket]) -> None:
    """Until every stream has ended, looking at nothing but the end."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        left = len(connections)
        while left:
            for key, _ in selector.select():
                if b"[DONE]" in key.fileobj.recv(1 << 16):
                    selector.unregister(key.fileobj)
                    left -= 1


def main(streams: int = 64, seconds_per_step: float = 0.03, extra: str = "{}") -> None:
    tokens = 300
    body = json.dumps({"prompt": [40], "max_tokens": tokens, "ignore_eos": True, "stream": True} | json.loads(extra))
    request = POSTED + f"{len(body)}\r\n\r\n{body}".encode()
    with tempfile.TemporaryDirectory() as name:
        folder = write_checkpoint(Path(name))
        with running(folder, folder / "engine", f"seconds_per_step={seconds_per_step}") as server:
            host, port = server.url.removeprefix("http://").split(":")
            for _ in range(3):
                connections = [socket.create_connection((host, int(port))) for _ in range(streams)]
                before = cpu_seconds(server.process.pid)
                for connection in connections:
                    connection.sendall(request)
                read_all(connections)
                spent = cpu_seconds(server.process.pid) - before
                print(f"{streams} streams: {spent / (streams * tokens) * 1e6:.1f} us of CPU a token", flush=True)
                for connection in connections:
                    connection.close()


if __name__ == "__main__":
    main(*[kind(value) for kind, value in zip((int, float, str), sys.argv[1:], strict=False)])
