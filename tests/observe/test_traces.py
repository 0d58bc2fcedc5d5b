from __future__ import annotations

import importlib
import subprocess
import sys
import time

import pytest
from support.otlp import attributes, collecting, silent
from support.records import record_of
from support.toy_engine import MS, engine

from slotwise.core.params import SamplingSpec
from slotwise.core.record import Admission, RequestEnd
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add, Timing
from slotwise.observe.event_log import FORMAT, RequestEntry, Run, Sent
from slotwise.observe.fold import Timelines
from slotwise.observe.traces import Traces, TracesError

UNIX = 1_800_000_000.5
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def live_through(traces: Traces, *, reason: str = "stop", message: str = "") -> None:
    info = engine()
    params = SamplingSpec(temperature=0.5, max_tokens=9)
    timelines = Timelines()
    for entry in (
            Run(FORMAT, "1", "toy", "float32", "cpu", UNIX, 1000 * MS, info.limits, info.scheduling),
            RequestEntry(1005 * MS, 4, Add(0, RequestSpec((), params), Timing(received_ns=1001 * MS), "chatcmpl-x-0")),
            record_of(0, 1010 * MS, 1020 * MS, numbers=(0,), slots=(0,), starts=(3,), counts=(1,), tokens=((7,),),
                 admitted=(Admission(0, 3),)),
            record_of(1, 1020 * MS, 1030 * MS, numbers=(0,), slots=(0,), starts=(4,), counts=(1,), tokens=((7,),),
                 ended=(RequestEnd(0, reason, 2, message),)),
            Sent(0, 1021 * MS, 1031 * MS, 2)):
        traces.write(entry, timelines.apply(entry))


@pytest.mark.parametrize("caller", ["", CALLER, "what is this"])
def test_a_request_is_one_trace_with_a_span_for_each_stage(caller: str) -> None:
    with collecting() as collector:
        traces = Traces(collector.url, "toy")
        if caller:
            traces.caller("chatcmpl-x-0", caller)
        live_through(traces)
        traces.close()
    (root,) = collector.roots()
    children = collector.children(root)
    start = round(UNIX * 1e9)
    assert [(span.name, (span.start_time_unix_nano - start) / MS, (span.end_time_unix_nano - start) / MS)
            for span in (root, *children)] == [
        ("llm_request", 1, 31), ("tokenizing", 1, 5), ("queue", 5, 10), ("prefill", 10, 20), ("decode", 20, 30),
        ("sending", 30, 31)]
    told = attributes(root)
    assert (told["gen_ai.response.id"], told["gen_ai.operation.name"]) == ("chatcmpl-x", "chat")
    assert told["gen_ai.response.finish_reasons"] == ["stop"] and told["gen_ai.request.max_tokens"] == 9
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (4, 2)
    assert told["gen_ai.usage.cached_tokens"] == 3 and told["gen_ai.latency.time_to_first_token"] == 0.019
    assert attributes(children[1]) == {"slotwise.waited.step_under_way_s": 0.005}
    assert collector.services == {"slotwise"} and collector.paths == {"/v1/traces"}
    assert root.trace_id.hex() == CALLER.split("-")[1] if caller == CALLER else not root.parent_span_id
    assert all(span.trace_id == root.trace_id for span in children)


def test_an_error_says_what_it_was() -> None:
    with collecting() as collector:
        traces = Traces(collector.url + "/elsewhere", "toy")
        live_through(traces, reason="error", message="the engine fell")
        traces.close()
    (root,) = collector.roots()
    assert root.status.code == root.status.STATUS_CODE_ERROR and root.status.message == "the engine fell"
    assert collector.paths == {"/elsewhere"}


def test_nobody_waits_for_a_collector_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("slotwise.observe.traces")
    monkeypatch.setattr(module, "MAX_QUEUE", 600)
    monkeypatch.setattr(module, "TIMEOUT", 0.5)
    with collecting() as collector:
        pass
    traces = Traces(collector.url, "toy")
    began = time.monotonic()
    for _ in range(300):
        live_through(traces)
    assert time.monotonic() - began < 100, "1,800 spans for a queue of 600"
    traces.close()


def test_a_collector_that_never_answers_is_left_with_what_it_has_not_taken(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module = importlib.import_module("slotwise.observe.traces")
    monkeypatch.setattr(module, "BATCH", 8)
    monkeypatch.setattr(module, "TIMEOUT", 1.0)
    monkeypatch.setattr(module, "CLOSING", 0.1)
    with silent() as connections:
        traces = Traces(connections.url, "toy")
        for _ in range(10):
            live_through(traces)
        traces.close()
        assert len(connections.taken) < 60 / 8, "one for each batch, if all are tried"
    assert "has not taken all spans" in caplog.text


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "ftp://there", "http://"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(TracesError, match="an OTLP endpoint is a URL"):
        Traces(endpoint, "toy")


def test_without_opentelemetry_it_is_said_what_to_install() -> None:
    script = ("import sys; sys.modules['opentelemetry.sdk'] = None\n"
              "from slotwise.observe.traces import Traces\nTraces('http://127.0.0.1:1', 'toy')")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 1 and "pip install '.[otel]' in a checkout" in run.stderr.splitlines()[-1]
