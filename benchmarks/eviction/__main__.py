"""Compares orders of eviction in simulation, and what-ifs with real servers."""

from __future__ import annotations

from benchmarks.commands import run

run("eviction", __doc__ or "", ("orders", "agreement"))
