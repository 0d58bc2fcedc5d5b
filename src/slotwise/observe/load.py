"""The periodic log line under load: rates, running and waiting requests, the cache, and why requests wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from slotwise.observe.lines import tell
from slotwise.observe.metrics import Metrics

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
