"""Completes held-out signatures and counts how many parse and how many end by themselves."""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import textwrap
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Completion:
    """What the model wrote after `signature`; `tokens` counts the end token, which `ended` says was reached."""

    signature: str
    text: str
    tokens: int
    ended: bool

    @property
    def parses(self) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an odd escape in a string is a warning, not an error
                ast.parse(textwrap.dedent(self.signature + self.text))
        except (SyntaxError, ValueError):
            return False
        return True


@torch.inference_mode()
def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, signatures: list[str], temperature: float, limit: int
) -> list[Completion]:
    """One batch, padded on the left, of at most `limit` new tokens each."""
    inputs = tokenizer(signatures, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=True,
        temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=limit,
    )
    completions = []
    for signature, row in zip(signatures, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        ended = tokenizer.eos_token_id in row
        tokens = row[: row.index(tokenizer.eos_token_id)] if ended else row
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        completions.append(Completion(signature, text, len(tokens) + ended, ended))
    return completions


def summary(completions: list[Completion]) -> dict[str, float]:
    lengths = [completion.tokens for completion in completions]
    return {
        "count": len(completions),
        "parse_rate": round(statistics.mean(completion.parses for completion in completions), 4),
        "end_rate": round(statistics.mean(completion.ended for completion in completions), 4),
        "distinct_texts": len({completion.text for completion in completions}),
        "tokens_mean": round(statistics.mean(lengths), 1),
        "tokens_deciles": [round(cut) for cut in statistics.quantiles(lengths, n=10)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE.parent / "src" / "slotwise" / "builtin")
    parser.add_argument("--signatures", type=Path, default=HERE / "heldout.json")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--limit", type=int, default=384, help="new tokens at most")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    signatures = [entry["signature"] for entry in json.loads(arguments.signatures.read_text())["signatures"]]
    completions, started = [], time.monotonic()
    for start in tqdm(range(0, len(signatures), arguments.batch), desc="completing", unit="batch"):
        batch = signatures[start : start + arguments.batch]
        completions += complete(model, tokenizer, batch, arguments.temperature, arguments.limit)
    settings = {name: getattr(arguments, name) for name in ("temperature", "limit", "batch", "seed", "dtype")}
    result = {**settings, **summary(completions), "seconds": round(time.monotonic() - started)}
    print(json.dumps(result, indent=1))
    rows = [{**asdict(completion), "parses": completion.parses} for completion in completions]
    arguments.out.write_text(json.dumps({**result, "completions": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
