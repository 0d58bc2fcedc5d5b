"""Logits of a position do not depend on how they are computed: alone, with drafts behind, in chunks of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import checkpoints, product_paths
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.interface import RaggedBatch
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.model.loading import load_model

BLOCK, LONGEST = 64, 2100  # tokens: of attention's three segments
PATHS = ["float32", "amx", "bf16", "fp16"]  # of products whose result does not depend on the number of rows
FAMILIES = ("llama3", "mistral", "gemma2", "qwen3_5", "deepseek_v3")  # of different attention
LAST = 9  # positions whose logits are compared


def step(tokens: Tensor, start: int, sampled: int) -> RaggedBatch:
    """A row that computes `tokens` from position `start` on, and the logits of the last `sampled` of them."""
    end = start + len(tokens)
    positions = torch.arange(start, end)
    table = torch.arange(-(-LONGEST // BLOCK), dtype=torch.int32)[None]
    return RaggedBatch(
        tokens, positions, positions, torch.tensor([0, len(tokens)], dtype=torch.int32),
        torch.tensor([end], dtype=torch.int32), table, torch.arange(len(tokens) - sampled, len(tokens)), len(tokens),
        end)


@torch.inference_mode()
def logits(decoder: Decoder, tokens: Tensor, chunks: list[int]) -> Tensor:
    """Logits of the last positions of `tokens`, computed in steps of so many tokens."""
    caches = [decoder.kernels.allocate_cache(-(-LONGEST // BLOCK), BLOCK, shape, decoder.config.dtype)
              for shape in decoder.layer_shapes]
    found, start = [], 0
    for chunk in chunks:
        wanted = max(0, min(chunk, start + chunk - (len(tokens) - LAST)))
        found.append(decoder.logits(decoder.hidden(step(tokens[start : start + chunk], start, wanted), caches)))
        start += chunk
    assert start == len(tokens)
    return torch.cat(found)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(request.param, tmp_path_factory.mktemp("model"), max_position_embeddings=LONGEST)


@pytest.mark.parametrize(("folder", "kind", "path"), [
    *(product_paths.param("float32", family, kind) for family in FAMILIES for kind in ("float32", "bfloat16")),
    *(product_paths.param(path, "llama3", "bfloat16") for path in PATHS[1:])], indirect=["folder"])
def test_with_and_without_drafts_chunked_and_not(folder: Path, kind: str, path: str) -> None:
    decoder = load_model(folder, kernels=CpuKernels(threads=2, path=path), dtype=kind)
    for length in (1025, LONGEST):
        tokens = torch.randint(3, decoder.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
        whole = logits(decoder, tokens, [length])
        before = length - LAST
        chunkings = [[before, LAST], [before, *[1] * LAST], [before, 1, 4, 3, 1]]
        if length == LONGEST:
            chunkings += [[512] * (before // 512) + [before % 512, 2, 2, 5], [37] * (length // 37) + [length % 37]]
        for chunks in chunkings:
            assert torch.equal(logits(decoder, tokens, [size for size in chunks if size]), whole), (length, chunks[-9:])
