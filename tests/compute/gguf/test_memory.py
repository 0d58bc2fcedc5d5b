"""A file takes memory only while a tensor of it is read."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize

from slotwise.compute.model.gguf.gguf_tensors import open_gguf_tensors

SMAPS = Path("/proc/self/smaps")


def resident_kib(file: Path) -> int:
    """Memory that the maps of a file take."""
    found, lines = 0, iter(SMAPS.read_text().splitlines())
    for line in lines:
        if line.endswith(str(file)):
            found += next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    return found


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not tell what a map takes")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_pages_are_given_back_once_they_were_read(kind: str, tmp_path: Path) -> None:
    file, (count, size) = tmp_path / "large.gguf", (1024, 1024)
    writer = gguf.GGUFWriter(file, "llama")
    stored = gguf.GGMLQuantizationType[kind]
    numbers = np.random.default_rng(0).standard_normal((count, size), dtype=np.float32)
    writer.add_tensor("token_embd.weight", quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf_tensors(file).tensors["model.embed_tokens.weight"]

    def read() -> torch.Tensor:
        return tensor.rows(0, count) if tensor.format is None else tensor.matrix().dequantized()

    first = read()
    assert torch.equal(read(), first)
    assert resident_kib(file) < file.stat().st_size / 1024 / 4
