"""Measures what features gain a real model on real requests, with a feature and without it in turn.

    python -m benchmarks.front_door features --json benchmarks/results/real-features-cpu.json

The model is SmolLM2-135M-Instruct (Q4_1), the requests are those of `slotwise bench --dataset-name chats`, answers are
greedy and end where the model ends them, with at most 96 tokens.  Rounds alternate which of the two runs first.

    drafts        --speculative-config {"method": "suffix"}; edits ask for a piece of code with type annotations
    prefix cache  --enable-prefix-caching, emptied before each run; documents and code begin several prompts
    grammar       a JSON schema for each answer, compared with the same prompts without one

Drafts and cached prefixes must leave every answer as it is; the benchmark fails where they do not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.commands import bar, parser_of
from benchmarks.pairs import interval

from slotwise import LLM, SamplingParams, StructuredOutputsParams
from slotwise.compute.model.model_registry import find
from slotwise.measure.bench.results import environment, write_json
from slotwise.measure.workload import chats
from slotwise.measure.workload.workloads import Conversation

MODEL = "smollm2"
MAX_TOKENS = 96
SUFFIX = {"method": "suffix"}
EDIT = "Rewrite this code with type annotations."  # the beginning of a task of chats.toml
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["topic", "language", "answer"],
    "properties": {"topic": {"type": "string", "maxLength": 40}, "language": {"enum": ["English", "Python", "other"]},
                   "answer": {"type": "string", "maxLength": 200}}}


class Case(NamedTuple):
    """A feature, and the requests with which it is measured."""

    feature: str
    requests: str
    streams: int
    conversations: Sequence[Conversation]
    off: dict[str, Any]  # settings without the feature
    on: dict[str, Any]
    structured: StructuredOutputsParams | None = None  # of the answers with the feature


class Figures(NamedTuple):
    rate: float  # output tokens per second
    first: float  # mean seconds to the first token
    found: int  # prompt tokens in the cache
    prompts: int  # tokens
    texts: list[str]


def cases() -> Iterator[Case]:
    everything = chats.draw(64, 0)
    edits = [one for one in dict.fromkeys(chats.draw(400, 0)) if one[0][1].startswith(EDIT)]
    shared = [one for one in everything if len(one[0][1]) > 400]  # code and documents
    plain: dict[str, Any] = {"enable_prefix_caching": False}
    drafts = plain | {"speculative_config": SUFFIX}
    yield Case("drafts", "edits", 1, edits, plain, drafts)
    yield Case("drafts", "chats", 1, everything[:10], plain, drafts)
    yield Case("drafts", "chats", 16, everything, plain, drafts)
    yield Case("prefix cache", "chats", 16, everything, plain, {"enable_prefix_caching": True})
    yield Case("prefix cache", "code and documents", 4, shared, plain, {"enable_prefix_caching": True})
    yield Case("grammar", "chats", 16, everything[:32], plain, plain, StructuredOutputsParams(json=SCHEMA))


def run(llm: LLM, case: Case, structured: StructuredOutputsParams | None) -> Figures:
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_outputs=structured)
    messages = [[{"role": role, "content": text} for role, text in one] for one in case.conversations]
    began = time.perf_counter()
    outputs = llm.chat(messages, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    firsts = [output.metrics.first_token_latency for output in outputs]
    return Figures(
        tokens / seconds, sum(firsts) / len(firsts), sum(output.num_cached_tokens or 0 for output in outputs),
        sum(len(output.prompt_token_ids) for output in outputs), [output.outputs[0].text for output in outputs])


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Raises AssertionError where a feature that must not changes an answer."""
    model = str(find(MODEL).path)
    common: dict[str, Any] = {"max_num_seqs": case.streams, "max_model_len": 2048}
    engines = {"off": LLM(model, **common | case.off), "on": LLM(model, **common | case.on)}
    structured: dict[str, StructuredOutputsParams | None] = {"off": None, "on": case.structured}
    for which, llm in engines.items():
        run(llm, case._replace(conversations=case.conversations[:2]), structured[which])
    found: dict[str, list[Figures]] = {"off": [], "on": []}
    for number in range(rounds):
        for which in list(engines)[:: 1 if number % 2 else -1]:
            found[which].append(run(engines[which], case, structured[which]))
    if case.structured is None:
        assert all(one.texts == found["off"][0].texts for each in found.values() for one in each), "other answers"
    else:
        for text in found["on"][0].texts:
            _check_begins(text)
    rates = {which: [one.rate for one in each] for which, each in found.items()}
    last = found["on"][-1]
    return {
        "feature": case.feature, "requests": case.requests, "streams": case.streams,
        "num_requests": len(case.conversations), "prompt_tokens": last.prompts, "cached_tokens": last.found,
        "off": [round(rate, 1) for rate in rates["off"]], "on": [round(rate, 1) for rate in rates["on"]],
        "first_off": [round(one.first, 4) for one in found["off"]],
        "first_on": [round(one.first, 4) for one in found["on"]],
        "ratio": interval([on / off for on, off in zip(rates["on"], rates["off"], strict=True)])}


def _check_begins(text: str) -> None:
    """An answer of the schema, complete or cut at the most tokens."""
    assert text.lstrip().startswith("{"), f"not an answer of the schema: {text!r}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="pairs of runs")
    parser.add_argument("--only", nargs="+", metavar="FEATURE", help="which features")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    rows = []
    for case in bar([one for one in cases() if not asked.only or one.feature in asked.only], "cases"):
        rows.append(measure(case, asked.rounds))
        print(json.dumps(rows[-1]), flush=True)
        if asked.json:
            write_json(asked.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
