"""Starts llama.cpp's server: FILE PORT SLOTS CONTEXT.

Runs in the environment of llama.cpp, and imports nothing of Slotwise.
"""

from __future__ import annotations

import os
import signal
import sys

import xllamacpp

file, port, slots, context = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.port, params.hostnames = file, port, ["127.0.0.1"]
params.n_parallel, params.n_ctx, params.cont_batching = slots, slots * context, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
params.use_jinja, params.cache_ram_mib = True, 0
params.model_alias = {"model"}
server = xllamacpp.Server(params)
signal.pause()
