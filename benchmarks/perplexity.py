"""Perplexity of the built-in model on functions it never saw, with each kind of weights.

The text is what `training/corpus.py` held out: functions of the standard library's modules that were left out of the
training, here of the library proper, its tests excluded.  It is computed as in serving: the same decoder and kernels,
over a paged cache, many functions a step.

    python benchmarks/perplexity.py --documents 300
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from slotwise import builtin
from slotwise.kernels.base import RaggedBatch
from slotwise.kernels.select import choose
from slotwise.model.decoder import Decoder
from slotwise.model.load import load_model
from slotwise.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parents[1] / "training"))
from corpus import library_sample, read_documents, split, standard_library

WEIGHTS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"), ("float32", "int8"),
           ("float32", "int4"))  # dtype, quantization
BLOCK = 64  # tokens
STEP = 512  # tokens


def held_out(count: int) -> list[list[int]]:
    """Token ids of `count` documents, end token included."""
    tokenizer = Tokenizer.load(builtin.path())
    _, documents = split(read_documents(standard_library()))
    return [[*tokenizer.encode(document.text), 1] for document in library_sample(documents, count, seed=2)]


def steps(texts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Texts gathered to steps of about `STEP` tokens."""
    gathered: list[list[int]] = []
    for text in texts:
        if gathered and sum(map(len, gathered)) + len(text) > STEP:
            yield gathered
            gathered = []
        gathered.append(text)
    yield gathered


def as_batch(texts: list[list[int]]) -> RaggedBatch:
    """Whole texts as rows, each with blocks of its own; every position's logits are wanted."""
    lengths = torch.tensor([len(text) for text in texts])
    blocks = -(-lengths // BLOCK)
    firsts = blocks.cumsum(0) - blocks
    width = int(blocks.max())
    tables = (firsts[:, None] + torch.arange(width)).clamp_max(int(blocks.sum()) - 1)
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    starts = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    return RaggedBatch(
        token_ids=torch.tensor([token for text in texts for token in text]), positions=positions,
        slot_mapping=positions + firsts.repeat_interleave(lengths) * BLOCK, query_starts=starts.int(),
        context_lens=lengths.int(), block_tables=tables.int(), sample_at=torch.arange(int(starts[-1])),
        max_query_len=int(lengths.max()), max_context_len=int(lengths.max()))


def loss(decoder: Decoder, texts: list[list[int]]) -> tuple[float, int]:
    """Nats over all tokens that follow another, and how many these are."""
    longest = max(map(len, texts))
    num_blocks = (STEP + longest) // BLOCK + STEP
    caches = [decoder.kernels.allocate_cache(num_blocks, BLOCK, shape, decoder.config.dtype)
              for shape in decoder.attention_shapes]
    nats, count = 0.0, 0
    for gathered in steps(texts):
        batch = as_batch(gathered)
        logits: Tensor = decoder.logits(decoder.hidden(batch, caches)).float()
        follows = batch.positions[1:] > 0
        taken = torch.log_softmax(logits[:-1], dim=-1).gather(1, batch.token_ids[1:, None])[:, 0]
        nats -= float(taken[follows].double().sum())
        count += int(follows.sum())
    return nats, count


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=300)
    texts = held_out(parser.parse_args().documents)
    print(f"{len(texts)} functions\n{'weights':20}{'tokens':>9}{'perplexity':>12}{'over float32':>14}{'seconds':>9}")
    exact = 0.0
    for dtype, quantization in WEIGHTS:
        decoder = load_model(builtin.path(), kernels=choose("cpu", quantization), dtype=dtype)
        began = time.perf_counter()
        nats, count = loss(decoder, texts)
        perplexity = math.exp(nats / count)
        exact = exact or perplexity
        name = dtype if quantization == "none" else f"{quantization}, {dtype}"
        print(f"{name:20}{count:9}{perplexity:12.4f}{perplexity / exact - 1:14.2%}{time.perf_counter() - began:9.1f}",
              flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
