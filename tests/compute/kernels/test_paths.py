"""The path of products: chosen by what the processor can do, or forced, or refused by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from numba import config
from support import product_paths
from support.live import cli

from slotwise import LLM, SamplingParams
from slotwise.compose.engine_builder import load
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.processor import AVX512
from slotwise.compute.kernels.cpu.products import linear_bf16, linear_blocks, onednn, paths, tiles
from slotwise.compute.kernels.select import choose
from slotwise.engine.config import ConfigError, EngineConfig

BFLOAT16 = torch.bfloat16
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_is_forced(monkeypatch):
    monkeypatch.delenv(paths.VARIABLE, raising=False)


@pytest.mark.parametrize(("features", "taken"), [
    ("avx512f,+avx512bf16,+avx512fp16", "fp16"), ("avx512f,+avx512bf16", "bf16"), ("avx512f", "float32")])
@pytest.mark.skipif(not AVX512, reason="wants a processor with AVX-512")
def test_the_fastest_path_that_the_processor_has_is_taken(monkeypatch, features, taken):
    monkeypatch.setattr(config, "CPU_FEATURES", f"+{features}")
    assert CpuKernels(1).product_path(BFLOAT16) == taken
    assert CpuKernels(1).product_path(torch.float32) == "float32"


@pytest.mark.skipif(not AVX512, reason="wants a processor with AVX-512")
def test_a_path_with_an_obstacle_is_not_taken(monkeypatch):
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx512f,+avx512bf16,+amx-bf16")
    monkeypatch.setattr(linear_bf16, "amx_obstacle", lambda: "")
    assert CpuKernels(1).product_path(BFLOAT16) == "amx"
    monkeypatch.setattr(linear_bf16, "amx_obstacle", lambda: "the system permits no AMX")
    assert CpuKernels(1).product_path(BFLOAT16) == "bf16"


@product_paths.each(paths.DENSE)
def test_a_path_is_forced_by_the_environment_or_an_argument(path, monkeypatch):
    assert CpuKernels(1, path=path).product_path(BFLOAT16) == path
    monkeypatch.setenv(paths.VARIABLE, path)
    assert choose("cpu").product_path(BFLOAT16) == path
    assert CpuKernels(1, path="float32").product_path(BFLOAT16) == "float32", "the argument goes first"
    assert choose("cpu", "int8").product_path(BFLOAT16) in paths.QUANTIZED, "the other group is left alone"


@product_paths.each(paths.QUANTIZED)
def test_a_path_of_integers_is_forced_for_quantized_weights(path, monkeypatch):
    monkeypatch.setenv(paths.VARIABLE, path)
    assert choose("cpu", "int4").product_path(BFLOAT16) == path
    assert choose("cpu").product_path(BFLOAT16) in paths.DENSE


def test_an_unknown_path_is_refused_with_those_there_are(monkeypatch):
    names = "amx, fp16, bf16, float32, onednn, amx_int8, vnni or integer"
    with pytest.raises(ValueError, match=f"path must be {names}, not 'gpu'"):
        CpuKernels(1, path="gpu")
    monkeypatch.setenv(paths.VARIABLE, "FLOAT32")
    with pytest.raises(ConfigError, match=r"^SLOTWISE_CPU_LINEAR must be .*, not 'FLOAT32'$"):
        load(EngineConfig.of(model="nowhere", device="cpu"))


@pytest.mark.parametrize("path", ["amx", "fp16", "bf16", "amx_int8", "vnni"])
def test_a_path_that_the_processor_cannot_execute_is_refused(path, monkeypatch):
    for module, name in ((tiles, "obstacle"), (linear_bf16, "amx_obstacle"), (linear_blocks, "amx_obstacle")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)  # what this processor has is remembered
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx512f")
    with pytest.raises(ValueError, match=f"path {path} cannot run here: it needs a processor with A"):
        CpuKernels(1, path=path)
    monkeypatch.setenv(paths.VARIABLE, path)
    with pytest.raises(ConfigError, match=f"SLOTWISE_CPU_LINEAR {path} cannot run here"):
        load(EngineConfig.of(model="nowhere", device="cpu"))


def test_a_torch_without_onednn_is_said_to_have_none(monkeypatch):
    def missing(weight, bias):
        raise AttributeError("no such operator")

    monkeypatch.setattr(onednn, "onednn_linear", missing)
    assert "no such operator" in onednn.obstacle.__wrapped__()


def test_a_bad_path_is_one_line_on_the_command_line(monkeypatch):
    monkeypatch.setenv(paths.VARIABLE, "abacus")
    run = cli("generate", "--device", "cpu", "x")
    assert run.returncode == 1
    assert run.stderr == (
        "slotwise generate: SLOTWISE_CPU_LINEAR must be amx, fp16, bf16, float32, onednn, amx_int8, vnni or integer, "
        "not 'abacus'\n")


@product_paths.each(paths.ALL)
def test_a_model_generates_on_each_path_and_tells_which(path, monkeypatch):
    monkeypatch.setenv(paths.VARIABLE, path)
    llm = LLM(device="cpu", dtype="bfloat16", max_num_seqs=4, max_model_len=64, kv_cache_memory=8 << 20,
              quantization="int8" if path in paths.QUANTIZED else "none")
    asked = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 20, 9)]
    outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8, 8]
    assert llm.info.product_path == path


PRODUCTS = """
import os, sys
import torch
from slotwise.compute.kernels.cpu.products import onednn
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.runner.memory_budget import resident_bytes

kernels, rows = CpuKernels(1, path="onednn"), int(sys.argv[1])
products = [kernels.linear(torch.randn(size, 64).bfloat16()) for size in (64, 128, 192, 256)]
with torch.inference_mode():
    for number in range(1, rows + 1):
        for product in products:
            product(torch.ones(number, 64).bfloat16())
        if number == 1:
            before = resident_bytes()
print(resident_bytes() - before, kernels.library_bytes(torch.bfloat16))
"""


@product_paths.each(["onednn"])
def test_what_onednn_keeps_is_bounded_and_counted(path):
    """1,200 products: unbounded they take 400 MB and more."""
    taken, said = map(int, output(PRODUCTS, 299).split())
    assert said == onednn.KEPT * onednn.KEPT_BYTES
    assert taken < 2 * said  # with the gaps that tensors of other sizes leave in the heap


@product_paths.each(["onednn"])
def test_a_user_s_own_bound_is_kept_and_counted(path):
    _, said = map(int, output(PRODUCTS, 3, LRU_CACHE_CAPACITY="7", ONEDNN_PRIMITIVE_CACHE_CAPACITY="9").split())
    assert said == 9 * onednn.KEPT_BYTES


def output(script: str, rows: int, **bounds: str) -> str:
    """What a fresh interpreter prints, whose products have up to so many rows, with no bounds but these."""
    environment = {name: value for name, value in os.environ.items() if name not in onednn.BOUNDS}
    run = subprocess.run([sys.executable, "-c", script, str(rows)], env=environment | bounds, capture_output=True,
                         text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@product_paths.each(paths.ALL)
@pytest.mark.parametrize("rows", [1, 40])
def test_logits_are_float32_and_hidden_states_bfloat16(path: str, rows: int) -> None:
    """Rounded, they are what a product gives: the last panel is not whole, and its results pass through memory."""
    draw = torch.Generator().manual_seed(rows)
    weight, bias, x = (torch.randn(*size, generator=draw).bfloat16() for size in ((100, 96), (100,), (rows, 96)))
    kernels = CpuKernels(2, "int8" if path in paths.QUANTIZED else "none", path=path)
    logits = kernels.head(weight, bias)(x)
    assert logits.dtype == kernels.wide_kind(BFLOAT16) == torch.float32
    assert torch.equal(logits.bfloat16(), kernels.linear(weight, bias)(x))
    assert path == "onednn" or not torch.equal(logits, logits.bfloat16().float())
