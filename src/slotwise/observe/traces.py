"""OpenTelemetry: one trace per request, with a span for each of its stages, sent as OTLP over HTTP.

Attribute names are those of OpenTelemetry's conventions for generative AI, and vLLM's where these have none.  A request
with a `traceparent` (W3C Trace Context) becomes part of its caller's trace.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from queue import Full, Queue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from slotwise.observe.event_log import Entry, Run
from slotwise.observe.spans import RequestSpans, Spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SPAN = "llm_request"
PATH = "/v1/traces"
NS = 1e-9
MAX_COMPLETE = 4096  # completed requests that wait for conversion to spans; more are dropped
MAX_QUEUE = 8192  # spans that wait to be sent; more are dropped
BATCH = 512
EVERY = 1000  # milliseconds between two batches
TIMEOUT = 5.0  # seconds that a collector gets for a batch
MAX_CALLERS = 4096  # callers' contexts kept for unfinished requests


class TracesError(RuntimeError):
    """Traces cannot be sent; the message is one line for a person."""


class Traces:
    """A sink of the recorder; sends completed requests on a thread of its own and never waits.

    Args:
        endpoint: the collector's URL for OTLP over HTTP; the path defaults to `/v1/traces`.

    Raises:
        TracesError: OpenTelemetry is not installed, or `endpoint` is no URL.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        self._provider = _provider(_complete(endpoint))
        self._tracer = self._provider.get_tracer("slotwise")
        self._model_name = model_name
        self._spans = Spans()
        self._callers: OrderedDict[str, str] = OrderedDict()  # `traceparent` by the engine's id of a request
        self._offset_ns = 0  # from the monotonic clock to the calendar
        self._complete: Queue[tuple[RequestSpans, str, int] | None] = Queue(MAX_COMPLETE)
        self._teller = threading.Thread(target=self._tell_all, name="traces", daemon=True)
        self._teller.start()

    def caller(self, request_id: str, traceparent: str) -> None:
        """Stores the `traceparent` of a request (the engine's id) that is about to be submitted."""
        self._callers[request_id] = traceparent
        if len(self._callers) > MAX_CALLERS:
            self._callers.popitem(last=False)

    def write(self, entry: Entry) -> None:
        """Processes an entry of the event log, in order.  Never waits."""
        if isinstance(entry, Run):
            self._offset_ns = round(entry.started_unix / NS) - entry.started_ns
        for request_spans in self._spans.feed(entry):
            with contextlib.suppress(Full):
                self._complete.put_nowait((request_spans, self._callers.pop(request_spans.request.id, ""),
                                           self._offset_ns))

    def close(self) -> None:
        """Sends the remaining spans; takes a few seconds when no collector answers."""
        self._complete.put(None)
        self._teller.join()
        self._provider.shutdown()

    def _tell_all(self) -> None:
        """Converts completed requests to spans: each takes most of a millisecond, hence a thread of its own."""
        while (complete := self._complete.get()) is not None:
            self._tell(*complete)

    def _tell(self, request_spans: RequestSpans, caller: str, offset: int) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract({"traceparent": caller}) if caller else None
        root = self._tracer.start_span(
            SPAN, above, trace.SpanKind.SERVER, _attributes(request_spans, self._model_name),
            start_time=request_spans.start_ns + offset)
        inside = trace.set_span_in_context(root)
        for span in request_spans.spans:
            waited = {f"slotwise.waited.{reason}_s": seconds for reason, seconds in span.waited.items()}
            child = self._tracer.start_span(span.name, inside, attributes=waited, start_time=span.start_ns + offset)
            child.end(span.end_ns + offset)
        if request_spans.end_reason in ("error", "timeout", "shed", "rejected"):
            root.set_status(trace.StatusCode.ERROR, request_spans.message or request_spans.end_reason)
        root.end(request_spans.end_ns + offset)


def _attributes(request_spans: RequestSpans, model_name: str) -> dict[str, Any]:
    request, params = request_spans.request, request_spans.request.params
    known: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if request.id.startswith("chatcmpl-") else "text_completion",
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": request.id.rpartition("-")[0] or request.id,
        "gen_ai.response.finish_reasons": (request_spans.end_reason,),
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.input_tokens": request.num_prompt,
        "gen_ai.usage.output_tokens": request_spans.num_output,
        "gen_ai.usage.cached_tokens": request_spans.num_cached,
        "gen_ai.latency.e2e": (request_spans.end_ns - request_spans.start_ns) * NS,
        "gen_ai.latency.time_in_queue": sum(span.end_ns - span.start_ns for span in request_spans.spans
                                            if span.waited) * NS,
        "slotwise.request.number": request.number,
        "slotwise.preemptions": request_spans.num_preemptions,
    }
    if params.max_tokens is not None:
        known["gen_ai.request.max_tokens"] = params.max_tokens
    if request_spans.first_token_ns:
        known["gen_ai.latency.time_to_first_token"] = (request_spans.first_token_ns - request_spans.start_ns) * NS
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
            f"traces need OpenTelemetry ({error}): pip install 'slotwise[otel]'") from error
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "slotwise")}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(
        OTLPSpanExporter(endpoint, timeout=TIMEOUT), max_queue_size=MAX_QUEUE, max_export_batch_size=BATCH,
        schedule_delay_millis=EVERY))
    return provider
