"""After a start no request waits for a kernel to be compiled or loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make
from gguf_files import write

from slotwise.kernels.cpu import paths

SCRIPT = """
import json, sys
from slotwise import LLM, SamplingParams
from slotwise.kernels.cpu.jit.compiler import Compiled
from slotwise.sampling_params import StructuredOutputsParams

llm = LLM(device="cpu", max_num_seqs=4, max_model_len=256, kv_cache_memory=8 << 20, **json.loads(sys.argv[1]))
late, ready = [], Compiled._ready
Compiled._ready = lambda self: late.append(self.name) or ready(self)
choice = StructuredOutputsParams(choice=["first", "second"])
outputs = llm.generate(["def", "def", "def", "def"], [
    SamplingParams(temperature=0.0, max_tokens=8), SamplingParams(temperature=1.0, seed=1, max_tokens=8, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=choice),
    SamplingParams(temperature=1.0, seed=1, max_tokens=8, structured_outputs=choice)], use_tqdm=False)
print(json.dumps([late, [output.outputs[0].text for output in outputs], llm.info.product_path]))
"""


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["default", "int8"])
def test_every_kernel_of_a_request_is_ready_after_the_start(settings: dict[str, str]) -> None:
    late, texts, _ = after_the_start(settings)
    assert set(texts[2:]) <= {"first", "second"}
    assert late == []


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0"])
def test_so_is_every_kernel_of_a_quantised_file(kind: str, tmp_path: Path) -> None:
    folder = make("llama3", tmp_path / "llama3", tokenizer=True)
    late, _, path = after_the_start({"model": str(write(folder, tmp_path / "tiny.gguf", kind))})
    assert late == []
    assert path == paths.quantised("")


def after_the_start(settings: dict[str, str]) -> tuple[list[str], list[str], str]:
    """The kernels that requests had to wait for, the texts of their answers, and the path of products."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(settings)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    late, texts, path = json.loads(done.stdout)
    return late, texts, path
