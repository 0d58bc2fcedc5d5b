"""A draft model beside the built-in model: a copy whose weights were disturbed, so that it often agrees with it.

A step-time model whose steps take a second makes drafts worth their time whenever they are likely to be right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import checkpoints
from support.drafted import Played, mixed, play, several, slow_steps
from support.live import Live, serving
from support.records import cached_of

from slotwise import LLM, builtin
from slotwise import SamplingParams as Asked
from slotwise.compose.engine_builder import Loaded, build_engine, load
from slotwise.core.params import JSON_SCHEMA, Grammar, SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.speculation.draft_model import DraftModelProposer
from slotwise.core.speculation.proposer import proposer_of
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.errors import CheckpointError
from slotwise.measure.simulate.replay import replay
from slotwise.observe import log_file
from slotwise.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

CODE = """def area(self):
    return self.width * self.height

def size(self):
    return self.width + self.height

"""
NOISE = 0.15  # of the standard deviation of each tensor


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, disturbed."""
    folder = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(builtin.path(), folder)
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        weights = {name: tensor + NOISE * tensor.float().std().to(tensor.dtype) * torch.randn(
            tensor.shape, generator=generator).to(tensor.dtype) for name, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def loaded(draft: Path) -> Loaded:
    return load(config(draft, batch_invariant=True))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return Tokenizer.load(builtin.path()).encode(CODE * 2)


def config(draft: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.of(**{
        "model": str(builtin.path()), "dtype": "float32", "max_num_seqs": 8, "max_stall_ms": 0.0,
        "speculative_config": {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}} | settings)


def engine(loaded: Loaded, draft: Path, *, drafts: bool = True, **settings: Any) -> Engine:
    asked = config(draft, **settings)
    made, _ = loaded.engine(asked)
    made._scheduler._drafting.proposer = proposer_of(asked.speculative_config, slow_steps()) if drafts else None
    return made


def same_with_drafts(loaded: Loaded, draft: Path, adds: list[Add], **settings: Any) -> Played:
    """Plays with and without drafts.  All tokens, log-probabilities and ends are the same, and drafts were right."""
    plain = play(engine(loaded, draft, drafts=False, **settings), adds)
    drafted = play(engine(loaded, draft, **settings), adds)
    assert drafted.outputs == plain.outputs and drafted.num_right > 0 == plain.num_drafts
    return drafted


def proposer_in(subject: Engine) -> DraftModelProposer:
    proposer = subject._scheduler._drafting.proposer
    assert isinstance(proposer, DraftModelProposer)
    return proposer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_of_mixed_requests(draft, prompt, dtype):
    """Greedy and seeded, penalties, log-probabilities, `min_p`, stop tokens; chunked, preempted, from the cache."""
    loaded = load(config(draft, dtype=dtype, batch_invariant=True))
    size = loaded.model_config.dtype.itemsize
    settings = {"long_prefill_token_threshold": 17, "block_size": 16, "kv_cache_memory": size << 19}
    drafted = same_with_drafts(loaded, draft, mixed(prompt, 80, seed=1), **settings)
    assert any(record.preempted for record in drafted.records) and any(any(cached_of(record))
                                                                       for record in drafted.records)
    assert any(record.plan.drafts and len(set(record.plan.kinds)) == 2 for record in drafted.records), "beside prompts"
    assert any(record.plan.drafts and record.result.proposing and record.result.proposing.passes > 1
               for record in drafted.records)


def test_a_model_that_drafts_for_itself_is_always_right(prompt):
    """A draft is drawn with the uniform, the controls and the history of the token that is to come."""
    own = builtin.path()
    both = load(config(own))
    for params in (
            {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
            {"temperature": 1.0, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
            {"temperature": 0.7, "logprobs": 2, "logit_bias": {prompt[2]: 1.5}, "min_tokens": 5}):
        drafted = same_with_drafts(both, own, several(prompt, 3, **params))
        assert drafted.num_right == drafted.num_drafts > 50, params


def test_the_sampler_of_a_device(draft, prompt):
    """A GPU's sampler reads the history of a draft from the tokens on the device; the reference has the same one."""
    both = load(config(draft, device="reference"))
    adds = several(prompt[:40], 2, temperature=1.0, max_tokens=16, presence_penalty=0.5)
    same_with_drafts(both, draft, adds, device="reference")


def test_a_grammar_masks_drafts(loaded, draft, prompt):
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "size": {
        "type": "integer"}}, "required": ["name", "size"]}
    grammar = Grammar(JSON_SCHEMA, json.dumps(schema))
    adds = several(prompt, 3, temperature=1.0, max_tokens=60, ignore_eos=False, grammar=grammar)
    drafted = same_with_drafts(loaded, draft, adds)
    assert any(record.result.proposing and record.result.proposing.passes for record in drafted.records)


def test_steps_in_flight(loaded, draft, prompt):
    """With overlapping steps a row with drafts leaves out a step."""
    same_with_drafts(loaded, draft, several(prompt, 3, temperature=0.3), overlap=1)


def test_an_abort_while_drafts_are_verified(loaded, draft, prompt):
    subject = engine(loaded, draft, overlap=1)
    free_before = subject._scheduler.num_free_blocks
    aborted = play(subject, several(prompt, 3, temperature=0.0), {6: "r1"})
    plain = play(engine(loaded, draft, drafts=False), several(prompt, 3, temperature=0.0))
    assert aborted.outputs["r1"].reason == "abort" and aborted.num_drafts
    assert all(aborted.outputs[name] == plain.outputs[name] for name in ("r0", "r2"))
    assert subject._scheduler.num_free_blocks == free_before and not proposer_in(subject)._rows


@pytest.mark.parametrize("batching", ["static", "orca", "one_at_a_time"])
def test_disciplines_that_hold_rows(loaded, draft, prompt, batching):
    same_with_drafts(loaded, draft, several(prompt, 5, temperature=0.0), batching=batching)


def first_proposing(played: Played) -> int:
    """Tokens of the draft model in the first step that it proposed in."""
    return next(record.result.proposing.tokens for record in played.records if record.result.proposing is not None)


def test_cached_prefixes_are_in_the_draft_models_cache_or_caught_up_with(loaded, draft, prompt):
    """What the draft model has computed of a block is found with the block; what it has not, it computes."""
    first, settings = several(prompt, 1, temperature=0.0), {"block_size": 16}
    (done,) = play(engine(loaded, draft, drafts=False, **settings), first).outputs.values()
    again = [Add("again", RequestSpec(prompt + list(done.tokens[:-1]), SamplingSpec(temperature=0.0, max_tokens=12)))]
    plain = play(engine(loaded, draft, drafts=False, **settings), again).outputs
    num_known = len(again[0].spec.prompt)
    for is_drafted in (True, False):
        subject = engine(loaded, draft, drafts=is_drafted, **settings)
        play(subject, first)
        subject._scheduler._drafting.proposer = proposer_of(config(draft).speculative_config, slow_steps())
        played = play(subject, again)
        assert played.outputs == plain and max(max(cached_of(record), default=0)
                                               for record in played.records) > len(prompt)
        tokens = first_proposing(played)
        assert tokens < num_known / 2 if is_drafted else tokens >= num_known


def test_a_long_prompt_is_caught_up_with_in_several_steps(loaded, draft, prompt):
    long = (prompt * 40)[:700]
    adds = [Add("long", RequestSpec(long, SamplingSpec(temperature=0.0, max_tokens=30, ignore_eos=True)))]
    drafted = same_with_drafts(loaded, draft, adds)
    took = [record for record in drafted.records if record.result.proposing is not None]
    assert took[0].result.proposing.tokens == 512 and not took[0].plan.drafts
    assert took[1].result.proposing.tokens > 700 - 512


def test_memory_is_planned_for_both(draft):
    alone = build_engine(config(draft, speculative_config={"method": "prediction"}, kv_cache_memory=8 << 20))[1]
    both = build_engine(config(draft, kv_cache_memory=8 << 20))[1]
    assert both.memory.weights == 2 * alone.memory.weights
    assert both.limits.num_blocks == alone.limits.num_blocks // 2, "a block has the layers of both"
    assert both.checkpoint.startswith(alone.checkpoint) and both.checkpoint != alone.checkpoint


# -- pairs -------------------------------------------------------------------------------------------------------------


def test_pairs_of_other_vocabularies_are_refused(tmp_path):
    other = checkpoints.make("llama3", tmp_path / "other", tokenizer=True, vocab_size=512)
    with pytest.raises(ConfigError, match=r"other has another vocabulary than .*: 512 tokens") as e:
        load(config(other))
    assert "\n" not in str(e.value)
    text = (builtin.path() / "tokenizer.json").read_text()
    swapped = json.loads(text)
    vocab = swapped["model"]["vocab"]
    one, two = list(vocab)[300:302]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    shutil.copytree(builtin.path(), tmp_path / "swapped")
    (tmp_path / "swapped" / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(ConfigError, match=r"has another vocabulary .* is token "):
        load(config(tmp_path / "swapped"))
    with pytest.raises(CheckpointError, match=r"speculative_config: model: .*nothing"):
        load(config(tmp_path / "nothing"))


@pytest.mark.parametrize("vocab_size", [960, 1088])
def test_a_vocabulary_padded_otherwise_is_the_same(tmp_path, vocab_size):
    """As of Qwen 2.5, whose embeddings have 151,936 or 152,064 rows for one tokenizer."""
    target = checkpoints.make("llama3", tmp_path / "target", vocab_size=1024)
    other = checkpoints.make("llama3", tmp_path / "draft", vocab_size=vocab_size, num_hidden_layers=1)
    checkpoints.write_tokenizer(target, 900)
    for file in target.glob("tokenizer*"):
        shutil.copy(file, other)
    settings = {"model": str(target), "max_model_len": 256}
    both = load(config(other, **settings))
    adds = several(list(range(3, 40)), 3, temperature=1.0, max_tokens=30)
    plain = play(engine(both, other, drafts=False, **settings), adds)
    drafted = play(engine(both, other, **settings), adds)
    assert drafted.outputs == plain.outputs and drafted.num_drafts


def test_offline(draft):
    asked = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    prompts = ["def add(a, b):", "def close(self):"]
    params = Asked(temperature=0.5, seed=3, max_tokens=40, n=2)
    told = [[[one.text for one in output.outputs] for output in LLM(
        dtype="float32", speculative_config=config).generate(prompts, params)] for config in (asked, None)]
    assert told[0] == told[1]


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "events.jsonl"


@pytest.fixture(scope="module")
def live(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The draft model is the built-in model with its first layer alone: cheap, and often wrong."""
    folder = shallow(tmp_path_factory.mktemp("shallow") / "model")
    asked = json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4})
    with serving("--dtype", "float32", "--speculative-config", asked, "--event-log", str(log),
                 log=log.with_name("stderr")) as server:
        yield server


def shallow(folder: Path) -> Path:
    """The built-in model with its first layer alone."""
    shutil.copytree(builtin.path(), folder)
    described = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(described))
    (file,) = folder.glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(file).items()
               if "layers." not in name or "layers.0." in name}, file, metadata={"format": "pt"})
    return folder


def test_served(live, log, tmp_path):
    """Outputs are those without drafts; usage, metrics, explain and the replay of the log tell of the drafts.

    A server without drafts refuses a prediction.
    """
    asked = [{"prompt": "def read_lines(path):", "max_tokens": 150, "temperature": temperature, "seed": 1, "n": n,
              "ignore_eos": True, **more}
             for temperature, n in ((0, 1), (0.8, 3)) for more in ({}, {"stop": "self"}, {"presence_penalty": 0.3})]
    answers = [live.client.post("/v1/completions", json=body).json() for body in asked]
    with serving("--dtype", "float32", "--speculative-config", '{"method": "none"}', log=tmp_path / "log") as plain:
        for body, answer in zip(asked, answers, strict=True):
            expected = plain.client.post("/v1/completions", json=body).json()
            assert answer["choices"] == expected["choices"]
            assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
        guessed = asked[0] | {"prediction": {"type": "content", "content": "x"}}
        refused = plain.client.post("/v1/completions", json=guessed)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prediction"
    lines = live.client.get("/metrics").text.splitlines()
    counts = [sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"slotwise:spec_decode_{name}{{"))
              for name in ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")]
    assert counts[0] > 0 and counts[1] >= counts[0] and counts[2] <= counts[1]
    explained = live.client.get(f"/explain/{answers[0]['id']}").json()
    assert "draft_tokens" in json.dumps(explained)
    outcome = replay(log_file.read_file(log))
    assert outcome.difference is None and outcome.steps > 0


def test_a_pair_that_is_refused_ends_the_start_with_one_line(tmp_path):
    other = checkpoints.make("llama3", tmp_path / "other", tokenizer=True, vocab_size=512)
    asked = json.dumps({"model": str(other)})
    with pytest.raises(AssertionError), serving("--speculative-config", asked, log=tmp_path / "log"):
        pass
    told = (tmp_path / "log").read_text().strip().splitlines()
    assert len(told) == 1 and "another vocabulary" in told[0], told
