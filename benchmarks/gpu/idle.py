"""The device's activity as intervals of time, from the profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
NAMED = 12  # kinds of work that take longest


class Span(NamedTuple):
    """One kernel or copy on the device."""

    name: str
    start: float  # microseconds
    end: float


def watch(work: Callable[[], None], device: torch.device) -> list[Span]:
    """Returns the device's spans during `work`; on the CPU, for rehearsals, torch's operators."""
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            work()
            if on_gpu:
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = DEVICE_WORK if on_gpu else ("cpu_op",)
    return [Span(event["name"], event["ts"], event["ts"] + event["dur"])
            for event in events if event.get("cat") in wanted and event.get("ph") == "X"]


def idle_share(spans: Sequence[Span]) -> float:
    """Returns the share of the time between the first and the last span that no span covers.

    Raises:
        ValueError: `spans` is empty.
    """
    if not spans:
        raise ValueError("the profiler saw no work of the device")
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    busy, reached = 0.0, first
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return 1 - busy / (last - first)


def shares(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the kinds of work that took longest, with their share of the total."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.name] += span.end - span.start
    total = sum(seconds.values())
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:NAMED]
    return [{"name": name[:80], "share": round(taken / total, 4)} for name, taken in longest]
