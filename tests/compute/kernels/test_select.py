"""Kernels by the name of a device."""

from __future__ import annotations

import pytest
import torch

from slotwise.compose.engine_builder import load
from slotwise.compute.kernels import reference
from slotwise.compute.kernels.select import choose, draw_for, resolve
from slotwise.engine.config import ConfigError, EngineConfig


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_known_device(name):
    assert choose(name).name == name


def test_an_unknown_device_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"'abacus'.*'cpu'.*'cuda'.*'reference'"):
        choose("abacus")


@pytest.mark.parametrize("there", [True, False])
def test_auto_is_the_gpu_where_torch_sees_one(there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert resolve("auto") == ("cuda" if there else "cpu")
    assert resolve("cpu") == "cpu"


def test_a_gpu_that_is_not_there_is_missed_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig.of(model="nowhere", device="cuda")
    with pytest.raises(ConfigError, match=r"device cuda needs an NVIDIA GPU, and torch \S+ .*: choose cpu or auto$"):
        load(config)


def test_weights_are_quantized_on_the_cpu_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="quantization int8 needs device cpu, not cuda"):
        load(EngineConfig.of(model="nowhere", quantization="int8"))
    with pytest.raises(ConfigError, match="needs device cpu, not cuda"):
        EngineConfig.of(model="nowhere", device="cuda", quantization="int4")


@pytest.mark.parametrize(("device", "kind", "kept"), [("cpu", "fp8", "auto or int8"), ("cuda", "int8", "auto or fp8")])
def test_a_cache_that_a_device_does_not_keep_is_refused_with_those_it_does(monkeypatch, device, kind, kept):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match=f"kv_cache_dtype must be {kept} on device {device}, not '{kind}'"):
        load(EngineConfig.of(model="nowhere", device=device, kv_cache_dtype=kind))


def test_tokens_are_drawn_in_plain_torch_beside_plain_kernels():
    assert draw_for(choose("reference")) is reference.draw
