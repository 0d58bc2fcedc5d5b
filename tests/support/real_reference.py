"""Writes tests/real_weights/reference.json: what transformers computes of the real model in float32.

    PYTHONPATH=.:tests python -m support.real_reference

A continuation ends before the first token that is ahead of the next one by less than a `MARGIN`: there processors may
round differently, and either token is right.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from support.checkpoints import reference_model
from support.real_weights import CHATS, OUTPUT, REFERENCE, SCORED, SLICES, checkpoint, find, read_texts, slice_of

MARGIN = 0.01  # of logits
SHIFTS = 8  # tokens by which a slice may begin later, to have no tie
LEAST = 8  # tokens of a continuation, unless the model ends it
FACTOR = 1.01


def continuation(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Greedy tokens, the end token among them, and the least that one of them was ahead by."""
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=OUTPUT, output_logits=True,
                         return_dict_in_generate=True)
    tokens = out.sequences[0, len(prompt) :].tolist()
    best, second = torch.cat(out.logits).topk(2).values.T
    margins = (best - second).tolist()
    tie = next((at for at, margin in enumerate(margins) if margin < MARGIN), len(tokens))
    return tokens[:tie], min(margins[:tie], default=0.0)


def clear(model: Any, prompts: list[list[int]]) -> tuple[int, list[int], float]:
    """The first of these prompts whose continuation is long enough: its place, and what `continuation` says of it."""
    for place, prompt in enumerate(prompts):
        tokens, margin = continuation(model, prompt)
        if len(tokens) >= LEAST or tokens[-1:] == [model.config.eos_token_id]:
            return place, tokens, margin
    raise SystemExit(f"a prompt of {len(prompts[0])} tokens has a tie within {LEAST} tokens: choose another one")


def logprobs(model: Any, texts: list[list[int]]) -> torch.Tensor:
    """The log-probabilities of every token but the first of texts of one length, `[texts, length - 1]`."""
    given = torch.tensor(texts)
    return model(given).logits[:, :-1].double().log_softmax(-1).gather(2, given[:, 1:, None])[:, :, 0]


def weakest(model: Any, exact: torch.Tensor) -> dict[str, tuple[str, float]]:
    """The tensor of each kind that changes the log-probabilities least when it is multiplied by `FACTOR`.

    With it stands by how much the one changes most that changes most.
    """
    found: dict[str, tuple[str, float]] = {}
    for name, tensor in tqdm(list(model.named_parameters()), "tensors"):
        before = tensor.clone()
        tensor.mul_(FACTOR)
        change = float((logprobs(model, [*map(slice_of, SCORED)]) - exact).abs().max())
        tensor.copy_(before)
        kind = re.sub(r"\.\d+\.", ".", name)
        found[kind] = min(found.get(kind, (name, math.inf)), (name, round(change, 5)), key=lambda one: one[1])
    return found


@torch.inference_mode()
def made(file: Path, folder: Path) -> dict[str, Any]:
    """The content of the reference; `folder` receives the checkpoint."""
    model = reference_model(checkpoint(file, folder), "float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chats = {name: tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
             for name, chat in CHATS.items()}
    found = [clear(model, [prompt])[1:] for prompt in chats.values()]
    slices = []
    for name, first, number in tqdm(SLICES, "slices"):
        later = [(name, first + shift, number) for shift in range(SHIFTS)]
        shift, *more = clear(model, [slice_of(one) for one in later])
        slices.append(later[shift])
        found.append(more)
    scored = logprobs(model, [*map(slice_of, SCORED)])
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {
        "model": file.name, "sha256": digest, "transformers": transformers.__version__, "torch": torch.__version__,
        "chats": chats, "slices": slices, "continuations": [tokens for tokens, _ in found],
        "least_margin": round(min(margin for _, margin in found), 4),
        "logprobs": [[round(value, 6) for value in row] for row in scored.tolist()],
        "weakest": weakest(model, scored),
        "perplexity": round(float(logprobs(model, read_texts()).mean().neg().exp()), 4)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        content = made(find(), Path(temporary) / "checkpoint")
    REFERENCE.write_text(json.dumps(content, separators=(",", ":")).replace('],"', '],\n"') + "\n")
