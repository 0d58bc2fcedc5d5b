"""Speculative decoding on the built-in model: the table of failures that it is known for, one test a row.

Drafts come from the real lookups.  A step-time model to which drafts cost nothing makes steps verify as many as can be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.drafted import Played, mixed, play, several, slow_steps
from support.live import Live, serving
from support.records import cached_of

from slotwise import builtin
from slotwise.compose.engine_builder import Loaded, load
from slotwise.core.params import SamplingSpec, ThinkingBudget
from slotwise.core.record import StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.speculation.proposer import DraftProposer
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.measure.simulate.replay import replay
from slotwise.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

CODE = """def area(self):
    return self.width * self.height

def size(self):
    return self.width + self.height

"""
METHODS = ("ngram", "suffix", "prediction")


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(EngineConfig(str(builtin.path()), dtype="float32"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(builtin.path())


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(CODE * 2)


def engine(loaded: Loaded, method: str = "", **settings: Any) -> Engine:
    config = EngineConfig.of(**{
        "model": str(builtin.path()), "dtype": "float32", "max_num_seqs": 8, "max_stall_ms": 0.0} | settings)
    made, _ = loaded.engine(config)
    if method:
        made._scheduler._drafting.proposer = DraftProposer(Speculation(method, prompt_lookup_min=1), slow_steps())
    return made


def same_with_drafts(loaded: Loaded, adds: list[Add], method: str = "suffix", **settings: Any) -> Played:
    """Plays with and without drafts.  All tokens, log-probabilities and ends are the same, and drafts were right."""
    plain = play(engine(loaded, **settings), adds)
    drafted = play(engine(loaded, method, **settings), adds)
    assert drafted.outputs == plain.outputs and drafted.num_right > 0 == plain.num_drafts
    return drafted


def predicting(one: Add, tokens: tuple[int, ...]) -> Add:
    return Add(one.request_id, replace(one.spec, prediction=tokens))


@pytest.mark.parametrize(("method", "dtype"), [*((method, "float32") for method in METHODS), ("suffix", "bfloat16")])
def test_outputs_of_mixed_requests(prompt, method, dtype):
    loaded = load(EngineConfig(str(builtin.path()), dtype=dtype))
    memory = loaded.model_config.dtype.itemsize << 18
    settings = {"long_prefill_token_threshold": 17, "block_size": 16, "kv_cache_memory": memory, "dtype": dtype}
    drafted = same_with_drafts(loaded, mixed(prompt, 60, seed=len(method)), method, **settings)
    assert any(record.preempted for record in drafted.records) and any(any(cached_of(record))
                                                                       for record in drafted.records)
    assert any(record.plan.drafts and len(set(record.plan.kinds)) == 2 for record in drafted.records), "beside prompts"


def test_requests_beyond_a_segment_of_attention(loaded, prompt):
    """Attention cuts a long context into segments, whatever the number of queries."""
    limit = loaded.model_config.max_position_embeddings
    long = (prompt * 40)[: min(limit - 60, 1100)]
    same_with_drafts(loaded, [*several(long, 2), *several(prompt, 0)], max_num_seqs=2)


def test_penalties(loaded, prompt):
    """A penalty counts the drafts before a position as accepted, and no other."""
    same_with_drafts(loaded, several(
        prompt, presence_penalty=0.2, frequency_penalty=0.1, repetition_penalty=1.05, temperature=0.0))


def test_logprobs(loaded, prompt):
    drafted = same_with_drafts(loaded, several(prompt, logprobs=3, temperature=0.0))
    assert all(len(one.logprobs) == len(one.tokens) for one in drafted.outputs.values())


def test_min_p_and_seeds(loaded, prompt):
    same_with_drafts(loaded, several(prompt, min_p=0.02, temperature=0.8, top_k=20))


def test_min_tokens_and_stop_tokens(loaded, prompt):
    """A stop token inside an accepted run ends the output there."""
    (plain,) = play(engine(loaded), several(prompt, 1, temperature=0.0)).outputs.values()
    stop = plain.tokens[9]
    drafted = same_with_drafts(
        loaded, several(prompt, 1, temperature=0.0, stop_token_ids=(stop,), min_tokens=plain.tokens.index(stop)))
    assert drafted.outputs["r0"].reason == "stop" and drafted.outputs["r0"].tokens[-1] == stop


def test_the_end_of_reasoning_inside_a_draft(loaded, prompt):
    """Drafts from an output without a budget reason on, and those from one with it hold the end of the reasoning."""
    (free_output,) = play(engine(loaded), several(prompt, 1, temperature=0.0)).outputs.values()
    end = next(token for token in prompt if token not in free_output.tokens)
    (one,) = several(prompt, 1, temperature=0.0, thinking=ThinkingBudget(11, end))
    (cut,) = play(engine(loaded), [one]).outputs.values()
    assert cut.tokens.index(end) == 11 and cut.tokens[:11] == free_output.tokens[:11]
    for predicted in (free_output, cut):
        drafted = same_with_drafts(loaded, [predicting(one, predicted.tokens)], "prediction")
        rows = [(drafts, tokens) for record in drafted.records for drafts, tokens in zip(
            record.plan.drafts, record.tokens, strict=False) if drafts]
        across = [(drafts, tokens) for drafts, tokens in rows if end in tokens]
        assert across, "the step that yields the end has drafts"
        assert any(end in drafts[:-1] for drafts, _ in across) == (predicted is cut)


def test_a_step_in_flight(loaded, prompt):
    """With overlapping steps a row with drafts leaves out a step."""
    same_with_drafts(loaded, several(prompt, 3, temperature=0.0), overlap=1)


def test_an_abort_while_drafts_are_verified(loaded, prompt):
    subject = engine(loaded, "suffix", overlap=1)
    free_before = subject._scheduler.num_free_blocks
    aborted = play(subject, several(prompt, 3, temperature=0.0), {6: "r1"})
    plain = play(engine(loaded), several(prompt, 3, temperature=0.0))
    assert aborted.outputs["r1"].reason == "abort" and aborted.num_drafts
    assert all(aborted.outputs[name] == plain.outputs[name] for name in ("r0", "r2"))
    assert subject._scheduler.num_free_blocks == free_before and not subject._scheduler._drafting.proposer._rows


def test_cache_pressure(loaded, prompt):
    """Blocks run out: requests are preempted as without drafts, and never for one."""
    drafted = same_with_drafts(
        loaded, several(prompt, 6, max_tokens=60, temperature=0.0), block_size=16, kv_cache_memory=700_000,
        enable_prefix_caching=False)
    assert any(record.preempted for record in drafted.records)
    for record in drafted.records:
        if record.preempted:
            assert not any(record.plan.drafts) or record.counters.num_free_blocks >= 0


def test_the_prefix_cache_holds_accepted_tokens_alone(loaded, prompt):
    """A second request finds what the first has computed with drafts, and computes the same tokens behind it."""
    first = several(prompt, 1, temperature=0.0)
    subject = engine(loaded, "suffix", block_size=16)
    (done,) = play(subject, first).outputs.values()
    again = [Add("again", RequestSpec(prompt + list(done.tokens[:-1]), SamplingSpec(temperature=0.0, max_tokens=8)))]
    played = play(subject, again)
    assert max(max(cached_of(record), default=0) for record in played.records) > len(prompt)
    assert played.outputs["again"] == play(engine(loaded), again).outputs["again"]


def test_tenants_do_not_see_each_others_outputs(loaded, tokenizer):
    """What one tenant's outputs hold is drafted for no other, whose drafts are tokens of its own request."""
    text = tokenizer.encode("def read_lines(path):")
    params = SamplingSpec(temperature=0.0, max_tokens=40, ignore_eos=True)
    drafts = {}
    for salt in ("tenant", "other"):
        subject = engine(loaded, "suffix")
        play(subject, [Add("first", RequestSpec(text, params, salt="tenant"))])
        drafts[salt] = play(subject, [Add("second", RequestSpec(text, params, salt=salt))])
    assert drafts["tenant"].num_right > drafts["other"].num_right
    known = set(text)
    for record in drafts["other"].records:
        assert known.issuperset(token for row in record.plan.drafts for token in row)
        known.update(token for row in record.tokens for token in row)


@pytest.mark.parametrize("batching", ["static", "orca", "one_at_a_time"])
def test_disciplines_that_hold_rows(loaded, prompt, batching):
    same_with_drafts(loaded, several(prompt, 5, temperature=0.0), batching=batching)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation") / "events.jsonl"


@pytest.fixture(scope="module")
def live(log: Path) -> Iterator[Live]:
    with serving("--dtype", "float32", "--event-log", str(log), log=log.with_name("stderr")) as server:
        yield server


ASKED = {"prompt": "def read_lines(path):", "max_tokens": 48, "temperature": 0, "ignore_eos": True}


def ask(live: Live, path: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    response = live.client.post(path, json=ASKED | more)
    assert response.status_code == 200, response.text
    return response.json()


def predicted(text: str | list[dict[str, str]]) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def test_a_prediction_and_its_usage(live):
    plain = ask(live)
    text = plain["choices"][0]["text"]
    assert "completion_tokens_details" not in plain["usage"]
    for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
        drafted = ask(live, **predicted(content))
        assert drafted["choices"][0]["text"] == text
        details = drafted["usage"]["completion_tokens_details"]
        assert 0 < details["accepted_prediction_tokens"] <= drafted["usage"]["completion_tokens"]
    wrong = ask(live, **predicted("zebra " * 30))
    assert wrong["choices"][0]["text"] == text


def test_a_stop_string_inside_an_accepted_run_ends_text_and_counts(live):
    text = ask(live)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:6]
    plain, drafted = ask(live, stop=stop), ask(live, stop=stop, **predicted(text))
    assert drafted["choices"] == plain["choices"]
    used = drafted["usage"]
    assert used["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert used["completion_tokens_details"]["accepted_prediction_tokens"] <= used["completion_tokens"]


def test_a_prediction_in_a_chat_of_several_choices(live):
    chat = {"messages": [{"role": "user", "content": "def add(a, b):"}], "n": 3, "temperature": 0.7, "seed": 5,
            "max_tokens": 32}
    plain = live.client.post("/v1/chat/completions", json=chat).json()
    drafted = live.client.post("/v1/chat/completions", json=chat | predicted(
        plain["choices"][1]["message"]["content"])).json()
    assert [one["message"] for one in drafted["choices"]] == [one["message"] for one in plain["choices"]]
    assert drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


@pytest.mark.parametrize("prediction", [
    "text", {"type": "content"}, {"type": "other", "content": "x"},
    {"type": "content", "content": [{"type": "image"}]}])
def test_a_prediction_that_is_none_is_refused_by_name(live, prediction):
    response = live.client.post("/v1/completions", json=ASKED | {"prediction": prediction})
    assert response.status_code == 400 and "prediction" in response.text


def test_metrics_and_the_replay_of_the_log(live, log):
    from slotwise.observe import log_file

    ask(live, **predicted(ask(live)["choices"][0]["text"]))
    lines = live.client.get("/metrics").text.splitlines()
    counts = {name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"slotwise:{name}{{"))
              for name in (f"spec_decode_num_{what}_total" for what in (
                  "drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"))}
    drafts, tokens, accepted, by_position = counts.values()
    assert 0 < drafts <= tokens >= accepted == by_position > 0
    for _ in range(200):  # the log is written behind the responses
        entries = list(log_file.read_file(log))
        if any(entry.plan.drafts for entry in entries if isinstance(entry, StepRecord)):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the log holds no drafts")
    outcome = replay(entries)
    assert outcome.difference is None and outcome.steps > 0
