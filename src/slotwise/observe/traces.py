"""OpenTelemetry: one trace per request, with a span for each of its stages, sent as OTLP over HTTP.

Attribute names are those of OpenTelemetry's conventions for generative AI, and vLLM's where these have none.  A request
with a `traceparent` (W3C Trace Context) becomes part of its caller's trace.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from queue import Full, Queue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from slotwise.observe.event_log import Entry, Run, Sent
from slotwise.observe.fold import Changes
from slotwise.observe.request_timeline import DECODE, WAITING, RequestTimeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SPAN = "llm_request"
OPERATIONS = {"chatcmpl": "chat", "msg": "chat", "resp": "chat", "embd": "embeddings", "rerank": "rerank",
              "score": "score", "classify": "classify"}  # by what ids of responses begin with; else text_completion
PATH = "/v1/traces"
NS = 1e-9
MAX_COMPLETE = 4096  # completed requests that wait for conversion to spans; more are dropped
MAX_QUEUE = 8192  # spans that wait to be sent; more are dropped
BATCH = 512
EVERY = 1000  # milliseconds between two batches
TIMEOUT = 5.0  # seconds that a collector gets for a batch
CLOSING = 5.0  # seconds that a collector gets for all batches left at the end
MAX_UNSENT = 4096  # ended requests whose last byte is awaited; beyond it the oldest are sent without
ANSWERED = ("stop", "length")  # ends after which a response is sent
MAX_CALLERS = 4096  # callers' contexts kept for unfinished requests

logger = logging.getLogger(__name__)


class TracesError(RuntimeError):
    """Traces cannot be sent; the message is one line for a person."""


class Completion:
    """Finds the requests whose history is complete: they have ended, and their responses are sent, if there are any."""

    def __init__(self) -> None:
        self._unsent: dict[int, RequestTimeline] = {}  # ended, by number

    def feed(self, entry: Entry, changes: Changes) -> Iterator[RequestTimeline]:
        for timeline, _ in changes.ended:
            if timeline.last_byte_ns or timeline.end_reason not in ANSWERED:
                yield timeline
            else:
                self._unsent[timeline.request.number] = timeline
        if isinstance(entry, Sent) and (ended := self._unsent.pop(entry.number, None)) is not None:
            ended.send(entry.last_ns)  # the recorder may have dropped it
            yield ended
        while len(self._unsent) > MAX_UNSENT:
            yield self._unsent.pop(next(iter(self._unsent)))


class Traces:
    """A reader of the recorder; sends completed requests on a thread of its own and never waits.

    Args:
        endpoint: the collector's URL for OTLP over HTTP; the path defaults to `/v1/traces`.

    Raises:
        TracesError: OpenTelemetry is not installed, or `endpoint` is no URL.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        self._provider = _provider(_complete(endpoint))
        self._tracer = self._provider.get_tracer("slotwise")
        self._model_name = model_name
        self._completion = Completion()
        self._callers: OrderedDict[str, str] = OrderedDict()  # `traceparent` by the engine's id of a request
        self._offset_ns = 0  # from the monotonic clock to the calendar
        self._complete: Queue[tuple[RequestTimeline, str, int] | None] = Queue(MAX_COMPLETE)
        self._teller = threading.Thread(target=self._tell_all, name="traces", daemon=True)
        self._teller.start()

    def caller(self, request_id: str, traceparent: str) -> None:
        """Stores the `traceparent` of a request (the engine's id) that is about to be submitted."""
        self._callers[request_id] = traceparent
        if len(self._callers) > MAX_CALLERS:
            self._callers.popitem(last=False)

    def write(self, entry: Entry, changes: Changes) -> None:
        """Processes an entry of the event log, in order.  Never waits."""
        if isinstance(entry, Run):
            self._offset_ns = round(entry.started_unix / NS) - entry.started_ns
        for timeline in self._completion.feed(entry, changes):
            with contextlib.suppress(Full):
                self._complete.put_nowait((timeline, self._callers.pop(timeline.request.id, ""), self._offset_ns))

    def close(self) -> None:
        """Sends the remaining spans, and drops those that the collector has not taken after `CLOSING` seconds."""
        closing = threading.Thread(target=self._finish, name="traces-closing", daemon=True)
        closing.start()
        closing.join(CLOSING)
        if closing.is_alive():
            logger.warning("the collector of traces has not taken all spans in %g s: the rest are dropped", CLOSING)

    def _finish(self) -> None:
        self._complete.put(None)
        self._teller.join()
        self._provider.shutdown()

    def _tell_all(self) -> None:
        """Converts completed requests to spans: each takes most of a millisecond, hence a thread of its own."""
        while (complete := self._complete.get()) is not None:
            self._tell(*complete)

    def _tell(self, timeline: RequestTimeline, caller: str, offset: int) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract({"traceparent": caller}) if caller else None
        root = self._tracer.start_span(
            SPAN, above, trace.SpanKind.SERVER, _attributes(timeline, self._model_name),
            start_time=timeline.start_ns + offset)
        inside = trace.set_span_in_context(root)
        for stage in timeline.closed_stages:
            waited = {f"slotwise.waited.{reason}_s": ns * NS for reason, ns in stage.waited.items()}
            child = self._tracer.start_span(stage.name, inside, attributes=waited, start_time=stage.start_ns + offset)
            child.end(stage.end_ns + offset)
        if timeline.end_reason in ("error", "timeout", "shed", "rejected"):
            root.set_status(trace.StatusCode.ERROR, timeline.message or timeline.end_reason)
        root.end(timeline.closed_ns + offset)


def _attributes(timeline: RequestTimeline, model_name: str) -> dict[str, Any]:
    request, params, stages = timeline.request, timeline.request.spec.params, timeline.closed_stages
    known: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS.get(request.id.partition("-")[0], "text_completion"),
        "gen_ai.response.model": timeline.request.spec.adapter_name or model_name,
        "gen_ai.response.id": timeline.response_id,
        "gen_ai.response.finish_reasons": (timeline.end_reason,),
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.input_tokens": request.num_prompt,
        "gen_ai.usage.output_tokens": timeline.num_output,
        "gen_ai.usage.cached_tokens": timeline.num_cached,
        "gen_ai.latency.e2e": (timeline.closed_ns - timeline.start_ns) * NS,
        "gen_ai.latency.time_in_queue": sum(stage.end_ns - stage.start_ns for stage in stages
                                            if stage.name in WAITING) * NS,
        "slotwise.request.number": request.number,
        "slotwise.preemptions": timeline.num_preemptions,
    }
    if params.max_tokens is not None:
        known["gen_ai.request.max_tokens"] = params.max_tokens
    if decoding := [stage for stage in stages if stage.name == DECODE]:
        known["gen_ai.latency.time_to_first_token"] = (decoding[0].start_ns - timeline.start_ns) * NS
    return known


def _complete(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TracesError(f"an OTLP endpoint is a URL as http://127.0.0.1:4318{PATH}, and {endpoint!r} is not")
    return urlunsplit(parts._replace(path=PATH)) if parts.path in ("", "/") else endpoint


def _provider(endpoint: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesError(
            f"traces need OpenTelemetry ({error}): pip install '.[otel]' in a checkout of Slotwise") from error
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "slotwise")}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(
        OTLPSpanExporter(endpoint, timeout=TIMEOUT), max_queue_size=MAX_QUEUE, max_export_batch_size=BATCH,
        schedule_delay_millis=EVERY))
    return provider
