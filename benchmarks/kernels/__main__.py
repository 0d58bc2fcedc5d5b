"""Times the kernels of the CPU with cold caches."""

from __future__ import annotations

from benchmarks.commands import run

run("kernels", __doc__ or "", ("each", "products"))
