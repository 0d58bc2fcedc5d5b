"""What structured output costs: a step of 64 rows with and without a grammar in pairs, and 64 masks by themselves.

usage: python -m benchmarks.overheads structured_output [--rounds 5] [--tokens 24] [--json FILE]   (`dev` extra)
       python -m benchmarks.overheads structured_output --forced builtin [CHECKPOINT ...] [--pairs 5] [--json FILE]

The model has SmolLM2-135M's shape with random weights; the vocabularies are random words, so that masks are as those of
a real tokenizer.  The grammar is an array of objects that does not end.  Rounds alternate which of the two runs first.

With `--forced` one stream writes records with five long keys, sampled at temperature 1 with the pair's seeds: with the
tokens that the grammar forces as drafts, and without drafts.  Both must write the same tokens.  A ratio above 1 means
that drafts are faster, and its interval is that of the mean of the logarithms, by resampling.
"""

from __future__ import annotations

import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.checkpoint import write
from benchmarks.commands import bar, parser_of
from benchmarks.pairs import interval
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slotwise import LLM, SamplingParams, StructuredOutputsParams, builtin, grammar_compiler
from slotwise.measure.bench.results import commit, environment, write_json
from slotwise.text.structured_output import json_schema

ROWS = 64
LARGE = 151_936
SCHEMA = {"type": "array", "minItems": 1000, "items": {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
                   "tags": {"type": "array", "items": {"type": "string"}}}}}


RECORDS = {"type": "array", "minItems": 1000, "items": {
    "type": "object", "additionalProperties": False,
    "required": ["customer_identifier", "shipping_postcode", "number_of_parcels", "is_insured", "delivery_status"],
    "properties": {"customer_identifier": {"type": "integer", "minimum": 100, "maximum": 999},
                   "shipping_postcode": {"type": "integer", "minimum": 10_000, "maximum": 99_999},
                   "number_of_parcels": {"type": "integer", "minimum": 1, "maximum": 9},
                   "is_insured": {"type": "boolean"},
                   "delivery_status": {"enum": ["ordered", "packed", "sent", "arrived"]}}}}
RECORD_TOKENS = 320


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
        if len(record.plan.slots) == ROWS and max(record.plan.counts) == 1:
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
    for number in bar(range(rounds + 1), "rounds"):
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
    tokenizer = grammar_compiler.tokenizer_of(texts, [0], [0], LARGE, lambda text: list(text.encode()))
    grammar = json_schema(SCHEMA, "json")
    matcher, objection = grammar_compiler.compiled(tokenizer, grammar.kind, grammar.text)
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


class Written(NamedTuple):
    """The output of one stream."""

    tokens: list[int]
    seconds: float
    drafts: int
    right: int


def written(llm: LLM, grammar: StructuredOutputsParams, seeds: Iterable[int]) -> Written:
    """One stream writes records, an output for each seed."""
    engine: Any = llm._engine
    step, records, tokens = engine.step, [], list[int]()

    def kept() -> Any:
        records.append(step())
        return records[-1]

    engine.step = kept
    began = time.perf_counter()
    try:
        for seed in seeds:
            params = SamplingParams(temperature=1.0, max_tokens=RECORD_TOKENS, seed=seed, structured_outputs=grammar)
            (output,) = llm.generate("The deliveries of today:\n", params, use_tqdm=False)
            tokens += output.outputs[0].token_ids
    finally:
        engine.step = step
    seconds = time.perf_counter() - began
    drafted = [(drafts, came) for one in records for drafts, came in zip(one.plan.drafts, one.tokens, strict=False)]
    return Written(tokens, seconds, sum(len(drafts) for drafts, _ in drafted),
                   sum(len(came) - 1 for drafts, came in drafted if drafts and came))


def forced(llms: dict[str, LLM], pairs: int, outputs: int, *, compact: bool) -> dict[str, Any]:
    """Tokens per second with what the grammar forces as drafts and without drafts, in interleaved pairs."""
    grammar = StructuredOutputsParams(json=RECORDS, disable_any_whitespace=compact)
    found: dict[str, list[Written]] = {name: [] for name in llms}
    for pair in bar(range(pairs + 1), "pairs"):
        for name in list(llms)[:: 1 if pair % 2 else -1]:
            found[name].append(written(llms[name], grammar, range(pair * outputs, (pair + 1) * outputs)))
        assert found["on"][pair].tokens == found["off"][pair].tokens, "drafts have changed the output"
    rates = {name: [len(one.tokens) / one.seconds for one in runs[1:]] for name, runs in found.items()}  # 0 warms up
    on = found["on"][1:]
    return {"white_space": "none" if compact else "default",
            **{name: [round(rate, 1) for rate in some] for name, some in rates.items()},
            "ratio": interval([one / other for one, other in zip(rates["on"], rates["off"], strict=True)]),
            "tokens": sum(len(one.tokens) for one in on), "drafts": sum(one.drafts for one in on),
            "right": sum(one.right for one in on)}


def forced_rows(models: list[str], pairs: int) -> list[dict[str, Any]]:
    """The figures of each model, with and without white space."""
    rows = []
    for model in models:
        path = str(builtin.path()) if model == "builtin" else model
        llms = {name: LLM(path, dtype="bfloat16", max_num_seqs=4, max_model_len=512, enable_prefix_caching=False,
                          speculative_config={"method": method})
                for name, method in (("off", "none"), ("on", "prediction"))}
        outputs = 4 if model == "builtin" else 1  # of each run: a run must be long enough to be timed
        rows += [{"model": Path(path).name, "dtype": "bfloat16", **forced(llms, pairs, outputs, compact=compact)}
                 for compact in (True, False)]
    return rows


def costs(rounds: int, tokens: int) -> dict[str, Any]:
    """Steps with and without a grammar, and masks by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder))
        llm = LLM(folder, dtype="bfloat16", max_num_seqs=ROWS, max_model_len=512, enable_prefix_caching=False,
                  max_num_batched_tokens=2048, max_stall_ms=0,
                  speculative_config={"method": "none"})
        rows = [paired(rounds, tokens, temperature, llm) for temperature in (0.0, 1.0)]
    return {"steps": rows, "masks": mask_seconds(200)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, in each of which both run")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each row")
    parser.add_argument("--forced", nargs="+", metavar="MODEL", help="folders of checkpoints; or builtin")
    parser.add_argument("--pairs", type=int, default=5, help="of each row of --forced")
    parser.add_argument("--json", type=Path, help="write the figures here, beside those that are there")
    asked = parser.parse_args()
    found = {"forced": forced_rows(asked.forced, asked.pairs)} if asked.forced else costs(asked.rounds, asked.tokens)
    print(json.dumps(found, indent=1))
    if asked.json is not None:
        kept = json.loads(asked.json.read_text()) if asked.json.exists() else {}
        measured = {"environment": environment(), "commit": commit()}
        more = {"forced": measured | {"rows": found["forced"]}} if asked.forced else measured | found
        write_json(asked.json, kept | more)
