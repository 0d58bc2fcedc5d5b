"""Prometheus metrics, folded from the entries of the event log and what they change in the timelines of requests.

The fold's state is plain numbers; Prometheus' own objects are built when the metrics are read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slotwise.core.reasons import WAITING_FOR_KV
from slotwise.core.record import StepRecord
from slotwise.engine.messages import Observer
from slotwise.engine.scheduling import Scheduling
from slotwise.observe import step_view
from slotwise.observe.event_log import Entry, Refusal, RequestEntry
from slotwise.observe.fold import Changes, Timelines
from slotwise.observe.lines import tell
from slotwise.observe.request_timeline import RequestTimeline
from slotwise.observe.series import (
    COMPLETE,
    COMPUTED,
    COUNTERS,
    HISTOGRAMS,
    IN_HOST,
    INCOMPLETE,
    LABELLED,
    LORA_REQUESTS,
    ON_DEVICE,
    TO_DEVICE,
    TO_HOST,
    WAITS,
    Histogram,
    Shown,
    as_vllm,
    step_times,
)

if TYPE_CHECKING:
    from slotwise.core.step_time import Roofline
    from slotwise.engine.messages import EngineInfo

NS = 1e-9
LATELY = 256  # steps over which the roofline fraction is computed


# Finds the choices (`n`) of each prompt, which the engine runs as requests of their own.
#
# The requests of a response arrive in the order of its prompts, those of other responses in between.


# How a model's experts share the tokens: by layer, since the engine started and lately.
#
# A layer in which all experts have equally many tokens has an imbalance of 1; one whose tokens all go to the same
# `top_k` experts has `num_experts / top_k`.  A step that reads few weights for its tokens is short, so imbalance costs
# little while steps are bound by memory; where experts are spread over devices, the busiest one sets the time.

LATELY = 60  # counts that `imbalance` and `idle` look at: one a second while there is work, and one at its end

Counts = Sequence[Sequence[int]]
"""Tokens of each expert of each layer."""


# The periodic log line under load: rates, running and waiting requests, the cache, and why requests wait.

EVERY = 10.0  # seconds

logger = logging.getLogger(__name__)


class LoadLine:
    """Rates since the last line, from the counters of `/metrics`."""

    COUNTED = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
               "prefix_cache_hits_total", "num_preemptions_total")

    def __init__(self, metrics: Metrics, now: float) -> None:
        self._metrics = metrics
        self._then, self._counted, self._waits, self._ended = now, *self._read()

    def _read(self) -> tuple[dict[str, int], dict[str, float], float]:
        metrics = self._metrics
        return ({name: metrics.counters[name] for name in self.COUNTED}, metrics.wait_seconds,
                sum(metrics.labelled["request_success_total"].values()))

    def fields(self, now: float) -> dict[str, Any]:
        """Returns the fields of a line; rates are per second since the last call, `now` in seconds; empty when idle."""
        counted, waits, ended = self._read()
        seconds = max(now - self._then, 1e-9)
        since = {name: counted[name] - self._counted[name] for name in self.COUNTED}
        waited = {reason: waited - self._waits.get(reason, 0.0) for reason, waited in waits.items()}
        finished = ended - self._ended
        self._then, self._counted, self._waits, self._ended = now, counted, waits, ended
        now_is = self._metrics.timelines
        if not (any(since.values()) or finished or now_is.num_running or now_is.num_waiting):
            return {}
        queries = since["prefix_cache_queries_total"]
        return {
            "running": now_is.num_running, "waiting": now_is.num_waiting,
            "prompt_tokens_per_s": round(since["prompt_tokens_total"] / seconds, 1),
            "generation_tokens_per_s": round(since["generation_tokens_total"] / seconds, 1),
            "requests_per_s": round(finished / seconds, 2),
            "kv_cache_usage": round(now_is.usage, 3),
            "prefix_cache_hit_rate": round(since["prefix_cache_hits_total"] / queries, 3) if queries else None,
            "preemptions": since["num_preemptions_total"],
            "waited_s": {reason: round(waited, 2) for reason, waited in waited.items() if waited >= 0.01}}


def sentence(fields: Mapping[str, Any]) -> str:
    """Returns the fields as a text line."""
    parts = [
        f"{fields['running']} running, {fields['waiting']} waiting",
        f"{fields['generation_tokens_per_s']:,.1f} tokens/s out, {fields['prompt_tokens_per_s']:,.1f} in, "
        f"{fields['requests_per_s']:.2f} requests/s",
        f"cache {fields['kv_cache_usage']:.0%} in use"]
    if fields["prefix_cache_hit_rate"] is not None:
        parts.append(f"{fields['prefix_cache_hit_rate']:.0%} of tokens found in it")
    if fields["preemptions"]:
        parts.append(f"{fields['preemptions']} preempted")
    if waited := fields["waited_s"]:
        whole = sum(waited.values())
        shares = sorted(waited.items(), key=lambda share: -share[1])
        parts.append("waited for " + ", ".join(f"{reason} {seconds / whole:.0%}" for reason, seconds in shares[:3]))
    return "; ".join(parts)


async def report(metrics: Metrics, every: float = EVERY) -> None:
    """Logs a line every `every` seconds unless idle; runs until cancelled."""
    line = LoadLine(metrics, time.monotonic())
    while True:
        await asyncio.sleep(every)
        if fields := line.fields(time.monotonic()):
            tell(logger, sentence(fields), fields)


class ExpertLoad:
    """A fold over the counts of step records.

    Args:
        layers: numbers of the layers with experts.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self.layers = tuple(layers)
        self._all: list[list[int]] = [[] for _ in layers]
        self._lately: list[list[int]] = [[] for _ in layers]
        self._latest: deque[Counts] = deque()

    def add(self, counts: Counts) -> None:
        """Adds what one record has, a row for each of `layers`."""
        self._all, self._lately = _sum(self._all, counts), _sum(self._lately, counts)
        self._latest.append(counts)
        if len(self._latest) > LATELY:
            self._lately = [list(map(sub, *rows)) for rows in zip(self._lately, self._latest.popleft(), strict=True)]

    @property
    def tokens(self) -> dict[str, float]:
        """Tokens times the experts that each chose, by layer."""
        return {str(layer): sum(row) for layer, row in zip(self.layers, self._all, strict=True)}

    @property
    def imbalance(self) -> dict[str, float]:
        """Tokens of the busiest expert per mean of all lately, by layer; 0 where there are none."""
        return {str(layer): _imbalance(row) for layer, row in zip(self.layers, self._lately, strict=True)}

    @property
    def idle(self) -> dict[str, int]:
        """Experts that no token chose lately, by layer."""
        return {str(layer): row.count(0) for layer, row in zip(self.layers, self._lately, strict=True)}

    def table(self) -> list[dict[str, Any]]:
        """Everything, as JSON has it: a layer's experts in order."""
        return [
            {"layer": layer, "tokens": whole, "tokens_lately": lately, "imbalance_lately": _imbalance(lately)}
            for layer, whole, lately in zip(self.layers, self._all, self._lately, strict=True)]


def _sum(totals: Counts, counts: Counts) -> list[list[int]]:
    return [list(map(add, total, row)) if total else list(row) for total, row in zip(totals, counts, strict=True)]


def _imbalance(row: Sequence[int]) -> float:
    return max(row) * len(row) / total if (total := sum(row)) else 0.0


@dataclass(slots=True)
class _Prompt:
    response: tuple[int, str]
    num_arrived: int = 0
    num_ended: int = 0
    longest: int = 0  # tokens


class PromptChoices:
    """The prompts with several choices that have not all ended.  Memory is bounded by the unfinished requests."""

    def __init__(self) -> None:
        self._arriving: dict[tuple[int, str], _Prompt] = {}  # by response: the prompt whose next choice is to come
        self._prompts: dict[int, _Prompt] = {}  # by the number of a request

    def arrived(self, request: RequestEntry) -> None:
        """Notes a request, in order of arrival."""
        if request.spec.params.n == 1:
            return
        response = request.timing.received_ns, request.id.rpartition("-")[0]
        prompt = self._arriving.setdefault(response, _Prompt(response))
        prompt.num_arrived += 1
        if prompt.num_arrived == request.spec.params.n:
            del self._arriving[response]
        self._prompts[request.number] = prompt

    def ended(self, request: RequestEntry, num_output: int) -> int | None:
        """Notes the end of a request.  Returns the most tokens of a choice of its prompt if it was the last to end."""
        if request.spec.params.n == 1:
            return num_output
        if (prompt := self._prompts.pop(request.number, None)) is None:
            return None
        prompt.num_ended += 1
        prompt.longest = max(prompt.longest, num_output)
        if prompt.num_ended == request.spec.params.n:
            return prompt.longest
        if prompt.num_ended == prompt.num_arrived:  # the others were refused, and never come
            self._arriving.pop(prompt.response, None)
        return None


class Metrics(Collector, Observer):
    """Reads the entries of a recorder and provides the samples of `/metrics`; observes which engine serves.

    Args:
        model_name: the label on every sample.
        info: of the ready engine.
        timelines: the recorder's.
        healthy: whether a responsive engine is attached.
        has_vllm_names: metrics that vLLM has are there under its names, too.
    """

    def __init__(self, model_name: str, info: EngineInfo, timelines: Timelines,
                 healthy: Callable[[], bool] = lambda: True, *, has_vllm_names: bool = False) -> None:
        self._shown = Shown(model_name)
        self._has_vllm_names = has_vllm_names
        self.extra_gauges: dict[str, Callable[[], float]] = {}  # gauges of other components
        self.timelines = timelines
        self._healthy = healthy
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.labelled: dict[str, dict[str, float]] = {
            name: dict.fromkeys(labelled.values, 0) for name, labelled in LABELLED.items()}
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._step_times = step_times()
        self._lately: deque[tuple[float, float]] = deque(maxlen=LATELY)  # roofline and measured seconds of steps
        self.started(info)

    @property
    def wait_seconds(self) -> dict[str, float]:
        """Seconds that requests waited for a slot, by reason, summed over requests."""
        waited = {reason: ns * NS for reason, ns in self.timelines.waiting.waited_ns().items()}
        return dict.fromkeys(WAITS, 0.0) | waited

    @property
    def roofline_fraction(self) -> float:
        """Roofline seconds per measured second of the latest steps; 0 before the first."""
        taken = sum(seconds for _, seconds in self._lately)
        return sum(bound for bound, _ in self._lately) / taken if taken > 0 else 0.0

    # -- observing -----------------------------------------------------------------------------------------------

    def started(self, info: EngineInfo) -> None:
        """Another engine is ready."""
        self._info = info
        self.experts = ExpertLoad(info.expert_layers)
        self._slots = info.scheduling.max_num_seqs
        self._num_pinned_blocks = 0
        self._last_end = 0  # of a step with rows
        self._choices = PromptChoices()
        self.counters["engine_starts_total"] += 1

    def stepped(self, record: StepRecord) -> None:
        """Counts what records have and entries have not."""
        if record.counters.expert_tokens:
            self.experts.add(record.counters.expert_tokens)
        self._num_pinned_blocks = record.counters.num_pinned_blocks

    def write(self, entry: Entry, changes: Changes) -> None:
        """Counts an entry that made these changes.  Never waits."""
        if isinstance(entry, Refusal):
            self._count("admission_rejections_total", entry.reason)
        elif isinstance(entry, RequestEntry):
            self._choices.arrived(entry)
        elif isinstance(entry, StepRecord):
            self._requests(entry, changes)
            if entry.plans:
                self._tiers(entry, changes)
            if entry.plan.counts:
                self._step(entry)
            if isinstance(entry.inputs.configured, Scheduling):
                self._slots = entry.inputs.configured.max_num_seqs

    def _requests(self, step: StepRecord, changes: Changes) -> None:
        """Counts what happened to requests."""
        self.counters["num_preemptions_total"] += len(step.preempted)
        self.counters["generation_tokens_total"] += changes.num_tokens
        for timeline, _ in changes.admitted:
            if timeline.num_preemptions:  # it is recomputed
                self.counters["recomputed_tokens_total"] += max(0, timeline.lost - timeline.cached)
            else:
                self.counters["prompt_tokens_cached_total"] += timeline.cached
        for timeline in changes.first_tokens:
            self._first_token(timeline)
        for ns, rows in changes.gaps.items():
            self._histograms["inter_token_latency_seconds"].observe(ns * NS, rows)
        for arrival in step.inputs.arrivals:
            if arrival.is_last:
                self._count("kv_transfers_total", INCOMPLETE if arrival.failure else COMPLETE)
        self.counters["kv_prompts_sent_total"] += len(step.inputs.acknowledged)
        for timeline, end in changes.ended:
            self._ended(timeline, end.reason, step.ended_ns)

    def _first_token(self, timeline: RequestTimeline) -> None:
        first = timeline.first_token_ns
        self._observe("time_to_first_token_seconds", first - timeline.arrived_ns)
        self._observe("request_queue_time_seconds", timeline.admitted_ns - timeline.request.ns)
        self._observe("request_prefill_time_seconds", first - timeline.admitted_ns)
        self.counters["prompt_tokens_total"] += timeline.request.num_prompt

    def _ended(self, timeline: RequestTimeline, reason: str, now: int) -> None:
        request, num_output = timeline.request, timeline.num_published
        longest = self._choices.ended(request, num_output)
        if reason == "rejected":
            self._count("admission_rejections_total", reason)
            return
        self._count("request_success_total", reason)
        self._observe("e2e_request_latency_seconds", now - timeline.arrived_ns)
        self._number("request_prompt_tokens", request.num_prompt)
        self._number("request_generation_tokens", num_output)
        self._number("request_params_max_tokens", request.spec.params.max_tokens)
        if longest is not None:
            self._number("request_max_num_generation_tokens", longest)
            self._number("request_params_n", request.spec.params.n)
        if timeline.first_token_ns:
            decoding = timeline.last_token_ns - timeline.first_token_ns
            self._observe("request_inference_time_seconds", timeline.last_token_ns - timeline.admitted_ns)
            self._observe("request_decode_time_seconds", decoding)
            self._number("request_prefill_kv_computed_tokens", request.num_prompt - timeline.num_cached)
            if num_output > 1:
                self._observe("request_time_per_output_token_seconds", decoding / (num_output - 1))

    def _tiers(self, step: StepRecord, changes: Changes) -> None:
        """Counts the prefix hits of each tier and the copies between them."""
        limits, counters, admitted = self._info.limits, self.counters, step.admitted
        num_saves, num_loads = sum([len(plan.saves) for plan in step.plans]), sum([len(plan.loads)
                                                                                   for plan in step.plans])
        if not (num_saves or admitted):
            return
        loaded = num_loads * limits.block_size
        on_device = sum([cached for _, cached in admitted]) - loaded
        queries = sum([num_known for _, num_known in changes.admitted])
        counters["prefix_cache_queries_total"] += queries
        counters["prefix_cache_hits_total"] += on_device
        if limits.num_host_blocks:
            counters["external_prefix_cache_queries_total"] += queries - on_device
            counters["external_prefix_cache_hits_total"] += loaded
        self._sources([timeline for timeline, _ in changes.admitted if not timeline.num_preemptions], loaded)
        block_bytes = self._info.memory.host // max(1, limits.num_host_blocks)
        self._count("kv_offload_total_bytes_total", TO_HOST, num_saves * block_bytes)
        self._count("kv_offload_total_bytes_total", TO_DEVICE, num_loads * block_bytes)

    def _sources(self, new: Sequence[RequestTimeline], loaded: int) -> None:
        """Counts where the prompt tokens of new requests come from.

        What a step has loaded is not told by request: it is taken to be theirs, not that of requests that return.
        """
        found = sum([timeline.cached for timeline in new])
        from_host = min(found, loaded)
        self._count("prompt_tokens_by_source_total", COMPUTED, sum([one.request.num_prompt for one in new]) - found)
        self._count("prompt_tokens_by_source_total", ON_DEVICE, found - from_host)
        self._count("prompt_tokens_by_source_total", IN_HOST, from_host)

    def _step(self, step: StepRecord) -> None:
        """Observes a step's time and waste.  The executor starts a step when the previous one has ended."""
        counters, rows = self.counters, len(step.plan.counts)
        kind, seconds = step_view.kind(step), (step.ended_ns - max(step.started_ns, self._last_end)) * NS
        self._last_end = step.ended_ns
        self._step_times[kind].observe(seconds)
        if self._info.roofline is not None:
            self._hold_against(self._info.roofline, step, kind, seconds)
        self._histograms["iteration_tokens_total"].observe(sum(step.plan.counts))
        if step.plan.drafts:
            self._drafts(step)
        for rank, started, ended in step.result.ranks:
            self._count("rank_busy_seconds_total", str(rank), (ended - started) * NS)
        counters["padded_tokens_total"] += sum(step.plan.padding)
        counters["held_tokens_total"] += step_view.held_tokens(step)
        empty = max(0, self._slots - rows)
        counters["slot_steps_total"] += empty + rows
        counters["empty_slot_steps_total"] += empty
        counters["empty_slot_steps_waiting_total"] += empty * (step.plan.stop is not None)
        for timeline in self.timelines.stalled:
            self._count("stalled_row_steps_total", timeline.reason)

    def _drafts(self, step: StepRecord) -> None:
        for num_drafts, num_right in step.verified:
            self.counters["spec_decode_num_drafts_total"] += 1
            self.counters["spec_decode_num_draft_tokens_total"] += num_drafts
            self.counters["spec_decode_num_accepted_tokens_total"] += num_right
            for position in range(num_right):
                self._count("spec_decode_num_accepted_tokens_per_pos_total", str(position))

    def _hold_against(self, roofline: Roofline, step: StepRecord, kind: str, seconds: float) -> None:
        """Counts a step's bound, at most its seconds: rates that were measured beside other programs are too low."""
        sampled = len(step.tokens) - step.tokens.count(())
        bound = min(seconds, roofline.seconds(roofline.cost(step.plan.starts, step.plan.counts, sampled)))
        self.labelled["roofline_seconds_total"][kind] += bound
        self._lately.append((bound, seconds))

    def _observe(self, name: str, nanoseconds: float) -> None:
        self._histograms[name].observe(max(nanoseconds, 0) * NS)

    def _number(self, name: str, number: int | None) -> None:
        if number is not None:
            self._histograms[name].observe(number)

    def _count(self, name: str, label: str, times: float = 1) -> None:
        counts = self.labelled[name]
        counts[label] = counts.get(label, 0) + times

    # -- exposition ----------------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        """Returns the metrics in Prometheus' text format, with those that Prometheus' clients have of any process."""
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            yield family
            if self._has_vllm_names:
                yield from as_vllm(family)

    def _adapters(self) -> Metric:
        """The adapters of unfinished requests, as labels; the value is the time, by which vLLM's readers sort them."""
        names: dict[bool, set[str]] = {True: set(), False: set()}  # by whether their requests wait
        for timeline in self.timelines.by_number.values():
            if timeline.request.spec.adapter_name and not timeline.ended:
                names[timeline.is_waiting].add(timeline.request.spec.adapter_name)
        return self._shown.info("lora_requests_info", LORA_REQUESTS, {
            "max_lora": self._info.limits.max_loras, "running_lora_adapters": ",".join(sorted(names[False])),
            "waiting_lora_adapters": ",".join(sorted(names[True]))}, time.time())

    def _families(self) -> Iterator[Metric]:
        shown, info = self._shown, self._info
        limits = info.limits
        yield shown.info("engine_info", "The engine's settings, as labels of a 1.", {
            "device": info.device, "dtype": info.dtype, "max_model_len": limits.max_model_len})
        yield shown.info("cache_config_info", "The cache's settings, as labels of a 1.", {
            "block_size": limits.block_size, "cache_dtype": info.cache_dtype, "num_blocks": limits.num_blocks,
            "enable_prefix_caching": limits.enable_prefix_caching, "num_host_blocks": limits.num_host_blocks})
        if info.max_adapters:
            yield self._adapters()
        yield shown.gauge("engine_healthy", self._healthy())
        yield shown.gauge("num_requests_running", self.timelines.num_running)
        yield shown.gauge("num_requests_waiting", self.timelines.num_waiting)
        by_reason = self.timelines.waiting.by_reason()
        yield shown.waiting(by_reason)
        yield shown.gauge("num_requests_waiting_for_kv", by_reason.get(WAITING_FOR_KV, 0))
        yield shown.gauge("kv_pinned_blocks", self._num_pinned_blocks)
        yield shown.gauge("kv_cache_usage_perc", self.timelines.usage)
        yield shown.gauge("max_num_seqs", self._slots)
        yield shown.gauge("roofline_fraction", self.roofline_fraction)
        for name, value in self.extra_gauges.items():
            yield shown.gauge(name, value())
        for name, count in self.counters.items():
            yield shown.counter(name, count)
        elsewhere = {"request_wait_seconds_total": self.wait_seconds, "expert_tokens_total": self.experts.tokens}
        for name, counts in (self.labelled | elsewhere).items():
            yield shown.labelled(name, counts)
        yield shown.by_layer("expert_imbalance", self.experts.imbalance)
        yield shown.by_layer("idle_experts", self.experts.idle)
        for name, histogram in self._histograms.items():
            yield shown.histogram(name, histogram)
        yield shown.step_time(self._step_times.items())
