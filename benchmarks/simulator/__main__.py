"""Compares the simulator with real servers, and times it."""

from __future__ import annotations

from benchmarks.commands import run

run("simulator", __doc__ or "", ("accuracy", "speed", "what_if"))
