"""After a start no request waits for a kernel to be compiled or loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from support.quantized_matrices import random_matrix

from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import paths
from slotwise.compute.kernels.matrix import Format

SCRIPT = """
import json, os, sys
import slotwise.compose.engine_builder
from slotwise import LLM, SamplingParams
from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel
from slotwise.offline.sampling_params import StructuredOutputsParams

def told(settings):
    llm = LLM(device="cpu", max_num_seqs=4, max_model_len=256, kv_cache_memory=8 << 20, **settings)
    late, ready = [], CompiledKernel._ready
    CompiledKernel._ready = lambda self: late.append(self.name) or ready(self)
    choice = StructuredOutputsParams(choice=["first", "second"])
    outputs = llm.generate(["def", "def", "def", "def"], [
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(temperature=1.0, seed=1, max_tokens=8, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=choice),
        SamplingParams(temperature=1.0, seed=1, max_tokens=8, structured_outputs=choice)], use_tqdm=False)
    return [late, [output.outputs[0].text for output in outputs]]

for settings in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        print(json.dumps(told(settings)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_every_kernel_of_a_request_is_ready_after_the_start() -> None:
    """Unquantized and in int8, each in a process of its own, forked before any kernel is loaded."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps([{}, {"quantization": "int8"}])],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2, done.stderr[-3000:]
    for late, texts in found:
        assert set(texts[2:]) <= {"first", "second"}
        assert late == []


def test_kernels_of_a_format_are_ready_once_a_matrix_was_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    of_no_other_test = Format(5, 112, torch.float16, zero=16)
    matrix, kernels = random_matrix(of_no_other_test, 64, 224), CpuKernels(1)
    assert kernels.product_path(torch.float32) == "float32"
    embed, product = kernels.embedding(matrix, torch.float32), kernels.head(matrix)
    kernels.warm_up(torch.float32)
    late: list[str] = []
    monkeypatch.setattr(CompiledKernel, "_ready", lambda code: late.append(code.name))
    assert product(embed(torch.tensor([1, 2]))).shape == (2, 64)
    assert late == []
    assert kernels.product_path(torch.float32) == paths.quantized("")
