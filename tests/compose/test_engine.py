"""Weights that do not fit the memory are refused before one is read."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slotwise import builtin
from slotwise.compose.engine_builder import load
from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.loading import read_config
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.runner import memory_budget
from slotwise.engine.config import EngineConfig

WIDTH = 16_384
MOST_DATA = 4 << 30  # bytes that the command may take, so that this machine is not filled if nothing is refused


def sparse(folder: Path, least: int) -> Path:
    """A checkpoint of more than `least` bytes of weights, none of which is on the disk."""
    shutil.copytree(builtin.path(), folder, ignore=shutil.ignore_patterns("*.py", "*.md", "*.safetensors"))
    layers = 2 + least // (2 * 4 * WIDTH * WIDTH)
    config = json.loads((folder / "config.json").read_text()) | {
        "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": WIDTH // 64,
        "num_key_value_heads": WIDTH // 64, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    write_header(folder / "model.safetensors", read_config(folder))
    return folder


def write_header(path: Path, config: ModelConfig) -> None:
    """Write the table of a file of weights; they are a hole in the file."""
    table, end = {}, 0
    for name, shape in tensor_shapes(config).items():
        size = 2 * torch.Size(shape).numel()
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + end)


def test_a_model_that_cannot_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    try:
        folder = sparse(tmp_path / "model", memory_budget.loadable_bytes())
    except OSError:
        pytest.skip("this file system has no files of that size")
    done = subprocess.run(
        [sys.executable, "-m", "slotwise.cli", "generate", "--model", str(folder), "def"], capture_output=True,
        text=True, timeout=240, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA, MOST_DATA)))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("slotwise generate: the weights take ")
    assert " GiB of memory are free for them: " in line and "quantization int8" in line


def test_what_fits_is_measured_as_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized model may take less than its files have, and one converted to float32 takes more."""
    needed = {}
    for settings in ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"quantization": "int4"}):
        config = EngineConfig.of(model=str(builtin.path()), device="cpu", **settings)
        monkeypatch.setattr(memory_budget, "loadable_bytes", lambda: 0)
        with pytest.raises(MemoryError, match="the weights take"):
            load(config)
        monkeypatch.setattr(memory_budget, "loadable_bytes", lambda: memory_budget.UNLIMITED)
        decoder = load(config)._decoder
        monkeypatch.setattr(memory_budget, "loadable_bytes", lambda size=decoder.weight_bytes: size)
        load(config)
        needed[str(settings)] = decoder.weight_bytes
    bfloat16, float32, int4 = needed.values()
    assert int4 < bfloat16 < float32
