"""Measures what speculative decoding gains, and what proposing drafts costs."""

from __future__ import annotations

from benchmarks.commands import run

run("speculation", __doc__ or "", ("lookups", "draft_model"))
