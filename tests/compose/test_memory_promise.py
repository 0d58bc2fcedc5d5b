"""What is said of memory at the start is what the process takes, after steps of every shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support import product_paths

from slotwise.engine.messages import MemoryUse

# In a process of its own, as an engine is.  All blocks are in use when 64 long rows fill the cache.
STEPS = """
import json, random, sys
from slotwise.compute.kernels.lazy_imports import spare_torch
spare_torch()
from slotwise import builtin
from slotwise.compose.engine_builder import build_engine
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import Add
from slotwise.compute.runner.memory_budget import resident_bytes

engine, info = build_engine(EngineConfig.of(
    model=str(builtin.path()), device="cpu", dtype=sys.argv[1], max_num_seqs=64, kv_cache_memory=64_000_000))
draw, number = random.Random(0), 0

def serve(rows, prompt, output):
    global number
    for _ in range(rows):
        ids = [draw.randrange(3, info.vocab_size) for _ in range(draw.randint(1, prompt))]
        params = SamplingSpec(temperature=0, max_tokens=draw.randint(1, output), ignore_eos=True)
        engine.handle(Add(f"r{number}", RequestSpec(tuple(ids), params, number)))
        number += 1
    while engine.has_work:
        assert not engine.step().outcome.failure

for rows in (1, 2, 3, 5, 8, 13, 21, 34, 64, 47, 30, 11):  # of every captured size, growing and shrinking
    serve(rows, 11 * rows, 8)
serve(64, 900, 30)
print(json.dumps({"said": info.memory.total, "taken": resident_bytes(), "path": info.product_path,
                  "runtime": info.memory.runtime}))
"""


def measured(dtype: str, path: str) -> dict[str, object]:
    run = subprocess.run([sys.executable, "-c", STEPS, dtype], env=os.environ | {"SLOTWISE_CPU_LINEAR": path},
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "path"), [
    product_paths.param("float32", "float32"),
    *(product_paths.param(path, "bfloat16") for path in ("fp16", "bf16", "onednn"))])
def test_a_process_takes_what_was_said_within_a_tenth(dtype, path):
    memory = measured(dtype, path)
    assert memory["path"] == path
    assert memory["taken"] < 1.1 * memory["said"], memory
    assert memory["said"] < 1.1 * memory["taken"], memory


def test_the_total_is_all_of_it():
    assert MemoryUse(1, 20, 300, 4000, 50000).total == 54321
