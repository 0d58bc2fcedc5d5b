"""Models with recurrent states on a real engine: drafts that are wrong are undone, snapshots serve other requests, and
what states do not allow is refused by name.  Tokens beside transformers' are in `test_parity.py`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from drafted import Played, play
from test_speculation import free

from slotwise.compose.engine import Loaded, load
from slotwise.core.params import SamplingParams
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.model.errors import CheckpointError
from slotwise.speculation.proposer import DraftProposer
from slotwise.speculation.settings import Speculation

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
        made._scheduler._drafting.proposer = DraftProposer(Speculation("prediction", prompt_lookup_min=1), free())
    return made


def adds(expected: list[list[int]] | None = None) -> list[Add]:
    """Requests whose clients predict the `expected` outputs, with a token in six wrong."""
    draw, prompts = random.Random(2), checkpoints.prompts([3, 7, 8, 21, 30], seed=4)
    guesses: list[tuple[int, ...]] = [()] * NUM_REQUESTS
    if expected is not None:
        guesses = [tuple(token if draw.random() < 5 / 6 else 1000 for token in tokens) for tokens in expected]
    return [Add(f"r{at}", prompt, SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True), seed=at,
                prediction=guess) for at, (prompt, guess) in enumerate(zip(prompts, guesses, strict=True))]


def tokens_of(played: Played) -> list[list[int]]:
    return [[*played.outputs[f"r{at}"].tokens] for at in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return checkpoints.greedy(folder, [one.prompt for one in adds()], OUTPUT)


@pytest.mark.parametrize("settings", [{}, {"overlap": 1}, {"kv_cache_memory": 110_000, "max_model_len": 72}],
                         ids=["plain", "overlap", "preempted"])
def test_drafts_change_no_token(settings, loaded, folder, expected):
    """Some drafts are right and some wrong, within blocks and across their edges."""
    played = play(engine(loaded, folder, drafts=True, **settings), adds(expected))
    assert tokens_of(played) == expected
    assert 20 < played.num_right < played.num_drafts - 20
    assert any(record.preempted for record in played.records) == ("max_model_len" in settings)


def test_states_behind_drafts_serve_other_requests(loaded, folder, expected):
    """Blocks that were filled by steps with drafts are found by prompts that begin with what these computed."""
    subject = engine(loaded, folder, drafts=True)
    play(subject, adds(expected))
    for length in (5, 12, 20, 33):
        later = [replace(one, request_id=f"{length}-{at}", prompt=[*one.prompt, *tokens[:length]], prediction=())
                 for at, (one, tokens) in enumerate(zip(adds(), expected, strict=True))]
        played = play(subject, [replace(one, params=replace(one.params, max_tokens=7)) for one in later])
        for at, tokens in enumerate(expected):
            assert played.outputs[f"{length}-{at}"].tokens == tuple(tokens[length : length + 7])
        cached = sum(sum(record.cached) for record in played.records)
        assert cached >= sum(len(one.prompt) // 8 * 8 - 8 for one in later)


def test_a_block_that_holds_no_state_is_refused(loaded, folder):
    with pytest.raises(ConfigError, match=r"block_size 2: a block .* as large as \d tokens: set at least \d"):
        loaded.engine(config(folder, block_size=2))
    assert loaded.engine(config(folder, block_size=None))[1].limits.windows == (0, 1, 1, 1)


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
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2: layers with a recurrent state"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size 2: .* is not divided among ranks"),
    ({"enable_lora": True}, "enable_lora: adapters are not supported with a recurrent state"),
    ({"speculative_config": {"model": "..."}}, "speculative_config: a draft model is not supported beside")])
def test_settings_that_states_do_not_allow_are_refused(settings, message, folder):
    if "speculative_config" in settings:
        settings = {"speculative_config": {"model": str(folder)}}
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load(config(folder, **settings))
