"""Kernels that cannot be made ready end the start, with the reason, and not the first request."""

from __future__ import annotations

import pytest
from support import checkpoints

from slotwise.compose.engine_builder import load
from slotwise.compute.kernels.interface import Kernels
from slotwise.engine.config import EngineConfig


def breaking(kernels: Kernels) -> Kernels:
    def warm_up(kind: object) -> None:
        raise RuntimeError("no such instruction")

    kernels.warm_up = warm_up  # type: ignore[method-assign]
    return kernels


def test_an_error_of_the_warm_up_reaches_the_start(tmp_path):
    config = EngineConfig.of(model=str(checkpoints.make("llama3", tmp_path)), device="cpu", kv_cache_memory=8 << 20)
    loaded = load(config, wrap=breaking)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such instruction"):
            loaded.engine(config)
