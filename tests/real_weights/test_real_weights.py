"""SmolLM2-135M-Instruct with its published weights, against transformers and against what was measured.

Made weights show that two computations agree; published ones show also how much a format costs, and whether an answer
can be read.  Everything stands in one file: its process builds the checkpoint once.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from benchmarks.real_texts import documents
from support.cache_misses import BLOCK, NUM_BLOCKS, OPTIONS, check_each_cause
from support.drafted import play, slow_steps
from support.live import serving
from support.ragged import Driver
from support.real_weights import (
    CHATS,
    FUNCTION,
    OUTPUT,
    SCORED,
    checkpoint,
    find,
    read_texts,
    reference,
    slice_of,
)
from tokenizers import Tokenizer as Independent

from slotwise import LLM, SamplingParams
from slotwise.compose.engine_builder import Loaded, load
from slotwise.compute.kernels.cpu.products import quantize
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model import calibration
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.layers.rank_weights import NO_CUTS
from slotwise.compute.model.loading import describe
from slotwise.compute.model.stored_tensors import Cuts
from slotwise.compute.model.weights import CheckpointWeights
from slotwise.core.params import SamplingSpec
from slotwise.core.record import TokenLogprobs
from slotwise.core.request import RequestSpec
from slotwise.core.speculation.proposer import DraftProposer
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.engine.config import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.offline.sampling_params import StructuredOutputsParams
from slotwise.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.real_weights, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
ROUNDING = 5e-4  # nats; two computations in float32 differ by less, and a tensor multiplied by 1.01 shows more
FACTOR = 1.01


@pytest.fixture(scope="module")
def file() -> Path:
    found = find()
    with found.open("rb") as content:
        assert hashlib.file_digest(content, "sha256").hexdigest() == reference()["sha256"]
    return found


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = checkpoint(file, tmp_path_factory.mktemp("smollm2") / "checkpoint")
    yield made
    shutil.rmtree(made)  # pytest would keep those of three runs


@pytest.fixture(scope="module")
def exact(folder: Path) -> Loaded:
    return load(EngineConfig.of(model=str(folder), dtype="float32"))


@pytest.fixture(scope="module")
def stored(file: Path) -> LLM:
    """The file as it is served: its blocks are multiplied as they are stored."""
    return LLM(str(file), max_num_seqs=12, kv_cache_memory=256 << 20)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [*reference()["chats"].values(), *map(slice_of, reference()["slices"])]


def engine(loaded: Loaded, folder: Path, **settings: object) -> Engine:
    made, _ = loaded.engine(EngineConfig.of(**{
        "model": str(folder), "dtype": "float32", "max_num_seqs": 32, "kv_cache_memory": 512 << 20,
        "max_stall_ms": 0.0} | settings))
    return made


def prompt_logprobs(subject: Engine, texts: list[list[int]]) -> list[list[float]]:
    """The log-probability of each token but the first, by text."""
    return [[entry.logprob for entry in row] for row in prompt_entries(subject, texts, 0)]


def prompt_entries(subject: Engine, texts: list[list[int]], alternatives: int) -> list[list[TokenLogprobs]]:
    """Of each token but the first, by text, with the most probable tokens at its place."""
    params = SamplingSpec(temperature=0, max_tokens=1, prompt_logprobs=alternatives)
    found: list[list[TokenLogprobs]] = [[] for _ in texts]
    for number, text in enumerate(texts):
        subject.handle(Add(f"r{number}", RequestSpec(text, params)))
    while subject.has_work:
        record = subject.step()
        assert not any(end.message for end in record.ended), record.ended
        for name, row in zip(record.plan.request_ids, record.result.prompt_logprobs, strict=False):
            found[int(name[1:])] += row
    assert [len(row) + 1 for row in found] == [len(text) for text in texts]
    return found


# -- text --------------------------------------------------------------------------------------------------------------


def test_the_tokenizer_is_that_of_independent_code(file: Path, folder: Path) -> None:
    ours, independent = Tokenizer.load(file), Independent.from_file(str(folder / "tokenizer.json"))
    texts = written(ours, 1_000) + drawn(1_000)
    assert len(set(texts)) == 2_000
    expected = independent.encode_batch(texts, add_special_tokens=False)
    for text, encoding in zip(texts, expected, strict=True):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == encoding.ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


def written(tokenizer: Tokenizer, number: int) -> list[str]:
    """Different texts of up to 300 letters, from the frozen documents."""
    draw, found = random.Random(1), set()
    whole = [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents().values()]
    while len(found) < number:
        text = draw.choice(whole)
        first = draw.randrange(len(text))
        found.add(text[first : first + draw.randint(1, 300)])
    return sorted(found)


def drawn(number: int) -> list[str]:
    """Different texts of digits, spaces, marks, special tokens and letters of many alphabets."""
    draw, found = random.Random(2), set()
    pools: tuple[str | list[str], ...] = (
        "0123456789", "  \t\n\r", "'\"!?.,;:-_()[]{}<>/\\|@#$%^&*+=~`", "abcdefXYZ", "äöüßéñçøå", "жщыЯ", "中文日本語",
        "한국어", "अआइ", "עברית", "🙂👩‍👩‍👧🏳️‍🌈", "\u00a0\u200b\u3000",
        ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], ["'s", "'ll", "don't", " the", "\n\n", "    "])
    while len(found) < number:
        found.add("".join(draw.choice(draw.choice(pools)) for _ in range(draw.randint(1, 40))))
    return sorted(found)


# -- float32 -----------------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers(exact: Loaded, folder: Path, prompts: list[list[int]]) -> None:
    """27 prompts of 1 to 1,100 tokens that meet in the batch.  A stored continuation ends before a tie."""
    expected = reference()["continuations"]
    assert len(prompts) == len(expected) == 27 and {1, 1100} <= set(map(len, prompts))
    adds = [Add(f"r{number}", RequestSpec(prompt, SamplingSpec(temperature=0, max_tokens=len(tokens))))
            for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True))]
    random.Random(4).shuffle(adds)
    played = play(engine(exact, folder), adds)
    assert {name: list(one.tokens) for name, one in played.outputs.items()} == {
        f"r{number}": tokens for number, tokens in enumerate(expected)}


def test_transformers_gives_the_stored_tokens(folder: Path, prompts: list[list[int]]) -> None:
    """The reference belongs to these weights: a few of its prompts are computed again."""
    from support.checkpoints import reference_model

    model, pairs = reference_model(folder, "float32"), list(zip(prompts, reference()["continuations"], strict=True))
    with torch.inference_mode():
        for prompt, tokens in (pair for pair in pairs[::6] if len(pair[0]) < 150):
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
            assert logits.argmax(-1).tolist() == tokens
        for one, expected in zip(SCORED, reference()["logprobs"], strict=True):
            ids = torch.tensor([slice_of(one)])
            found = model(ids).logits[0, :-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            assert distance([found.tolist()], [expected]) < ROUNDING


def distance(found: list[list[float]], expected: list[list[float]]) -> float:
    """The most that two log-probabilities of one token differ by, in nats."""
    return max(abs(one - other) for row, wanted in zip(found, expected, strict=True)
               for one, other in zip(row, wanted, strict=True))


def test_log_probabilities_in_float32(exact: Loaded, folder: Path) -> None:
    found = prompt_logprobs(engine(exact, folder), [slice_of(one) for one in SCORED])
    assert distance(found, reference()["logprobs"]) < ROUNDING


@pytest.fixture(scope="module")
def multiplied(file: Path) -> Callable[[str], list[list[float]]]:
    """Log-probabilities of the file's exact weights, of which one tensor is multiplied; the empty name: none is."""
    kernels = ReferenceKernels()
    config, weights = describe(file, "float32", kernels), CheckpointWeights(file)
    shapes = tensor_shapes(config)
    weights.assemble(config.quantization, shapes)
    weights.widen(weights.formats(shapes))
    read = weights.reader(shapes, config.dtype)
    tensors = {name: read(name) for name in shapes}
    texts = [slice_of(one) for one in SCORED]

    def scored(changed: str) -> list[list[float]]:
        assert not changed or changed in tensors

        def read_changed(*names: str, cuts: Cuts = NO_CUTS) -> torch.Tensor:
            parts = [tensors[name] * FACTOR if name == changed else tensors[name] for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        decoder = Decoder(config, read_changed, kernels, 256)
        num_tokens = sum(map(len, texts))
        logits = Driver(decoder).step(list(enumerate(texts)), list(range(num_tokens))).double().log_softmax(-1)
        rows = logits.split([len(text) for text in texts])
        return [row[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0].tolist()
                for row, text in zip(rows, texts, strict=True)]

    return scored


def test_log_probabilities_of_the_files_exact_weights(multiplied: Callable[[str], list[list[float]]]) -> None:
    """The product's own reader dequantizes the file, and not the package that made the reference."""
    assert distance(multiplied(""), reference()["logprobs"]) < ROUNDING


def test_one_percent_of_any_tensor_shows(multiplied: Callable[[str], list[list[float]]]) -> None:
    """Of each kind the reference has the tensor that shows least: `support.real_reference` has tried all.

    Those of three kinds that show less than the others are tried again; kinds that change a product alike count once.
    """
    weakest = reference()["weakest"]
    assert len(weakest) == 11 and min(change for _, change in weakest.values()) > 2 * ROUNDING
    for change, name in sorted({change: name for name, change in weakest.values()}.items())[:3]:
        assert distance(multiplied(name), reference()["logprobs"]) == pytest.approx(change, abs=2 * ROUNDING), name


# -- formats -----------------------------------------------------------------------------------------------------------

# Perplexity over that in float32: today's values, within what processors round differently.  An improvement fails,
# too: tighten the bounds then.  And the share of places at which the most probable token is that of float32.
FORMATS: dict[tuple[str, str, str], tuple[float, float, float]] = {  # dtype, quantization, kv_cache_dtype
    ("float32", "none", "auto"): (0.9999, 1.0001, 1.0),
    ("bfloat16", "none", "auto"): (0.99, 1.01, 0.95),
    ("bfloat16", "int8", "int8"): (0.985, 1.015, 0.92),
    ("bfloat16", "int4", "auto"): (0.985, 1.02, 0.92),  # the weights lie on a grid of 4 bits
}
STORED = (0.99, 1.02)  # the file's blocks, multiplied as they are


class Reading(NamedTuple):
    """What a model makes of the texts."""

    perplexity: float
    greedy: list[int]  # the most probable token at each place

    @classmethod
    def of(cls, subject: Engine) -> Reading:
        entries = [entry for row in prompt_entries(subject, read_texts(), 1) for entry in row]
        return cls(math.exp(-math.fsum(entry.logprob for entry in entries) / len(entries)),
                   [entry.top_ids[0] for entry in entries])


@pytest.fixture(scope="module")
def exactly_read(exact: Loaded, folder: Path) -> Reading:
    return Reading.of(engine(exact, folder, max_num_seqs=8))


def check_perplexity(found: float, bounds: tuple[float, float]) -> None:
    least, most = (bound * reference()["perplexity"] for bound in bounds)
    assert least < found < most, found / reference()["perplexity"]


@pytest.mark.parametrize(("dtype", "quantization", "cached"), FORMATS)
def test_perplexity_and_greedy_tokens(
    folder: Path, exactly_read: Reading, monkeypatch: pytest.MonkeyPatch, dtype: str, quantization: str, cached: str,
) -> None:
    monkeypatch.setattr(calibration, "ROWS", 8)  # enough for weights on a grid of 4 bits, as are two ranges
    monkeypatch.setattr(calibration, "LENGTH", 32)
    monkeypatch.setattr(quantize, "RANGES", quantize.RANGES[:3:2])
    settings = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": cached, "max_num_seqs": 8,
                "packed_weights_cache": 0.0}
    *bounds, least_kept = FORMATS[dtype, quantization, cached]
    is_exact = (dtype, quantization, cached) == ("float32", "none", "auto")
    loaded = None if is_exact else load(EngineConfig.of(model=str(folder), **settings))
    found = exactly_read if loaded is None else Reading.of(engine(loaded, folder, **settings))
    check_perplexity(found.perplexity, (bounds[0], bounds[1]))
    kept = sum(map(int.__eq__, found.greedy, exactly_read.greedy)) / len(found.greedy)
    assert kept >= least_kept, kept
    del loaded
    gc.collect()


def test_perplexity_of_the_file_as_it_is_stored(stored: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = stored.generate([{"prompt_token_ids": ids} for ids in read_texts()], params, use_tqdm=False)
    found = [entry[token].logprob for output in outputs
             for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)]
    check_perplexity(math.exp(-math.fsum(found) / len(found)), STORED)


def test_every_format_is_measured() -> None:
    """A new value of an option comes with its perplexity."""
    dtypes, quantizations, caches = (set(values) for values in zip(*FORMATS, strict=True))
    assert dtypes == set(DTYPES) - {"auto", "float16"}  # on a CPU they are bfloat16
    assert quantizations == set(QUANTIZATIONS)
    assert caches == set(KV_CACHE_DTYPES) - {"fp8"}  # a GPU's


# -- answers -----------------------------------------------------------------------------------------------------------

# Those that are not near a tie, of answers in float32.
KNOWN = {"capital": "Paris", "water": "H2O", "turns": "Ada", "sky": "scatter", "edit": FUNCTION.splitlines()[0]}


def test_answers_can_be_read(stored: LLM) -> None:
    """Prompts are those that transformers makes of the conversations; answers have the words that they must have."""
    outputs = dict(zip(CHATS, stored.chat(list(CHATS.values()), replace(GREEDY, max_tokens=48), use_tqdm=False),
                       strict=True))
    assert {name: output.prompt_token_ids for name, output in outputs.items()} == reference()["chats"]
    for name, word in KNOWN.items():
        assert word in outputs[name].outputs[0].text, outputs[name].outputs[0].text


SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "city"], "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20}}}


def test_structured_output_is_valid_and_right(stored: LLM) -> None:
    """Where a grammar leaves a choice, the model's answer is the right one."""
    questions = {
        "Ada is 36 years old and lives in London. Write this as JSON.": {"json": SCHEMA},
        "Is the sky blue or green?": {"choice": ["green", "blue", "purple"]},
        "Is the grass blue or green?": {"choice": ["blue", "purple", "green"]}}
    params = [replace(GREEDY, max_tokens=80, structured_outputs=StructuredOutputsParams(**matching))
              for matching in questions.values()]
    outputs = stored.chat([[{"role": "user", "content": question}] for question in questions], params, use_tqdm=False)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    facts, sky, grass = (output.outputs[0].text for output in outputs)
    assert json.loads(facts) == {"name": "Ada", "age": 36, "city": "London"}
    assert (sky, grass) == ("blue", "green")


# -- one answer, whatever the company ----------------------------------------------------------------------------------


def test_alone_and_in_company(stored: LLM, folder: Path, prompts: list[list[int]]) -> None:
    """In bfloat16, and of the file as it is: token by token, with their log-probabilities."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts if 15 < len(prompt) < 300][::2]
    params = replace(GREEDY, max_tokens=12, logprobs=1)
    for llm in (stored, LLM(str(folder), dtype="bfloat16", max_num_seqs=12, kv_cache_memory=256 << 20)):
        together = llm.generate(asked, params, use_tqdm=False)
        llm.reset_prefix_cache()
        for number in range(0, len(asked), 3):
            (alone,) = llm.generate([asked[number]], params, use_tqdm=False)
            assert alone.outputs[0].token_ids == together[number].outputs[0].token_ids
            assert alone.outputs[0].logprobs == together[number].outputs[0].logprobs


def test_drafts_change_no_token_of_an_edit(exact: Loaded, folder: Path) -> None:
    """A model that writes a function again, with another name: many drafts are right."""
    tokenizer = Tokenizer.load(folder)
    before, head = ("total_price", "net_price", "sum_of_prices"), FUNCTION.partition("\n")[0]
    text = "\n\n".join(FUNCTION.replace("total_price", name) for name in before)
    text += "\n\n" + head.replace("total_price", "final_price") + "\n"
    prompts = [tokenizer.encode(text, add_special_tokens=False), reference()["chats"]["edit"]]
    params = SamplingSpec(temperature=0, max_tokens=28)
    adds = [Add(f"r{number}", RequestSpec(prompt, params)) for number, prompt in enumerate(prompts)]
    plain = play(engine(exact, folder), adds)
    expected = [Add(one.request_id, replace(one.spec, prediction=edited(plain.outputs[one.request_id].tokens)))
                for one in adds]
    for method in ("ngram", "suffix", "prediction"):
        drafting = engine(exact, folder)
        drafting._scheduler._drafting.proposer = DraftProposer(Speculation(method, prompt_lookup_min=1), slow_steps())
        drafted = play(drafting, expected)
        assert drafted.outputs == plain.outputs, method
        assert drafted.num_right > 12 > 0 == plain.num_drafts, (method, drafted.num_right)


def edited(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """A prediction of these tokens in which every twelfth is another one."""
    return tuple(token + 1 if place % 12 == 11 else token for place, token in enumerate(tokens))


# -- the prefix cache --------------------------------------------------------------------------------------------------

BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2  # of the cache: layers, keys and values, heads, their size, bfloat16


def test_each_cause_of_a_miss_with_its_seconds(file: Path, tmp_path: Path) -> None:
    with serving(str(file), *OPTIONS, "--kv-cache-memory", str(NUM_BLOCKS * BLOCK * BYTES_PER_TOKEN),
                 log=tmp_path / "log") as live:
        check_each_cause(live, begin="")


def test_a_date_in_a_system_prompt_is_named_with_the_seconds_that_it_costs(file: Path, tmp_path: Path) -> None:
    rules = " ".join(f"Rule {number}: answer in one short sentence." for number in range(30))
    with serving(str(file), "--max-num-seqs", "2", "--max-model-len", "1024", "--kv-cache-memory", "64M",
                 log=tmp_path / "log") as live:
        for day in (27, 28):
            answer = live.client.post("/v1/chat/completions", json={"max_tokens": 1, "messages": [
                {"role": "system", "content": f"You are helpful. Today is 2026-11-{day}. {rules}"},
                {"role": "user", "content": "What is a cache?"}]}).raise_for_status().json()
        (explanation,) = live.client.get(f"/explain/{answer['id']}").json()["requests"]
        (diverged,) = [span for span in explanation["cache"]["spans"] if span["cause"] == "diverged"]
        (first, *_) = live.client.get("/cache/report").json()["divergences"]
    assert diverged["text"]["before"].endswith("2026-11-2") and diverged["text"]["own"].startswith("8. Rule 0")
    assert diverged["text"]["nearest"].startswith("7. Rule 0") and diverged["tokens"] > 200
    assert first["diverged_at"] == diverged["diverged_at"] and first["advice"].startswith("A date or time changes")
    assert 0.9 * diverged["seconds"] < first["avoidable_seconds"] <= first["seconds"]
