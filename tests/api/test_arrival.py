"""Latencies of a server count from the moment at which a request was read whole."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
from support.live_server import POSTED, eventually, running

from slotwise.core.record import StepRecord
from slotwise.observe import event_log

SLOW = 0.4  # seconds between the parts of a body


def test_the_first_tokens_time_counts_from_the_end_of_the_body(folder: Path, tmp_path: Path) -> None:
    body = json.dumps({"prompt": "the quick brown fox", "max_tokens": 3, "ignore_eos": True}).encode()
    with running(folder, tmp_path / "engine") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(POSTED + f"{len(body)}\r\n\r\n".encode() + body[:10])
            eventually(lambda: server.get("/load").json()["server_load"] == 1)  # it has read the head
            time.sleep(SLOW)
            connection.sendall(body[10:])
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        eventually(lambda: value(server.get("/metrics").text, "e2e_request_latency_seconds_count") == 1)
        metrics = server.get("/metrics").text
        entries = [event_log.decode(line) for line in server.get("/events?follow=0").content.splitlines()]
    (request,) = [entry for entry in entries if isinstance(entry, event_log.RequestEntry)]
    assert request.timing.read_ns - request.timing.received_ns >= SLOW * 1e9, "the body was slow"
    assert request.timing.read_ns <= request.timing.tokenized_ns <= request.ns
    published = [entry.ended_ns for entry in entries if isinstance(entry, StepRecord) and any(entry.tokens)]
    assert len(published) == 3
    for name, end in (("time_to_first_token", published[0]), ("e2e_request_latency", published[-1])):
        seconds = value(metrics, f"{name}_seconds_sum")
        assert seconds == pytest.approx((end - request.timing.read_ns) * 1e-9)
        assert seconds < (end - request.timing.received_ns) * 1e-9 - SLOW


def value(metrics: str, name: str) -> float:
    (found,) = [line for line in metrics.splitlines() if line.startswith(f"slotwise:{name}{{")]
    return float(found.rpartition(" ")[2])
