"""Log-probabilities of whole prompts against transformers', however the prompts are computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import checkpoints
from support.records import cached_of
from support.toy import Proposing

import slotwise
from slotwise import LLM
from slotwise.compose.engine_builder import build_engine
from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepRecord, TokenLogprobs
from slotwise.core.request import Request, RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.offline.outputs import Logprob

TOP = 3
LENGTHS = [1, 2, 40, 75, 23, 60]
Entries = dict[str, dict[int, TokenLogprobs]]  # by request and position of the token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("qwen3", tmp_path_factory.mktemp("qwen3"), tokenizer=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return checkpoints.prompts(LENGTHS, seed=5)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Callable[[list[int]], torch.Tensor]:
    """transformers' log-softmax at every position of a prompt: `[tokens, vocab]`."""
    model = checkpoints.reference_model(folder, "float32")

    def logprobs(prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode(), checkpoints.one_thread():
            return model(torch.tensor([prompt])).logits[0].log_softmax(-1)

    return logprobs


def engine(folder: Path, **settings: object) -> Engine:
    built, _ = build_engine(EngineConfig.of(**{
        "model": str(folder), "dtype": "float32", "block_size": 16, "kv_cache_memory": 16 << 20, "max_model_len": 128,
        "max_num_seqs": 8} | settings))
    return built


def add(name: str, prompt: list[int], num_top: int | None = TOP, max_tokens: int = 4) -> Add:
    params = SamplingSpec(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=num_top)
    return Add(name, RequestSpec(prompt, params))


def run(subject: Engine, adds: list[Add]) -> tuple[Entries, list[StepRecord]]:
    for command in adds:
        subject.handle(command)
    entries: Entries = {command.request_id: {} for command in adds}
    records = []
    while subject.has_work:
        record = subject.step()
        records.append(record)
        assert not record.outcome.failure and not any(end.message for end in record.ended), record
        for name, start, row in zip(record.plan.request_ids, record.plan.starts, record.result.prompt_logprobs,
                                    strict=False):
            entries[name] |= {start + 1 + j: entry for j, entry in enumerate(row)}
    return entries, records


def check(found: dict[int, TokenLogprobs], prompt: list[int], logprobs: torch.Tensor, num_top: int = TOP) -> None:
    """Every token of the prompt but the first has its entry, and there is no other."""
    assert sorted(found) == list(range(1, len(prompt)))
    for position, entry in found.items():
        expected, token = logprobs[position - 1], prompt[position]
        assert entry.logprob == pytest.approx(expected[token].item(), abs=1e-4)
        least, most = (int((expected > expected[token] + margin).sum()) for margin in (1e-4, -1e-4))
        assert 1 + least <= entry.rank <= most
        top = expected.topk(num_top)
        assert entry.top_ids == tuple(top.indices.tolist())
        assert entry.top_logprobs == pytest.approx(tuple(top.values.tolist()), abs=1e-4)


def tokens_of(records: list[StepRecord]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record in records:
        for name, tokens in zip(record.plan.request_ids, record.tokens, strict=True):
            found.setdefault(name, []).extend(tokens)
    return found


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_alone_and_whole(device, overlap, folder, prompts, exact):
    subject = engine(folder, device=device, overlap=overlap)
    for prompt in prompts:
        entries, _ = run(subject, [add("r", prompt)])
        check(entries["r"], prompt, exact(prompt))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_in_chunks_and_in_company(chunk, folder, prompts, exact):
    """Beside requests that want none, and whose tokens stay what they are without."""
    adds = [add(f"r{i}", prompt, TOP if i % 2 else None) for i, prompt in enumerate(prompts)]
    without = [add(f"r{i}", prompt, None) for i, prompt in enumerate(prompts)]
    subject = engine(folder, long_prefill_token_threshold=chunk)
    entries, records = run(subject, adds)
    for i, prompt in enumerate(prompts):
        if i % 2:
            check(entries[f"r{i}"], prompt, exact(prompt))
        else:
            assert not entries[f"r{i}"]
    assert tokens_of(records) == tokens_of(run(engine(folder), without)[1])


class Knowing(Proposing):
    """Proposes what requests are about to sample, every third token wrong."""

    def __init__(self, outputs: dict[str, list[int]]) -> None:
        self._outputs = outputs

    def guess(self, request: Request, most: int) -> list[int]:
        done = request.num_output
        to_come = enumerate(self._outputs[request.request_id][done : done + min(most, 3)], done)
        return [token + 1 if place % 3 == 2 else token for place, token in to_come]


def test_beside_rows_with_drafts(folder, prompts, exact):
    adds = [add(f"r{i}", prompt, TOP if i % 2 else None, max_tokens=12) for i, prompt in enumerate(prompts)]
    settings = {"overlap": 0, "long_prefill_token_threshold": 7}
    expected = tokens_of(run(engine(folder, **settings), adds)[1])
    subject = engine(folder, **settings)
    subject._scheduler._drafting.proposer = Knowing(expected)
    entries, records = run(subject, adds)
    assert tokens_of(records) == expected
    for i in range(1, len(prompts), 2):
        check(entries[f"r{i}"], prompts[i], exact(prompts[i]))
    assert any(record.plan.drafts and any(record.plan.drafts) and any(record.result.prompt_logprobs)
               for record in records), (
        "no step had both")


@pytest.mark.parametrize("discipline", [{"batching": "static", "batch_size": 3}, {"prefill": "inline"}])
def test_under_other_disciplines(discipline, folder, prompts, exact):
    entries, _ = run(engine(folder, **discipline), [add(f"r{i}", prompt) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        check(entries[f"r{i}"], prompt, exact(prompt))


@pytest.mark.parametrize("overlap", [0, 1])
def test_across_preemptions(overlap, folder, exact):
    asked = checkpoints.prompts([60, 40, 50, 45, 55, 38, 62, 44], seed=9)
    tokens = 13 * 16 * 2 * 3 * 2 * 64 * 4  # 13 blocks of 16, keys and values, layers, heads of 64 float32
    subject = engine(folder, kv_cache_memory=tokens, max_num_batched_tokens=48, max_model_len=100, overlap=overlap,
                     long_prefill_token_threshold=9)
    entries, records = run(subject, [add(f"r{i}", prompt, max_tokens=30) for i, prompt in enumerate(asked)])
    assert sum(len(record.preempted) for record in records) >= 3, "the cache was not small enough to show anything"
    for i, prompt in enumerate(asked):
        check(entries[f"r{i}"], prompt, exact(prompt))


def test_they_publish_to_the_prefix_cache_and_do_not_read_from_it(folder, prompts, exact):
    subject, [prompt] = engine(folder), checkpoints.prompts([80], seed=2)
    cached = {}
    for name, num_top in (("first", TOP), ("second", TOP), ("third", None)):
        entries, records = run(subject, [add(name, prompt, num_top)])
        cached[name] = sum(sum(cached_of(record)) for record in records)
        if num_top is not None:
            check(entries[name], prompt, exact(prompt))
    assert cached == {"first": 0, "second": 0, "third": 64}


def test_few_rows_of_logits_exist_at_a_time(folder, exact, monkeypatch):
    from slotwise.compute.model.decoder import Decoder

    sizes, logits = [], Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: sizes.append(len(hidden)) or logits(self, hidden))
    [prompt] = checkpoints.prompts([1500], seed=4)
    subject = engine(folder, max_model_len=2048, max_num_batched_tokens=1024)
    sizes.clear()
    entries, _ = run(subject, [add("r", prompt, 0)])
    check(entries["r"], prompt, exact(prompt), num_top=0)
    assert max(sizes) <= 64 and sum(sizes) >= 1499


def joined(token: int, entries: dict[int, Logprob]) -> TokenLogprobs:
    """What the engine said of a token, from what `LLM` makes of it."""
    own = entries[token]
    top = sorted((entry.rank, one) for one, entry in entries.items())[:TOP]
    return TokenLogprobs(own.logprob, own.rank, tuple(one for _, one in top),
                         tuple(entries[one].logprob for _, one in top))


def test_offline(folder, prompts, exact):
    llm = LLM(str(folder), dtype="float32", kv_cache_memory=16 << 20, max_model_len=128)
    params = slotwise.SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=TOP, n=2)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        first, *entries = output.prompt_logprobs
        assert first is None and len(output.outputs) == 2
        check({place: joined(token, at) for place, (token, at) in enumerate(zip(prompt[1:], entries, strict=True), 1)},
              prompt, exact(prompt))
    [plain] = llm.generate([{"prompt_token_ids": prompts[2]}], slotwise.SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain.prompt_logprobs is None


def test_the_sum_is_the_probability_of_the_prompt(folder, exact):
    """Of a chunk boundary at every position none is counted twice or lost."""
    [prompt] = checkpoints.prompts([33], seed=6)
    expected = sum(exact(prompt)[i, token].item() for i, token in enumerate(prompt[1:]))
    for chunk in (1, 5, 32, 33):
        entries, _ = run(engine(folder, long_prefill_token_threshold=chunk), [add("r", prompt, 0)])
        assert math.fsum(entry.logprob for entry in entries["r"].values()) == pytest.approx(expected, abs=1e-3)
