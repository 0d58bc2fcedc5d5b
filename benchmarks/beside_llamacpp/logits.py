"""Compares log-probabilities of one GGUF file on Slotwise and on llama.cpp's server, with the file's exact weights.

    python -m benchmarks.beside_llamacpp logits build/bin/llama-server FILE

The reference multiplies the dequantized weights in float32.  An engine's distance is the root mean square of what its
log-probabilities of the next token differ by, over the tokens that llama.cpp finds likeliest, as a share of the
standard deviation of the reference's over the vocabulary.  Prompts are random token ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import random

import aiohttp
import torch
from benchmarks.beside_llamacpp.speed import server
from benchmarks.commands import bar, parser_of
from benchmarks.peers.same_requests import VOCABULARY
from benchmarks.perplexity import BLOCK, as_batch
from torch import Tensor

from slotwise.compute.kernels.select import choose
from slotwise.compute.model.loading import load_model

PROMPTS, LENGTH, LIKELIEST = 8, 48, 500
WAYS = {"reference": ("reference", "float32"), "float32": ("cpu", "float32"), "bfloat16": ("cpu", "bfloat16")}


def here(file: str, device: str, dtype: str, prompts: list[list[int]]) -> Tensor:
    """Log-probabilities of the token after each prompt, `[prompts, vocabulary]`."""
    decoder = load_model(file, kernels=choose(device), dtype=dtype, max_positions=LENGTH)
    caches = [decoder.kernels.allocate_cache(PROMPTS + 1, BLOCK, shape, decoder.config.dtype)
              for shape in decoder.layer_shapes]
    logits = decoder.logits(decoder.hidden(as_batch(prompts), caches)).float()
    return torch.log_softmax(logits[LENGTH - 1 :: LENGTH], dim=-1)


async def of_llamacpp(base: str, prompts: list[list[int]]) -> list[dict[int, float]]:
    """The likeliest tokens after each prompt, and their log-probabilities."""
    found = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for prompt in bar(prompts, "prompts"):
            body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": LIKELIEST, "cache_prompt": False}
            async with session.post(f"{base}/completion", json=body) as reply:
                (first,) = (await reply.json())["completion_probabilities"]
            found.append({each["id"]: each["logprob"] for each in first["top_logprobs"]})
    return found


@torch.inference_mode()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("engine", help="the path of llama-server")
    parser.add_argument("file", help="a model in GGUF")
    asked = parser.parse_args()
    draw = random.Random(0)
    prompts = [[draw.randrange(10, VOCABULARY) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    asked.threads, asked.quantization, asked.log = os.cpu_count() or 1, "none", os.devnull
    with server(asked) as (base, _):
        theirs = asyncio.run(of_llamacpp(base, prompts))
    ids = torch.tensor([list(each) for each in theirs])
    ours = {name: here(asked.file, *way, prompts) for name, way in WAYS.items()}
    exact = ours.pop("reference")
    found = {"llama.cpp": torch.tensor([list(each.values()) for each in theirs])} | {
        name: numbers.gather(1, ids) for name, numbers in ours.items()}
    shares = {name: float((numbers - exact.gather(1, ids)).square().mean().sqrt() / exact.std())
              for name, numbers in found.items()}
    print(json.dumps({"file": os.path.basename(asked.file)} | {name: round(each, 4) for name, each in shares.items()}))
