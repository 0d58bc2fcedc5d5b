"""Times steps of a whole engine against the roofline of the machine."""

from __future__ import annotations

from benchmarks.commands import run

run("decode", __doc__ or "", ("steps", "contexts", "parts"))
