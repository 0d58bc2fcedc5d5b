"""Greedy tokens in float32 equal transformers' for every family, however requests meet in the batch.

What the engine gives for prompts that arrive at random steps is compared with transformers, token by token; each other
way in which requests can meet must give the same tokens.

The whole engine runs here: scheduler, runner, kernels, sampler; on a GPU where there is one.  Only HTTP and text are
left out.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import pytest
from support import checkpoints
from support.records import cached_of

from slotwise.compose.engine_builder import Loaded, load
from slotwise.compute.model.layer_groups import layer_groups, least_block_size
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add, Finish

NUM_REQUESTS, OUTPUT = 14, 20
FEW = 6  # requests of a family whose caches are those of others
SPARE = 4  # prompts in the place of those with ties
LONG = 1_050
SOME = ("llama3", "mistral", "gemma2", "qwen3_moe")  # for what hardly depends on the family
CACHED = pytest.mark.parametrize(
    "family", checkpoints.FAMILIES if checkpoints.ARE_ALL_ASKED else checkpoints.DIFFERENT_CACHES, indirect=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=checkpoints.FAMILIES)
def family(request, tmp_path_factory):
    """A checkpoint, prompts of ragged lengths, what transformers continues them with, and what the engine does."""
    folder = checkpoints.make(request.param, tmp_path_factory.mktemp(request.param))
    draw, is_alike = random.Random(7), request.param not in (*checkpoints.DIFFERENT_CACHES, *SOME)
    number = FEW if is_alike and not checkpoints.ARE_ALL_ASKED else NUM_REQUESTS
    drawn = checkpoints.prompts([draw.randint(1, 70) for _ in range(number + SPARE)], seed=11)
    outputs = run(engine(folder, overlap=1), at_random_steps(drawn, number))
    chosen, expected = checkpoints.clear(folder, drawn, [outputs[index] for index in range(len(drawn))], number)
    assert len({token for tokens in expected for token in tokens}) >= 50, "references that say too little"
    return folder, [drawn[at] for at in chosen], expected, [outputs[at] for at in chosen]


@lru_cache(maxsize=1)
def loaded(folder: Path) -> Loaded:
    return load(EngineConfig.of(model=str(folder), dtype="float32"))


def engine(folder: Path, **settings: object) -> Engine:
    built, _ = loaded(folder).engine(EngineConfig.of(**{
        "model": str(folder), "dtype": "float32", "block_size": 16, "kv_cache_memory": 64 << 20, "max_model_len": 2048,
        "max_num_seqs": NUM_REQUESTS} | settings))
    return built


def add(index: int, prompt: list[int], length: int = OUTPUT) -> Add:
    return Add(f"r{index}",
               RequestSpec(prompt, SamplingSpec(temperature=0, max_tokens=length, ignore_eos=True), index))


def run(subject: Engine, arrivals: dict[int, list[Add]], aborts: dict[int, list[str]] | None = None) -> dict[int, list]:
    """Steps until all is quiet; `arrivals` and `aborts` say what happens before which step."""
    outputs: dict[int, list[int]] = {}
    step = 0
    while subject.has_work or any(at >= step for at in arrivals):
        for command in arrivals.get(step, []):
            subject.handle(command)
        for name in (aborts or {}).get(step, []):
            subject.handle(Finish(name, "abort"))
        step += 1
        if not subject.has_work:
            continue
        record = subject.step()
        assert not any(end.message for end in record.ended), record.ended
        for name, tokens in zip(record.plan.request_ids, record.tokens, strict=True):
            outputs.setdefault(int(name[1:]), []).extend(tokens)
    return outputs


def at_random_steps(prompts: list[list[int]], last: int = 20) -> dict[int, list[Add]]:
    draw, arrivals = random.Random(3), {}
    for index, prompt in enumerate(prompts):
        arrivals.setdefault(draw.randint(0, last), []).append(add(index, prompt))
    return arrivals


@pytest.mark.parametrize("family", checkpoints.FAMILIES if checkpoints.ARE_ALL_ASKED else [
    *SOME, "qwen3_next", "gpt_oss"], indirect=True)
def test_alone(family):
    folder, prompts, expected, _ = family
    subject = engine(folder)
    for index in range(0, NUM_REQUESTS, 5):
        assert run(subject, {0: [add(index, prompts[index])]}) == {index: expected[index]}


def test_in_a_batch_arriving_at_random_steps(family):
    _, _, expected, outputs = family
    assert outputs == expected


@pytest.mark.parametrize("family", [*SOME, "qwen3_next"], indirect=True)
def test_without_a_step_in_flight(family):
    folder, prompts, expected, _ = family
    outputs = run(engine(folder, overlap=0), at_random_steps(prompts))
    assert outputs == dict(enumerate(expected))
    assert tokens_under_pressure(folder, prompts, 0) == dict(enumerate(expected))


DISCIPLINES = (
    {"batching": "one_at_a_time"}, {"batching": "static", "batch_size": 5}, {"batching": "orca"},
    {"batching": "dynamic", "batch_size": 4, "max_wait_ms": 5}, {"prefill": "inline"}, {"prefill": "alone"})


@pytest.mark.parametrize("family", SOME, indirect=True)
def test_under_every_discipline(family):
    """Padding, held rows and whole prompts change nobody's tokens."""
    folder, prompts, expected, _ = family
    for number, discipline in enumerate(DISCIPLINES):
        subject = engine(folder, max_num_seqs=8, overlap=number % 2, **discipline)
        outputs = run(subject, {0: [add(index, prompts[index]) for index in range(11)]})
        assert outputs == dict(enumerate(expected[:11])), discipline


@CACHED
def test_with_so_few_blocks_that_requests_are_preempted(family):
    folder, prompts, expected, _ = family
    assert tokens_under_pressure(folder, prompts, 1) == dict(enumerate(expected))


def tokens_under_pressure(folder, prompts, overlap):
    size = small_block(folder)
    subject = engine(folder, block_size=size, max_model_len=100, max_num_batched_tokens=64, overlap=overlap,
                     kv_cache_memory=blocks_of(folder, size) * 26)
    preempted = []
    step = subject.step

    def watched():
        record = step()
        preempted.extend(record.preempted)
        return record

    subject.step = watched
    outputs = run(subject, at_random_steps(prompts, 5))
    assert len(preempted) >= 2, "the pool was not small enough to show anything"
    return outputs


@CACHED
def test_in_chunks_of_seven_tokens_and_then_from_cached_prefixes(family):
    """Blocks that another request computed, some of them behind the window of a layer."""
    folder, prompts, expected, _ = family
    subject = engine(folder, block_size=small_block(folder), long_prefill_token_threshold=7)
    arrivals = {index: [add(index, prompt)] for index, prompt in enumerate(prompts)}
    assert run(subject, arrivals) == dict(enumerate(expected))
    cached = []
    step = subject.step

    def watched():
        record = step()
        cached.extend(cached_of(record))
        return record

    subject.step = watched
    again = {0: [add(100 + index, prompt) for index, prompt in enumerate(prompts)]}
    assert run(subject, again) == {100 + index: tokens for index, tokens in enumerate(expected)}
    assert sum(cached) >= sum(map(len, prompts)) // 2


@pytest.mark.parametrize("family", SOME, indirect=True)
def test_across_aborts_of_neighbors(family):
    folder, prompts, expected, _ = family
    draw = random.Random(5)
    aborted = draw.sample(range(NUM_REQUESTS), 5)
    aborts: dict[int, list[str]] = {}
    for index in aborted:
        aborts.setdefault(draw.randint(12, 30), []).append(f"r{index}")
    outputs = run(engine(folder), at_random_steps(prompts), aborts)
    for index, tokens in outputs.items():
        assert tokens == expected[index][: len(tokens)]
        assert len(tokens) == OUTPUT or index in aborted


@CACHED
def test_a_long_context_beside_short_ones(family):
    folder, prompts, expected, _ = family
    (long,) = checkpoints.prompts([LONG], seed=13)
    outputs = run(engine(folder, max_num_batched_tokens=128), {0: [add(0, prompts[0])], 2: [add(99, long)]})
    _, (continuation,) = checkpoints.clear(folder, [long], [outputs[99]], 1)
    assert outputs == {0: expected[0], 99: continuation}


def small_block(folder: Path) -> int:
    """Four tokens, or as many as a state takes, which depends on the width of the processor's vectors."""
    decoder = loaded(folder)._decoder
    return max(4, least_block_size(
        layer_groups(decoder.layer_shapes, 100, decoder.config.kv_layers), decoder.layer_shapes,
        lambda tokens, shape: decoder.kernels.cache_bytes_per_block(tokens, shape, decoder.config.dtype)))


def blocks_of(folder: Path, block_size: int) -> int:
    """Bytes of a block of every layer, each in memory of its own."""
    decoder = loaded(folder)._decoder
    return len(decoder.layer_shapes) * max(
        decoder.kernels.cache_bytes_per_block(block_size, shape, decoder.config.dtype)
        for shape in decoder.layer_shapes)
