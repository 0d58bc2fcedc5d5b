"""Other machines than those of the tests, faked: what runs on each, and what happens without Linux' own files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slotwise import LLM, SamplingParams
from slotwise.api.http import listener
from slotwise.compose.engine_builder import load
from slotwise.compose.launch import Cores
from slotwise.compute.kernels.cpu.jit import workers
from slotwise.compute.kernels.select import resolve
from slotwise.compute.runner import memory_budget
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.platform import host

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
OTHERS = [("Darwin", "arm64"), ("Darwin", "x86_64"), ("Linux", "riscv64"), ("Linux", "ppc64le"), ("Linux", "armv7l"),
          ("FreeBSD", "amd64"), ("", "")]


def be(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(host, "platform", SimpleNamespace(system=lambda: system, machine=lambda: machine))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_kernels_run_on_linux(machine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    be(monkeypatch, "Linux", machine)
    assert host.kernels_obstacle() == "" and resolve("cpu") == "cpu" and not caplog.records


@pytest.mark.parametrize(("system", "machine"), OTHERS)
def test_plain_torch_computes_elsewhere_and_one_line_says_so(
        system: str, machine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    be(monkeypatch, system, machine)
    assert resolve("cpu") == "reference"
    (record,) = caplog.records
    assert f"not on {system} on {machine}: plain torch computes instead (device reference)" in record.getMessage()
    assert resolve("reference") == "reference" and len(caplog.records) == 1


@pytest.mark.parametrize(("machine", "capability", "device"), [
    ("x86_64", "DEFAULT", "reference"), ("x86_64", "AVX2", "cpu"), ("x86_64", "AVX512", "cpu"),
    ("aarch64", "DEFAULT", "cpu"), ("aarch64", "SVE256", "cpu")])
def test_old_processors_are_spared_the_kernels(
        machine: str, capability: str, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    be(monkeypatch, "Linux", machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert resolve("cpu") == device
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the CPU's kernels need AVX2, which this processor does not have"] * (device == "reference")


def test_a_mac_generates_the_same_tokens(monkeypatch: pytest.MonkeyPatch):
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_model_len": 64, "kv_cache_memory": 8 << 20}
    expected = LLM(**settings).generate("def add(a, b):", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    be(monkeypatch, "Darwin", "arm64")
    llm = LLM(**settings)
    assert llm.info.device == "reference" and llm.info.product_path == "torch"
    assert llm.generate("def add(a, b):", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_weights_are_not_quantized_there(monkeypatch: pytest.MonkeyPatch):
    be(monkeypatch, "Darwin", "arm64")
    with pytest.raises(ConfigError, match="quantization int8 needs device cpu, not reference"):
        load(EngineConfig.of(model="nowhere", device="cpu", quantization="int8"))


def test_nothing_is_compiled_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(4))
    called: list[int] = []
    monkeypatch.setattr(workers, "_call", called.append)
    workers.call_early("cpu")
    be(monkeypatch, "Darwin", "arm64")
    workers.call_early("cpu")
    assert called == [3], "on Linux alone"


def test_processors_are_counted_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch):
    assert host.num_processors() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert host.num_processors() == 6


def test_without_proc_half_of_the_memory_counts_as_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("_MEMINFO", "_MEMBERSHIP", "_CGROUP"):
        monkeypatch.setattr(memory_budget, name, tmp_path / "absent")
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_budget.available_bytes() == physical // 2
    assert memory_budget.loadable_bytes() == memory_budget.UNLIMITED

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    assert memory_budget.available_bytes() == 4 << 30


def test_without_proc_threads_stay_and_files_are_guessed(monkeypatch: pytest.MonkeyPatch):
    def absent(path: object) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    cores = Cores()
    monkeypatch.setattr(os, "listdir", absent)
    cores._all = frozenset({0, 1})
    monkeypatch.setattr("slotwise.compose.launch._of", lambda thread: frozenset({0}))
    cores.leave_to(1)
    most = 1 << 12
    assert listener.most_within(most) == most - 2 * listener.OWN_FILES - listener.backlog_within(most)


def test_the_last_cache_is_the_largest_that_the_system_tells_of() -> None:
    told = [int(file.read_text().strip().removesuffix("K")) << 10
            for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    assert host.last_cache_bytes() == (max(told) if told else host.UNKNOWN_CACHE)
