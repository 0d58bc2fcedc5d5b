"""The event log as a stream: whole, in order, through the loss of an engine, and to each tenant what is its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api.test_lifecycle import COMPLETIONS, SLOW, eventually
from support.live_server import ENDLESS, Server, counted, running
from support.recorded import Recorded
from support.records import record_of

from slotwise.api.admin.event_stream import MOST, TenantFilter, _View
from slotwise.api.app import ROUTES
from slotwise.api.generate.context import MAX_OF_ONE, MAX_SUBSCRIBERS
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import CompiledGrammar, DiskNews, ReceivedBlocks, RequestEnd, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add
from slotwise.observe import event_log, log_file
from slotwise.observe.ring import Ring
from slotwise.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


class Watching:
    """Reads `/events` in a thread of its own."""

    def __init__(self, server: Server, query: str = "", key: str = "") -> None:
        self.entries: list[event_log.Entry] = []
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server, "/events" + query, key))
        self._thread.start()
        assert self._opened.wait(120)

    def _read(self, server: Server, path: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with server.client.stream("GET", server.url + path, headers=headers) as response:
            assert response.headers["content-type"] == "application/x-ndjson"
            for line in response.iter_lines():
                self.entries.append(event_log.decode(line))
                self._opened.set()

    def of(self, kind: type) -> list[Any]:
        return [entry for entry in self.entries if isinstance(entry, kind)]

    def ended(self) -> list[event_log.Entry]:
        """All there was, once the stream has ended."""
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.entries


def written(server: Server, query: str = "", key: str = "") -> Watching:
    """What has been written so far."""
    watching = Watching(server, f"?follow=0{query}", key)
    watching.ended()
    return watching


@contextlib.contextmanager
def long_request(server: Server) -> Iterator[None]:
    with server.client.stream("POST", server.url + COMPLETIONS, json=ENDLESS | {"stream": True}) as response:
        lines = response.iter_lines()  # kept: without it the response is closed
        next(lines)
        yield


def test_a_stream_tells_of_each_request_from_its_first_byte_to_its_last(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine") as server:
        watching = Watching(server)
        server.events(COMPLETIONS, {"prompt": [40, 41, 42], "max_tokens": 5, "n": 2})
        server.post(COMPLETIONS, {"prompt": [50], "max_tokens": 3})
        assert server.client.put(server.url + "/admin/scheduling", json={"max_num_seqs": 2}).status_code == 200
        eventually(lambda: len(watching.of(event_log.Sent)) == 3
                   and any(step.inputs.configured for step in watching.of(StepRecord)))
        again = written(server)
        server.process.send_signal(signal.SIGTERM)
        entries = watching.ended()
    assert isinstance(entries[0], event_log.Run) and again.entries == entries[: len(again.entries)]
    requests, steps = watching.of(event_log.RequestEntry), watching.of(StepRecord)
    assert [(request.number, request.num_prompt, request.spec.prompt) for request in requests] == [
        (0, 3, ()), (1, 3, ()), (2, 1, ())]
    assert sum(len(step.inputs.handled) for step in steps) == len(requests) + 1
    for request, length, most_events in zip(requests, (5, 5, 3), (5, 5, 1), strict=True):
        rows = [(step, step.plan.request_ids.index(request.number))
                for step in steps if request.number in step.plan.request_ids]
        assert sum(len(step.tokens[row]) for step, row in rows) == length
        (sent,) = [sent for sent in watching.of(event_log.Sent) if sent.number == request.number]
        timing, (first, _), (last, _) = request.timing, rows[0], rows[-1]
        times = [timing.received_ns, timing.tokenized_ns, request.ns, first.started_ns, last.ended_ns]
        assert times == sorted(times) and request.ns <= sent.first_ns <= sent.last_ns >= times[-1]
        assert 1 <= sent.num_events <= most_events


def test_it_goes_on_with_the_next_engine_and_names_nobody_twice(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW) as server:
        watching = Watching(server)
        with contextlib.suppress(httpx.HTTPError), long_request(server):
            os.kill(server.engine_pid, signal.SIGKILL)
            eventually(lambda: len(watching.of(event_log.Run)) == 2)
        assert server.post(COMPLETIONS, {"prompt": [50], "max_tokens": 3}).status_code == 200
        eventually(lambda: bool(watching.of(event_log.Sent)))
    first, second = [index for index, entry in enumerate(watching.entries) if isinstance(entry, event_log.Run)]
    (lost,) = watching.of(event_log.EngineLost)
    ending = watching.entries[watching.entries.index(lost) + 1]
    assert lost.state == event_log.LOST and first < watching.entries.index(lost) < second
    assert [(end.request_id, end.reason) for end in ending.ended] == [(0, "error")]
    assert [request.number for request in watching.of(event_log.RequestEntry)] == [0, 1]


def test_without_the_backlog_it_begins_with_who_lives(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW) as server:
        assert server.post(COMPLETIONS, {"prompt": [50], "max_tokens": 3}).status_code == 200
        with long_request(server):
            seen = written(server, "&backlog=0").entries
    assert [type(entry) for entry in seen[:2]] == [event_log.Run, event_log.RequestEntry] and seen[1].number == 1
    assert not any(isinstance(entry, StepRecord) and entry.plan.request_ids == (0,) for entry in seen)


def test_viewers_are_counted_and_who_leaves_makes_room(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine") as server:
        for query in ("?backlog=2", "?follow=", "?backlog=1&follow=no"):
            answer = server.get("/events" + query)
            assert answer.status_code == 400 and answer.json()["error"]["param"] in ("backlog", "follow")
        for _ in range(2):
            with server.client.stream("GET", server.url + "/events") as response:
                next(response.iter_lines())
        eventually(lambda: server.get("/load").json()["server_load"] == 0)
        watching = [Watching(server) for _ in range(MAX_OF_ONE)]
        refused = server.get("/events")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_viewers"
        assert int(refused.headers["retry-after"]) > 0
        assert server.post(COMPLETIONS, {"prompt": [50], "max_tokens": 3}).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert all(len(viewer.ended()) > 3 for viewer in watching)


def test_one_key_leaves_places_to_others(folder: Path, tmp_path: Path) -> None:
    keys = [f"key{number}" for number in range(MAX_SUBSCRIBERS // MAX_OF_ONE + 1)]
    with running(folder, tmp_path / "engine", f"api_keys={','.join(keys)}") as server:
        watching = [Watching(server, key=keys[0]) for _ in range(MAX_OF_ONE)]
        refused = server.get("/events", Authorization=f"Bearer {keys[0]}")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_viewers"
        watching += [Watching(server, key=key) for key in keys[1:-1] for _ in range(MAX_OF_ONE)]
        assert len(watching) == MAX_SUBSCRIBERS
        assert server.get("/events", Authorization=f"Bearer {keys[-1]}").status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert all(viewer.ended() for viewer in watching)


def test_a_viewer_that_does_not_read_is_disconnected(folder: Path, tmp_path: Path) -> None:
    """The backlog is larger than what sockets and buffers of such a connection hold."""
    with running(folder, tmp_path / "engine", "seconds_per_step=0") as server:
        for _ in range(6):
            assert server.post(COMPLETIONS, {"prompt": [40], "n": 64, "max_tokens": 300}).status_code == 200
        address = httpx.URL(server.url)
        with contextlib.ExitStack() as open_sockets:
            silent = []
            for _ in range(MAX_OF_ONE):
                one = open_sockets.enter_context(socket.socket())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.connect((address.host, address.port))
                one.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                silent.append(one)
            for one in silent:
                assert one.recv(1)
            eventually(lambda: server.get("/events?follow=0").status_code == 429)
            eventually(lambda: server.get("/events?follow=0").status_code == 200)
            eventually(lambda: server.get("/load").json()["server_load"] == 0)
            for one in silent:
                one.settimeout(120)
                with contextlib.suppress(ConnectionResetError):
                    while one.recv(1 << 20):
                        pass


def test_others_requests_are_seen_and_not_read(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "api_keys=one,two") as server:
        for key, token in (("one", 40), ("two", 50)):
            answer = server.post(
                COMPLETIONS, {"prompt": [token], "max_tokens": 3, "stop": f"secret of {key}", "cache_salt": key},
                Authorization=f"Bearer {key}", **{"X-Request-Id": f"name-of-{key}"})
            assert answer.status_code == 200
        for key, other, tokens in (("one", "two", {41, 42, 43, 0}), ("two", "one", {51, 52, 53, 0})):
            watching = written(server, key=key)
            text = event_log.encode_lines(watching.entries).decode()
            assert f"secret of {key}" in text and f"name-of-{key}" in text
            assert f"secret of {other}" not in text and f"name-of-{other}" not in text
            assert not any(request.spec.salt for request in watching.of(event_log.RequestEntry))
            told = [row for step in watching.of(StepRecord) for row in step.tokens]
            assert {token for row in told for token in row} == tokens and sum(map(len, told)) == 6


TIERS = """
[[tier]]
name = "high"
api_keys = ["one"]
[[tier]]
name = "low"
api_keys = ["two"]
"""


@pytest.mark.parametrize(("settings", "tenants"), [
    (("api_keys=one",), ("one",)), (("api_keys=one,two",), ("one", "two")), (("tiers={tiers}",), ("one", "two"))])
def test_a_tenant_sees_its_own_requests_and_the_admin_those_of_all(
        folder: Path, tmp_path: Path, settings: tuple[str, ...], tenants: tuple[str, ...]) -> None:
    (tmp_path / "tiers").write_text(TIERS)
    given = [setting.format(tiers=tmp_path / "tiers") for setting in settings]
    with running(folder, tmp_path / "engine", *given, "admin_api_key=admin", *SLOW) as server, \
            contextlib.ExitStack() as streams:
        keys = (*tenants, "admin")
        for key in keys:
            response = streams.enter_context(server.client.stream(
                "POST", server.url + COMPLETIONS,
                json=ENDLESS | {"stop": f"secret of {key}", "stream": True},
                headers={"Authorization": f"Bearer {key}", "X-Request-Id": f"name-of-{key}"}))
            assert response.status_code == 200
        eventually(lambda: all(server.get(f"/explain/name-of-{key}", Authorization="Bearer admin").status_code == 200
                               for key in keys))
        for key in keys:
            text = event_log.encode_lines(written(server, key=key).entries).decode()
            for other in keys:
                may = other == key or key == "admin"
                assert (f"secret of {other}" in text) == (f"name-of-{other}" in text) == may, (key, other)
                for path in ("explain", "requests"):
                    answer = server.get(f"/{path}/name-of-{other}", Authorization=f"Bearer {key}")
                    assert answer.status_code == (200 if may else 404), (path, key, other)
        for key in tenants:
            others = [f"name-of-{other}" for other in keys if other != key]
            answer = server.post("/abort_requests", {"request_ids": others}, Authorization=f"Bearer {key}")
            assert answer.json() == {"aborted": [], "not_found": others}
        names = [f"name-of-{key}" for key in keys]
        answer = server.post("/abort_requests", {"request_ids": names}, Authorization="Bearer admin")
        assert answer.json() == {"aborted": names, "not_found": []}


@pytest.mark.parametrize("path", [re.sub(r"{\w+:path}", "toy", path) for method, path, _ in ROUTES if method == "GET"])
def test_a_head_is_answered_as_a_get_would_be_and_ends(server: Server, path: str) -> None:
    expected = server.get(path + ("?follow=0" if path == "/events" else ""))
    for _ in range(MAX_OF_ONE + 1):
        answer = server.client.head(server.url + path)
        assert answer.status_code == expected.status_code and answer.content == b""
        assert answer.headers["content-type"] == expected.headers["content-type"]
        assert answer.headers["x-request-id"]
    eventually(lambda: server.get("/load").json()["server_load"] == 0)


def test_a_curtain_hides_what_is_said_of_others_ends() -> None:
    tenant_filter = TenantFilter("mine")
    seen = [tenant_filter.before(entry) for entry in (
        event_log.RequestEntry(1, 1, Add(0, RequestSpec((), SamplingSpec(), salt="mine:x"), name="a")),
        event_log.RequestEntry(1, 1, Add(1, RequestSpec((), SamplingSpec()), name="b")),
        event_log.RequestEntry(1, 1, Add(
            2, RequestSpec((), SamplingSpec(max_tokens=4, stop=("x",)), 7, salt="mineral"), name="c")),
        record_of(0, 1, 2, numbers=(0, 1, 2), tokens=((5,), (6, 7), ()), sampled=((5,), (6, 7), (8,)),
                       ended=(RequestEnd(0, "error", 1, "own"), RequestEnd(1, "error", 1, "another's"))))]
    assert [entry.id for entry in seen[:3]] == ["a", "", ""] and seen[2].spec.params == SamplingSpec(max_tokens=4)
    assert (seen[3].tokens, seen[3].result.tokens) == (((5,), (0, 0), ()), ((5,), (0, 0), (0,)))
    assert [end.message for end in seen[3].ended] == ["own", ""]


def test_a_curtain_hides_drafts_forced_tokens_and_what_is_said_of_others_grammars_and_blocks() -> None:
    """Of every column of a step with tokens or words."""
    tenant_filter = TenantFilter("mine")
    tenant_filter.before(event_log.RequestEntry(1, 1, Add(0, RequestSpec((), SamplingSpec(), salt="mine:x"), name="a")))
    step = record_of(0, 1, 2, numbers=(0, 1), tokens=((5, 6), (7, 8)))
    rows = ((5,), (7,))
    blocks = (ReceivedBlocks(0, 1, True, "words"), ReceivedBlocks(1, 1, True, "words"))
    seen = tenant_filter.before(step._replace(
        plans=(step.plan._replace(drafts=rows),), result=step.result._replace(forced=rows, drafts=rows),
        inputs=step.inputs._replace(compiled=(CompiledGrammar(0, "words"), CompiledGrammar(1, "words")),
                                    arrivals=blocks, acknowledged=("words",), disk=DiskNews(arrivals=blocks))))
    assert isinstance(seen, StepRecord)
    assert seen.plan.drafts == seen.result.drafts == seen.result.forced == ((5,), (0,))
    for told in (seen.inputs.compiled, seen.inputs.arrivals, seen.inputs.disk.arrivals):
        assert [one[-1] for one in told] == ["words", ""]
    assert seen.inputs.acknowledged == ("",)


def test_who_is_too_slow_is_told_how_much_is_missing_and_begins_anew() -> None:
    entries = Recorded(0, Batching()).play(40)
    ring = Ring(10_000)
    view = _View(ring, TenantFilter(""))
    list(view.opening())
    seen: list[event_log.Entry] = []
    for position, entry in enumerate(entries):
        ring.append(entry, event_log.line_of(entry))
        if position % 50 == 49:
            seen += log_file.read(b"".join(view.more()).splitlines(keepends=True))
    gaps = [index for index, entry in enumerate(seen) if isinstance(entry, event_log.Gap)]
    assert gaps and all(isinstance(seen[index + 1], event_log.Run) for index in gaps)


def test_who_missed_its_own_request_sees_its_tokens_all_the_same() -> None:
    params = SamplingSpec()
    step = record_of(
        0, 1, 2, numbers=(0, 1), slots=(0, 1), starts=(0, 0), counts=(1, 1), tokens=((5,), (6,)))
    entries = [event_log.RequestEntry(1, 1, Add(0, RequestSpec((), params, salt="mine:x"), name="a")),
               event_log.RequestEntry(1, 1, Add(1, RequestSpec((), params, salt="other:x"), name="b")), step]
    ring = Ring(len(event_log.line_of(step)))
    view = _View(ring, TenantFilter("mine"))
    list(view.opening())
    for entry in entries:
        ring.append(entry, event_log.line_of(entry))
    *known, seen = log_file.read(b"".join(view.more()).splitlines(keepends=True))
    assert known[0] == event_log.Gap(2) and [entry.id for entry in known[1:]] == ["a", ""]
    assert seen.tokens == ((5,), (0,))


def test_many_unfinished_requests_are_encoded_in_parts() -> None:
    ring = Ring()
    for number in range(1000):
        entry = event_log.RequestEntry(1, 1, Add(number, RequestSpec((), SamplingSpec()), name=str(number)))
        ring.append(entry, event_log.line_of(entry))
    parts = [list(log_file.read(part.splitlines(keepends=True)))
             for part in _View(ring, TenantFilter("")).opening_now()]
    assert max(map(len, parts)) <= MOST and [entry.number for part in parts for entry in part] == list(range(1000))


def test_long_stop_strings_are_told_by_their_lengths_and_still_end_a_text(
        folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(counted(40, 60))
    with running(folder, tmp_path / "engine") as server:
        body = {"prompt": [40], "max_tokens": 60, "n": 8}
        for stop in ([text[20:23], "x" * 1000], [text[20:23], "x" * 100]):
            choices = server.post(COMPLETIONS, body | {"stop": stop}).json()["choices"]
            assert [choice["text"] for choice in choices] == [text[:20]] * 8
        requests = written(server).of(event_log.RequestEntry)
    assert all(not request.spec.params.stop and request.spec.stop_lengths == (3, 1000) for request in requests[:8])
    specs = [request.spec for request in requests[8:]]
    assert all(spec.params.stop == (text[20:23], "x" * 100) and not spec.stop_lengths for spec in specs)


def test_it_ends_with_the_server_whoever_still_runs(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", *SLOW, "shutdown_timeout=0.2") as server:
        watching = Watching(server)
        with long_request(server):
            server.process.send_signal(signal.SIGTERM)
            entries = watching.ended()
    assert [end.reason for entry in entries if isinstance(entry, StepRecord) for end in entry.ended] == ["abort"]
