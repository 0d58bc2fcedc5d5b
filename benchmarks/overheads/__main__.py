"""Measures what a feature costs, with it and without it in turn."""

from __future__ import annotations

from benchmarks.commands import run

run("overheads", __doc__ or "", ("observers", "structured_output", "lora", "timeline"))
