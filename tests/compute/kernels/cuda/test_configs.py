"""Which sizes attention is started with."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from support.cuda_device import interpreted

with interpreted():
    from slotwise.compute.kernels.cuda import configs

KINDS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    configs.tuning_for.cache_clear()
    yield tmp_path
    configs.tuning_for.cache_clear()


def test_a_tuned_device_is_started_as_its_file_says(folder):
    wanted = configs.Tuning(configs.PrefillConfig(64, 64, 4, 2), configs.DecodeConfig(32, 2, 4), 256)
    path = configs.file_of("NVIDIA A/B 100")
    assert path.parent == folder
    path.write_text(json.dumps({configs.key_of(128, torch.bfloat16): asdict(wanted)}))
    assert configs.tuning_for("NVIDIA A/B 100", 128, torch.bfloat16) == wanted
    assert configs.tuning_for("NVIDIA A/B 100", 64, torch.bfloat16) == configs.default_tuning(64, torch.bfloat16)


def test_a_device_nobody_tuned_is_started_with_defaults(folder):
    assert configs.tuning_for("unheard of", 64, torch.float32) == configs.default_tuning(64, torch.float32)


@pytest.mark.parametrize("entry", [{}, {"prefill": {"block_m": 64}, "decode": {}}, {"prefill": {}, "decode": {"x": 1}}])
def test_an_incomplete_file_is_named(folder, entry):
    configs.file_of("broken").write_text(json.dumps({"64-float16": entry}))
    with pytest.raises(ValueError, match=r"broken\.json"):
        configs.tuning_for("broken", 64, torch.float16)


def shipped() -> list[configs.Tuning]:
    files = [json.loads(path.read_text()) for path in configs.FOLDER.glob("*.json")]
    return [configs.parse(entry, "shipped") for file in files for entry in file.values()]


def test_what_is_shipped_and_the_defaults_can_be_launched():
    defaults = [configs.default_tuning(head_dim, kind) for head_dim in (16, 64, 80, 128, 256) for kind in KINDS]
    for tuning in defaults + shipped():
        decode, prefill = tuning.decode, tuning.prefill
        assert tuning.segment % decode.block_n == tuning.segment % prefill.block_n == 0
        for size in (decode.block_n, decode.num_warps, prefill.block_m, prefill.block_n):
            assert size & (size - 1) == 0
        assert min(decode.block_n, prefill.block_m, prefill.block_n) >= 16
