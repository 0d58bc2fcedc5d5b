"""Prometheus metrics, folded from step records.

The fold processes every token, so its state is plain integers and lists; Prometheus' own objects are built when the
metrics are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from slotwise.engine.messages import Add
from slotwise.engine.observer import Observer
from slotwise.observe import waste
from slotwise.observe.series import COUNTERS, HISTOGRAMS, LABELLED, TO_DEVICE, TO_HOST, Histogram, Shown, step_times

if TYPE_CHECKING:
    from slotwise.core.roofline import Roofline
    from slotwise.engine.messages import Command, EngineInfo, StepRecord

NS = 1e-9
LATELY = 256  # steps over which the roofline fraction is computed


class _RequestState:
    """State of an unfinished request; times are monotonic nanoseconds, 0 while unknown."""

    __slots__ = ("arrived", "first", "last", "lost", "num_output", "num_prompt", "scheduled")

    def __init__(self, arrived: int, num_prompt: int) -> None:
        self.arrived, self.num_prompt = arrived, num_prompt
        self.scheduled = self.first = self.last = self.num_output = 0
        self.lost = 0  # computed tokens lost at its last preemption


class _Together:
    """Rows that get one token each in every step: their common updates are made once for all."""

    def __init__(self, request_ids: tuple[str, ...] = (), last: int = 0) -> None:
        self.request_ids, self.last = request_ids, last
        self.tokens = 0  # of each, not yet added to its `_RequestState`

    def are_all_of(self, record: StepRecord) -> bool:
        """True if the step's rows are exactly these and have one token each."""
        return record.request_ids == self.request_ids and set(map(len, record.token_ids)) == {1}


class Metrics(Collector, Observer):
    """Observes the engine service and provides the samples of `/metrics`.

    Args:
        model_name: the label on every sample.
        info: of the ready engine.
        healthy: whether a responsive engine is attached.
    """

    def __init__(self, model_name: str, info: EngineInfo, healthy: Callable[[], bool] = lambda: True) -> None:
        self._shown = Shown(model_name)
        self.told: dict[str, Callable[[], float]] = {}  # gauges of other components
        self._healthy = healthy
        self._requests: dict[str, _RequestState] = {}
        self._together = _Together()
        self.waits = waste.Waits()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.labelled: dict[str, dict[str, float]] = {
            name: dict.fromkeys(labelled.values, 0) for name, labelled in LABELLED.items()}
        self.labelled["request_wait_seconds_total"] = self.waits.seconds
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._step_times = step_times()
        self._lately: deque[tuple[float, float]] = deque(maxlen=LATELY)  # roofline and measured seconds of steps
        self.started(info)

    @property
    def usage(self) -> float:
        """Share of cache blocks held by requests."""
        return 1 - self._num_free_blocks / self._info.limits.num_blocks

    # -- observing -----------------------------------------------------------------------------------------------

    def started(self, info: EngineInfo) -> None:
        """Resets the engine's state for a new engine; the requests of the last one have ended."""
        self._info = info
        self._slots = info.scheduling.max_num_seqs
        self._before: StepRecord | None = None  # the last one with rows
        self.num_running = self.num_waiting = 0
        self._num_free_blocks = info.limits.num_blocks
        self.counters["engine_starts_total"] += 1

    def arrived(self, request_id: str, num_prompt: int, now_ns: int) -> None:
        self._requests[request_id] = _RequestState(now_ns, num_prompt)

    def commanded(self, command: Command, now_ns: int) -> None:
        self.waits.commanded(now_ns, is_arrival=isinstance(command, Add))

    def lost(self, message: str, now_ns: int) -> None:
        self.waits.lost(now_ns)

    def refused(self, kind: str) -> None:
        self._count("admission_rejections_total", kind)

    def stepped(self, record: StepRecord) -> None:
        if record.admitted or record.preempted:
            self._settle()
            self._made_way(record)
        if record.admitted or record.saves:
            self._tiers(record)
        self._tokens(record)
        if record.ended:
            self._settle()
            for row in record.ended:
                self._ended(row.request_id, row.reason, record.ended_ns)
        self.waits.stepped(record)
        if record.counts:
            self._step(record)
        if record.configured is not None:
            self._slots = record.configured.max_num_seqs
        self.num_running, self.num_waiting = record.num_running, record.num_waiting
        self._num_free_blocks = record.num_free_blocks

    def _made_way(self, record: StepRecord) -> None:
        """Counts preemptions and admissions."""
        self.counters["num_preemptions_total"] += len(record.preempted)
        for (request_id, _), lost in zip(record.preempted, record.lost, strict=True):
            if (state := self._requests.get(request_id)) is not None:
                state.lost = max(lost, self._in_flight(request_id))
        for request_id, num_cached in zip(record.admitted, record.cached, strict=True):
            if (state := self._requests.get(request_id)) is not None:
                self._admitted(state, num_cached, record.started_ns)

    def _in_flight(self, request_id: str) -> int:
        """Tokens computed by the end of the last step, which may have been in flight at the preemption."""
        before = self._before
        if before is None or request_id not in before.request_ids:
            return 0
        row = before.request_ids.index(request_id)
        return before.starts[row] + before.counts[row]

    def _step(self, record: StepRecord) -> None:
        """Observes a step's time and waste.  The executor starts a step when the previous one has ended."""
        counters = self.counters
        before, self._before = self._before, record
        began = max(record.started_ns, before.ended_ns) if before is not None else record.started_ns
        kind, seconds = waste.kind(record), (record.ended_ns - began) * NS
        self._step_times[kind].observe(seconds)
        if self._info.roofline is not None:
            self._hold_against(self._info.roofline, record, kind, seconds)
        self._histograms["iteration_tokens_total"].observe(sum(record.counts))
        if record.padding or record.held:
            counters["padded_tokens_total"] += sum(record.padding)
            counters["held_tokens_total"] += waste.held_tokens(record)
        empty = max(0, self._slots - len(record.counts))
        counters["slot_steps_total"] += empty + len(record.counts)
        counters["empty_slot_steps_total"] += empty
        if record.stop is not None:
            counters["empty_slot_steps_waiting_total"] += empty
        if record.refused:
            for reason, count in waste.why_stalled(record).items():
                self._count("stalled_row_steps_total", reason, count)

    def _hold_against(self, roofline: Roofline, record: StepRecord, kind: str, seconds: float) -> None:
        sampled = len(record.token_ids) - record.token_ids.count(())
        bound = roofline.seconds(roofline.cost(record.starts, record.counts, sampled))
        self.labelled["roofline_seconds_total"][kind] += bound
        self._lately.append((bound, seconds))

    @property
    def roofline_fraction(self) -> float:
        """Roofline seconds per measured second of the latest steps; 0 before the first."""
        taken = sum(seconds for _, seconds in self._lately)
        return sum(bound for bound, _ in self._lately) / taken if taken > 0 else 0.0

    def _tokens(self, record: StepRecord) -> None:
        now, together = record.ended_ns, self._together
        if together.are_all_of(record):
            self._gap(together.last, now, len(record.token_ids))
            together.tokens += 1
            together.last = now
            self.counters["generation_tokens_total"] += len(record.token_ids)
        else:
            self._settle()
            served = self._each_token(record)
            self._together = _Together(record.request_ids if served == len(record.request_ids) else (), now)

    def _settle(self) -> None:
        """Adds the common updates of `_together` to each request's state."""
        together = self._together
        if together.tokens:
            for request_id in together.request_ids:
                state = self._requests[request_id]
                state.num_output += together.tokens
                state.last = together.last
            together.tokens = 0

    def _each_token(self, record: StepRecord) -> int:
        """Counts the tokens of each row; returns the number of unfinished rows with tokens."""
        now, requests = record.ended_ns, self._requests
        generated = served = 0
        since: dict[int, int] = {}  # time of the last token -> rows: nearly always one entry
        for request_id, tokens in zip(record.request_ids, record.token_ids, strict=False):
            if tokens and (state := requests.get(request_id)) is not None:
                served += 1
                generated += len(tokens)
                state.num_output += len(tokens)
                if state.last:
                    since[state.last] = since.get(state.last, 0) + 1
                else:
                    self._first_token(state, now)
                state.last = now
        for last, count in since.items():
            self._gap(last, now, count)
        self.counters["generation_tokens_total"] += generated
        return served

    def _gap(self, last: int, now: int, rows: int) -> None:
        self._histograms["inter_token_latency_seconds"].observe((now - last) * NS, rows)

    def _admitted(self, state: _RequestState, num_cached: int, now: int) -> None:
        counters = self.counters
        counters["prefix_cache_queries_total"] += state.num_prompt + state.num_output
        if state.scheduled:  # it was preempted, and is recomputed
            counters["recomputed_tokens_total"] += max(0, state.lost - num_cached)
        else:
            state.scheduled = now
            counters["prompt_tokens_cached_total"] += num_cached

    def _tiers(self, record: StepRecord) -> None:
        """Counts the prefix hits of each tier and the copies between them."""
        limits = self._info.limits
        loaded = len(record.loads) * limits.block_size
        self.counters["prefix_cache_hits_total"] += sum(record.cached) - loaded
        self.counters["external_prefix_cache_hits_total"] += loaded
        block_bytes = self._info.memory.host // max(1, limits.num_host_blocks)
        self._count("kv_offload_total_bytes_total", TO_HOST, len(record.saves) * block_bytes)
        self._count("kv_offload_total_bytes_total", TO_DEVICE, len(record.loads) * block_bytes)

    def _first_token(self, state: _RequestState, now: int) -> None:
        state.first = now
        state.scheduled = state.scheduled or state.arrived
        self._observe("time_to_first_token_seconds", now - state.arrived)
        self._observe("request_queue_time_seconds", state.scheduled - state.arrived)
        self._observe("request_prefill_time_seconds", now - state.scheduled)
        self.counters["prompt_tokens_total"] += state.num_prompt

    def _ended(self, request_id: str, reason: str, now: int) -> None:
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        if reason == "rejected":
            self._count("admission_rejections_total", reason)
            return
        self._count("request_success_total", reason)
        self._observe("e2e_request_latency_seconds", now - state.arrived)
        self._histograms["request_prompt_tokens"].observe(state.num_prompt)
        self._histograms["request_generation_tokens"].observe(state.num_output)
        if state.first:
            self._observe("request_decode_time_seconds", state.last - state.first)
        if state.num_output > 1:
            self._observe("request_time_per_output_token_seconds", (state.last - state.first) / (state.num_output - 1))

    def _observe(self, name: str, nanoseconds: float) -> None:
        self._histograms[name].observe(max(nanoseconds, 0) * NS)

    def _count(self, name: str, label: str, times: int = 1) -> None:
        counts = self.labelled[name]
        counts[label] = counts.get(label, 0) + times

    # -- exposition ----------------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        shown, info = self._shown, self._info
        limits = info.limits
        yield shown.info("engine_info", "What serves.", {
            "device": info.device, "dtype": info.dtype, "max_model_len": limits.max_model_len})
        yield shown.info("cache_config_info", "The cache.", {
            "block_size": limits.block_size, "cache_dtype": info.cache_dtype, "num_blocks": limits.num_blocks,
            "enable_prefix_caching": limits.enable_prefix_caching, "num_host_blocks": limits.num_host_blocks})
        yield shown.gauge("engine_healthy", self._healthy())
        yield shown.gauge("num_requests_running", self.num_running)
        yield shown.gauge("num_requests_waiting", self.num_waiting)
        yield shown.waiting(self.waits.now if self.num_waiting else {})
        yield shown.gauge("kv_cache_usage_perc", self.usage)
        yield shown.gauge("max_num_seqs", self._slots)
        yield shown.gauge("roofline_fraction", self.roofline_fraction)
        for name, value in self.told.items():
            yield shown.gauge(name, value())
        for name, count in self.counters.items():
            yield shown.counter(name, count)
        for name, counts in self.labelled.items():
            yield shown.labelled(name, counts)
        for name, histogram in self._histograms.items():
            yield shown.histogram(name, histogram)
        yield shown.step_time(self._step_times.items())
