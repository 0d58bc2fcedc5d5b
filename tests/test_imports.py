"""What may be imported where torch is not: the core anywhere, the API process without its weight."""

from __future__ import annotations

import subprocess
import sys

import pytest

CORE = ("slotwise.core.scheduler", "slotwise.core.record", "slotwise.core.disciplines.disciplines",
        "slotwise.core.policies.fcfs")


def run_without(forbidden: tuple[str, ...], modules: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Import `modules` in a fresh interpreter in which `forbidden` cannot be imported."""
    script = "; ".join([
        "import sys, importlib", f"sys.modules.update(dict.fromkeys({forbidden!r}))",
        f"[importlib.import_module(name) for name in {modules!r}]"])
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_the_core_needs_nothing_but_the_standard_library():
    run = run_without(("torch", "numpy", "numba", "msgspec", "tokenizers"), CORE)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", [
    "slotwise.compose.api_server", "slotwise.cli", "slotwise", "slotwise.measure.simulate.replay", "slotwise.async_llm",
    "slotwise.sampling_params", "slotwise.inputs", "slotwise.outputs"])
def test_neither_the_api_process_nor_a_replay_sees_torch(module):
    run = run_without(("torch", "numpy", "numba"), (module,))
    assert run.returncode == 0, run.stderr


def test_what_is_forbidden_would_show():
    assert "torch" in run_without(("torch",), ("slotwise.offline.llm",)).stderr


SERVER = ("llguidance", "msgspec", "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "rich",
          "aiohttp", "blake3")

GENERATE = """
import sys
sys.modules.update(dict.fromkeys({without!r}))
from slotwise import LLM, SamplingParams
(output,) = LLM(max_model_len=64, kv_cache_memory=1 << 22).generate("a", SamplingParams(max_tokens=3, ignore_eos=True))
assert len(output.outputs[0].token_ids) == 3
"""


def test_an_engine_runs_without_what_the_server_needs():
    script = GENERATE.format(without=SERVER)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
