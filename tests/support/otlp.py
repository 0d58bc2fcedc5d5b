"""A collector: takes traces over HTTP, as OTLP has them, and keeps their spans."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.paths: set[str] = set()

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {attributes(resource.resource)["service.name"]}
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def roots(self) -> list[Span]:
        return [span for span in self.spans if span.name == "llm_request"]

    def children(self, root: Span) -> list[Span]:
        """In order of time."""
        found = [span for span in self.spans if span.parent_span_id == root.span_id]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))

    def eventually(self, holds: Callable[[Collector], bool], seconds: float = 120) -> None:
        give_up = time.monotonic() + seconds
        while not holds(self):
            assert time.monotonic() < give_up, f"only {len(self.spans)} spans came"
            time.sleep(0.02)


def attributes(carrier: Any) -> dict[str, Any]:
    """Of a span or a resource."""
    found = {}
    for pair in carrier.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


class Silent:
    """Connections that are taken and never answered."""

    def __init__(self, listening: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.taken: list[socket.socket] = []
        self._listening = listening

    def take_all(self) -> None:
        with suppress(OSError):  # closed
            while True:
                self.taken.append(self._listening.accept()[0])


@contextmanager
def silent() -> Iterator[Silent]:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        collector = Silent(listening)
        thread = threading.Thread(target=collector.take_all, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
            thread.join()
            for connection in collector.taken:
                connection.close()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
