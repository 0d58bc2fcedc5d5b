"""A whole decoder on these kernels continues prompts as transformers does: greedy, float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import checkpoints, gguf_files
from support import quantized_checkpoints as quantized
from support.cuda_device import DEVICE, KERNELS, interpreted, thinned
from support.cuda_ragged import REFERENCE, moved
from support.paged import distance

from slotwise.compute.kernels.interface import RaggedBatch
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.model.loading import load_model

with interpreted():
    from slotwise.compute.kernels.cuda import sampling

BLOCK_SIZE, BLOCKS_A_ROW = 4, 8
SIZES = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 1024}


class Rows:
    """Prompts that take a step each time they are asked to, without an engine: blocks are dealt once."""

    def __init__(self, decoder: Decoder, prompts: list[list[int]]) -> None:
        self.tokens = [list(prompt) for prompt in prompts]
        self._decoder, self._computed = decoder, [0] * len(prompts)
        blocks = torch.randperm(len(prompts) * BLOCKS_A_ROW, generator=torch.Generator().manual_seed(1)).int()
        self._tables = blocks.view(len(prompts), BLOCKS_A_ROW)
        self._caches = [
            KERNELS.allocate_cache(blocks.numel(), BLOCK_SIZE, shape, torch.float32)
            for shape in decoder.layer_shapes]

    def step(self, counts: list[int]) -> None:
        """Compute so many tokens of each row; those that have no more known ones sample the next."""
        spans = [range(done, done + count) for done, count in zip(self._computed, counts, strict=True)]
        positions = torch.tensor([place for span in spans for place in span])
        row_of = torch.tensor([row for row, span in enumerate(spans) for _ in span])
        slots = self._tables[row_of, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = torch.tensor([0, *counts]).cumsum(0)
        done = [row for row, span in enumerate(spans) if span.stop == len(self.tokens[row])]
        columns = (
            torch.tensor([self.tokens[row][place] for row, span in enumerate(spans) for place in span]), positions,
            slots, starts.int(), torch.tensor([span.stop for span in spans]).int(), self._tables, starts[1:][done] - 1)
        batch = RaggedBatch(
            *(column.to(DEVICE) for column in columns), max(counts), max(span.stop for span in spans))
        logits = self._decoder.logits(self._decoder.hidden(batch, self._caches))
        nothing = torch.zeros(len(done), dtype=torch.int64, device=DEVICE)
        controls = torch.tensor([[0.0, 0, 1, 0]], device=DEVICE).repeat(len(done), 1)
        for row, token in zip(done, sampling.sample(logits, controls, nothing, nothing).tolist(), strict=True):
            self.tokens[row].append(token)
        self._computed = [span.stop for span in spans]


@pytest.mark.parametrize("family", thinned("mistral", "qwen3_moe", "qwen3", few=2))
@torch.inference_mode()
def test_greedy_tokens_are_transformers(family, tmp_path: Path):
    window = {"sliding_window": 6} if family == "mistral" else {}
    folder = checkpoints.make(family, tmp_path, **SIZES | window)
    prompts = checkpoints.prompts([1, 17], seed=3)
    expected = checkpoints.greedy(folder, prompts, 3)
    rows = Rows(load_model(folder, kernels=KERNELS, dtype="float32"), prompts)
    rows.step([1, 11])  # a prompt in chunks, beside a row that decodes
    rows.step([1, 6])
    while any(len(tokens) < len(prompt) + 3 for tokens, prompt in zip(rows.tokens, prompts, strict=True)):
        rows.step([1, 1])
    for tokens, prompt, continuation in zip(rows.tokens, prompts, expected, strict=True):
        assert tokens[len(prompt) :][:3] == continuation


def logits_of(folder: Path, kernels, batch: RaggedBatch) -> torch.Tensor:
    """Logits of one step over an empty cache."""
    decoder = load_model(folder, kernels=kernels, dtype="float32")
    caches = [kernels.allocate_cache(4, BLOCK_SIZE, shape, torch.float32) for shape in decoder.layer_shapes]
    return decoder.logits(decoder.hidden(batch, caches)).cpu()


@pytest.mark.parametrize(("name", "close"), [
    ("gptq 4, act-order", 1e-5), ("DeepSeek's FP8", 1e-5), ("MXFP4", 1e-5), ("W8A8", 0.1)])
@torch.inference_mode()
def test_a_quantized_checkpoint_gives_the_logits_of_its_weights(name, close, tmp_path: Path):
    """Where tokens are multiplied as they are, but for roundings."""
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    quantized.quantize(checkpoints.make("llama3", tmp_path / "dense", **sizes), tmp_path / "model",
                       quantized.KINDS[name]())
    assert distance_of_logits(tmp_path / "model") < close


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_packed_experts_give_the_logits_of_their_weights(family, tmp_path: Path):
    """Act-order of a checkpoint, another one for each expert; MXFP4 of a file, beside plain numbers."""
    sizes = SIZES | {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64, "decoder_sparse_step": 1}
    dense, model = checkpoints.make(family, tmp_path / "dense", **sizes), tmp_path / "model"
    if family == "gpt_oss":
        gguf_files.write(dense, model, lambda name: "MXFP4" if "_exps" in name else "F32")
    else:
        quantized.quantize(dense, model, quantized.KINDS["gptq 4, act-order"]())
    assert distance_of_logits(model) < 1e-5
    plain, packed = (load_model(path, kernels=KERNELS, dtype="float32").weight_bytes for path in (dense, model))
    assert packed < 0.75 * plain


def distance_of_logits(model: Path) -> float:
    """That of a step of five tokens by these kernels from the reference."""
    ids = torch.arange(5, 10)
    batch = RaggedBatch(ids, torch.arange(5), torch.arange(5), torch.tensor([0, 5]).int(), torch.tensor([5]).int(),
                        torch.tensor([[0, 1]]).int(), torch.arange(5), 5, 5)
    return distance(logits_of(model, KERNELS, moved(batch)), logits_of(model, REFERENCE, batch))
