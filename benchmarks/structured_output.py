"""What structured output costs: a step of 64 rows with and without a grammar in pairs, and 64 masks by themselves.

usage: python -m benchmarks.structured_output [--rounds 5] [--tokens 24] [--json FILE]      (needs the `dev` extra)

The model has SmolLM2-135M's shape with random weights; the vocabularies are random words, so that masks are as those of
a real tokenizer.  The grammar is an array of objects that does not end.  Rounds alternate which of the two runs first.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slotwise import LLM, SamplingParams, StructuredOutputsParams, grammars
from slotwise.bench.results import commit, environment, write_json
from slotwise.text.structured_output import json_schema

from .checkpoint import write

ROWS = 64
LARGE = 151_936
SCHEMA = {"type": "array", "minItems": 1000, "items": {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
                   "tags": {"type": "array", "items": {"type": "string"}}}}}


def words(seed: int) -> Iterator[str]:
    """Random words as a byte-level vocabulary writes them, each once."""
    draw = random.Random(seed)
    letters = string.ascii_letters + string.digits + '{}[]":,' * 2
    seen: set[str] = set()
    while True:
        word = draw.choice(("", "Ġ")) + "".join(draw.choices(letters, k=draw.randint(1, 8)))
        if word not in seen:
            seen.add(word)
            yield word


def vocabulary(size: int) -> dict[str, int]:
    """The end token, the 256 bytes, and words."""
    found = {"<|end|>": 0} | {piece: 1 + at for at, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for word in words(1):
        if len(found) == size:
            return found
        found.setdefault(word, len(found))
    raise AssertionError


def checkpoint(folder: Path) -> None:
    write(folder, "smollm2-135m")
    tokenizer = Tokenizer(models.BPE(vocabulary(49_152), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def step_seconds(llm: LLM, params: SamplingParams) -> float:
    """The median time of a step in which all rows decode."""
    found: list[float] = []
    engine: Any = llm._engine
    step = engine.step

    def timed() -> Any:
        record = step()
        if len(record.slots) == ROWS and max(record.counts) == 1:
            found.append((record.ended_ns - record.started_ns) * 1e-9)
        return record

    engine.step = timed
    try:
        llm.generate([{"prompt_token_ids": [1 + row] * 16} for row in range(ROWS)], params, use_tqdm=False)
    finally:
        engine.step = step
    return statistics.median(found)


def paired(rounds: int, tokens: int, temperature: float, llm: LLM) -> dict[str, Any]:
    """Seconds of a step with a grammar and without, and the ratio of each round."""
    constrained = SamplingParams(temperature=temperature, max_tokens=tokens, seed=1,
                                 structured_outputs=StructuredOutputsParams(json=SCHEMA))
    free = SamplingParams(temperature=temperature, max_tokens=tokens, seed=1, ignore_eos=True)
    pairs = []
    for number in range(rounds + 1):
        order = (constrained, free) if number % 2 else (free, constrained)
        taken = {id(params): step_seconds(llm, params) for params in order}
        pairs.append((taken[id(constrained)], taken[id(free)]))
    ratios = [one / other for one, other in pairs[1:]]  # the first round warms up
    return {"temperature": temperature, "step_ms": round(1e3 * statistics.median(one for one, _ in pairs[1:]), 2),
            "free_step_ms": round(1e3 * statistics.median(other for _, other in pairs[1:]), 2),
            "ratio": round(statistics.median(ratios), 4), "ratios": [round(ratio, 4) for ratio in ratios]}


def mask_seconds(steps: int) -> dict[str, Any]:
    """Milliseconds for 64 masks of a large vocabulary on one thread, along random outputs."""
    texts = [word.replace("Ġ", " ").encode() for word in vocabulary(LARGE)]
    tokenizer = grammars.tokenizer_of(texts, [0], [0], LARGE, lambda text: list(text.encode()))
    grammar = json_schema(SCHEMA, "json")
    matcher, objection = grammars.compiled(tokenizer, grammar.kind, grammar.text)
    assert not objection, objection
    matchers = [matcher.deep_copy() for _ in range(ROWS)]
    bits = np.zeros((ROWS, LARGE // 32), np.int32)
    draw, found = np.random.default_rng(0), []
    for _ in range(steps):
        began = time.perf_counter()
        for one, row in zip(matchers, bits, strict=True):
            one.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        found.append(time.perf_counter() - began)
        for one, row in zip(matchers, bits, strict=True):
            one.consume_token(int(draw.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")))))
    later = sorted(found[steps // 2 :])
    return {"vocabulary": LARGE, "rows": ROWS, "median_ms": round(1e3 * statistics.median(later), 2),
            "p90_ms": round(1e3 * later[int(0.9 * len(later))], 2), "first_ms": round(1e3 * found[0], 2),
            "worst_ms": round(1e3 * max(found), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder))
        llm = LLM(folder, dtype="bfloat16", max_num_seqs=ROWS, max_model_len=512, enable_prefix_caching=False,
                  max_num_batched_tokens=2048, max_stall_ms=0,
                  speculative_config={"method": "none"})
        rows = [paired(asked.rounds, asked.tokens, temperature, llm) for temperature in (0.0, 1.0)]
    found = {"environment": environment(), "commit": commit(), "steps": rows, "masks": mask_seconds(200)}
    print(json.dumps({name: found[name] for name in ("steps", "masks")}, indent=1))
    if asked.json is not None:
        write_json(asked.json, found)


if __name__ == "__main__":
    main()
