"""Models with recurrent states on a real engine: drafts that are wrong are undone, snapshots serve other requests, and
what states do not allow is refused by name.  Tokens beside transformers' are in `test_parity.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support import checkpoints
from support.drafted import Played, play, slow_steps
from support.records import cached_of

from slotwise.compose.engine_builder import Loaded, load
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.speculation.proposer import DraftProposer
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.errors import CheckpointError

OUTPUT, NUM_REQUESTS = 40, 5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("qwen3_next", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load(config(folder))


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.of(**{
        "model": str(folder), "dtype": "float32", "block_size": 8, "kv_cache_memory": 16 << 20, "max_model_len": 256,
        "max_num_seqs": 8, "max_stall_ms": 0.0} | settings)


def engine(loaded: Loaded, folder: Path, *, drafts: bool = False, **settings: Any) -> Engine:
    made, _ = loaded.engine(config(folder, **settings))
    if drafts:
        made._scheduler._drafting.proposer = DraftProposer(Speculation("prediction", prompt_lookup_min=1), slow_steps())
    return made


def prompts() -> list[list[int]]:
    return checkpoints.prompts([3, 7, 8, 21, 30], seed=4)


def add(at: int, prompt: list[int], length: int = OUTPUT, prediction: tuple[int, ...] = ()) -> Add:
    params = SamplingSpec(temperature=0, max_tokens=length, ignore_eos=True)
    return Add(f"r{at}", RequestSpec(prompt, params, at, prediction=prediction))


def predicted(expected: list[list[int]]) -> list[Add]:
    """Requests whose clients predict the `expected` outputs, with a token in six wrong."""
    draw = random.Random(2)
    guesses = [tuple(token if draw.random() < 5 / 6 else 1000 for token in tokens) for tokens in expected]
    return [add(at, prompt, prediction=guess)
            for at, (prompt, guess) in enumerate(zip(prompts(), guesses, strict=True))]


def tokens_of(played: Played) -> list[list[int]]:
    return [[*played.outputs[f"r{at}"].tokens] for at in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return checkpoints.greedy(folder, prompts(), OUTPUT)


FEW = {"kv_cache_memory": 208_896, "max_model_len": 72, "max_num_batched_tokens": 16}  # 34 blocks


@pytest.mark.parametrize("settings", [{}, {"overlap": 1}, FEW], ids=["plain", "overlap", "preempted"])
def test_drafts_change_no_token(settings, loaded, folder, expected):
    """Some drafts are right and some wrong, within blocks and across their edges."""
    played = play(engine(loaded, folder, drafts=True, **settings), predicted(expected))
    assert tokens_of(played) == expected
    assert 20 < played.num_right < played.num_drafts - 20
    assert any(record.preempted for record in played.records) == ("max_model_len" in settings)


def test_states_behind_drafts_serve_other_requests(loaded, folder, expected):
    """Blocks that were filled by steps with drafts are found by prompts that begin with what these computed."""
    subject = engine(loaded, folder, drafts=True)
    play(subject, predicted(expected))
    for length in (5, 12, 20, 33):
        later = [prompt + tokens[:length] for prompt, tokens in zip(prompts(), expected, strict=True)]
        played = play(subject, [add(at, prompt, length=7) for at, prompt in enumerate(later)])
        assert tokens_of(played) == [tokens[length : length + 7] for tokens in expected]
        assert sum(sum(cached_of(record)) for record in played.records) == sum((len(one) - 1) // 8 * 8 for one in later)


def test_states_are_as_exact_in_an_int8_cache(folder):
    """Keys and values are rounded, and tokens may be others: but the same in company, from the cache, with drafts."""
    model = load(config(folder, kv_cache_dtype="int8", block_size=32))

    def run(subject: Engine, asked: list[Add]) -> list[list[int]]:
        return tokens_of(play(subject, asked))

    settings = {"kv_cache_dtype": "int8", "block_size": 32}
    subject, asked = engine(model, folder, **settings), [add(at, prompt) for at, prompt in enumerate(prompts())]
    tokens = run(subject, asked)
    assert run(subject, asked) == tokens == run(engine(model, folder, drafts=True, **settings), predicted(tokens))
    alone = [play(engine(model, folder, **settings), [one]).outputs[one.request_id].tokens for one in asked[3:]]
    assert [[*one] for one in alone] == tokens[3:]


def test_in_bfloat16_states_and_keys_are_never_in_one_block(folder):
    """From the first step on: the bits of one are no numbers of the other."""
    settings = {"dtype": "bfloat16", "block_size": 16}
    model, guesses = load(config(folder, **settings)), [[*range(100, 100 + OUTPUT)]] * NUM_REQUESTS
    without, drafted = (tokens_of(play(engine(model, folder, drafts=drafts, **settings), predicted(guesses)))
                        for drafts in (False, True))
    assert without == drafted and len({token for tokens in without for token in tokens}) > 50


def test_a_block_holds_a_state(tmp_path):
    """By default as many tokens as that takes (with vectors of 16 lanes 129, of 8 lanes 132); fewer are refused."""
    folder = checkpoints.make("qwen3_5", tmp_path, linear_key_head_dim=64, linear_value_head_dim=64)
    with pytest.raises(ConfigError, match=r"block_size 8: a block .* as large as (129|132) tokens: set at least \1,"):
        load(config(folder))
    model, asked = load(config(folder, block_size=None)), checkpoints.prompts([190, 40, 7], seed=6)
    with pytest.raises(ConfigError, match="block_size 8: a block "):
        model.engine(config(folder))
    subject, info = model.engine(config(folder, block_size=None))
    assert (info.limits.windows, info.limits.block_size) == ((0, 1, 1, 1), 192)
    played = play(subject, [add(at, prompt) for at, prompt in enumerate(asked)])
    assert [[*one.tokens] for one in played.outputs.values()] == checkpoints.greedy(folder, asked, OUTPUT)


@pytest.mark.parametrize(("settings", "message"), [
    ({"batching": "static"}, "batching static .* recurrent states would advance: choose continuous"),
    ({"batching": "dynamic"}, "batching dynamic .* recurrent states would advance: choose continuous")])
def test_disciplines_that_compute_tokens_again_are_refused(settings, message, loaded, folder):
    with pytest.raises(ConfigError, match=message):
        loaded.engine(config(folder, **settings))
    _, info = loaded.engine(config(folder))
    with pytest.raises(ValueError, match=message):
        info.scheduling.changed(settings, info.limits)


@pytest.mark.parametrize(("settings", "message"), [
    ({"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram"}},
     "pipeline_parallel_size 2: drafts in a model with a recurrent state are not divided"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size 2: .* is not divided among ranks"),
    ({"speculative_config": {"model": "..."}}, "speculative_config: a draft model is not supported with")])
def test_settings_that_states_do_not_allow_are_refused(settings, message, folder):
    if "model" in settings.get("speculative_config", {}):
        settings = {"speculative_config": {"model": str(folder)}}
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load(config(folder, **settings))
