"""The offline API on the built-in model."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slotwise import LLM, SamplingParams
from slotwise.engine.config import ConfigError
from slotwise.observe import event_log
from slotwise.simulate.replay import replay

pytestmark = pytest.mark.slow

PROMPTS = ["def is_empty(self):", "def add(a, b):", "def close(self):"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_num_seqs=8)


def generate(llm: LLM, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def test_results_stand_in_the_order_of_the_prompts(llm: LLM):
    together = generate(llm, PROMPTS)
    assert [output.prompt for output in together] == PROMPTS
    assert [o.outputs[0].text for o in together] == [generate(llm, p)[0].outputs[0].text for p in PROMPTS]
    assert all(output.finished and output.outputs[0].finish_reason in ("stop", "length") for output in together)


def test_token_ids_and_dicts_are_prompts_too(llm: LLM):
    ids = llm.tokenizer.encode(PROMPTS[0])
    texts = {generate(llm, prompt)[0].outputs[0].text for prompt in (PROMPTS[0], ids, {"prompt_token_ids": ids})}
    assert len(texts) == 1


def test_the_text_is_that_of_the_tokens_without_the_end_token(llm: LLM):
    for output in generate(llm, PROMPTS):
        completion = output.outputs[0]
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] in llm.info.eos_token_ids


def test_a_stop_string_ends_the_text_before_it(llm: LLM):
    whole = generate(llm, PROMPTS[0])[0].outputs[0].text
    stop = whole[6:12]
    completion = generate(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop=(stop,)))[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == whole[: whole.index(stop)]
    assert stop in llm.tokenizer.decode(completion.token_ids)


def test_n_continuations_differ_and_a_seed_repeats_them(llm: LLM):
    params = SamplingParams(temperature=1.0, max_tokens=12, n=4, seed=5)
    first, second = (generate(llm, PROMPTS[1], params)[0].outputs for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert len({tuple(c.token_ids) for c in first}) > 1
    assert [c.index for c in first] == [0, 1, 2, 3]


def test_logprobs_come_with_each_token(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
    completion = generate(llm, PROMPTS[0], params)[0].outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids) == 8
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry.rank == 1 and entry.top_ids[0] == token and entry.logprob == entry.top_logprobs[0] <= 0


def test_a_stream_yields_the_same_text(llm: LLM):
    assert "".join(llm.stream(PROMPTS[1], GREEDY)) == generate(llm, PROMPTS[1])[0].outputs[0].text


def test_whoever_stops_listening_leaves_nothing_behind(llm: LLM):
    stream = llm.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert generate(llm, PROMPTS[1])[0].outputs[0].text
    assert not llm._engine.has_work


def test_two_generations_may_take_turns(llm: LLM):
    expected = [generate(llm, prompt)[0].outputs[0].text for prompt in PROMPTS[:2]]
    first = llm.stream(PROMPTS[0], GREEDY)
    begun = next(first)
    assert "".join(llm.stream(PROMPTS[1], GREEDY)) == expected[1]
    assert begun + "".join(first) == expected[0]


def test_several_threads_may_generate_at_once(llm: LLM):
    prompts = [f"def {name}(self):" for name in ("open", "close", "read", "write", "seek", "tell", "flush", "size")]
    alone = [generate(llm, prompt)[0].outputs[0].token_ids for prompt in prompts]
    for _ in range(3):
        with ThreadPoolExecutor(len(prompts)) as threads:
            together = list(threads.map(lambda prompt: generate(llm, prompt)[0].outputs[0].token_ids, prompts))
        assert together == alone
    assert not llm._readers and not llm._engine.has_work


def test_chat_goes_through_the_template(llm: LLM):
    answer = llm.chat([{"role": "user", "content": PROMPTS[0]}], GREEDY, use_tqdm=False)
    assert answer[0].outputs[0].text == generate(llm, PROMPTS[0])[0].outputs[0].text


@pytest.mark.parametrize(("prompt", "says"), [
    ([1] * 5000, "at most 1024"), ([5, 2.0], r"a prompt\[1\] must be a token id, a whole number, not 2.0"),
    ({"prompt_token_ids": [5, True]}, r"prompt_token_ids\[1\] must be .* not True"), ([[1.5]], r"a prompt\[0\]"),
    ({"prompt_token_ids": [5, 7, "8"]}, r"prompt_token_ids\[2\] must be .* not '8'"), ([2.0, 5], "not 2.0"),
    ({"prompt_token_ids": 5}, "prompt_token_ids must be a list"), ({"prompt_token_ids": "ab"}, "must be a list"),
    ([10**7], "vocabulary"), ([], "no tokens"), ({"text": "hi"}, "prompt_token_ids")])
def test_a_prompt_that_can_never_run_is_refused_before_anything_starts(llm: LLM, prompt, says):
    with pytest.raises(ValueError, match=says):
        generate(llm, [prompt, PROMPTS[0]])
    assert not llm._engine.has_work


def test_parameters_must_match_the_prompts(llm: LLM):
    with pytest.raises(ValueError, match="3 prompts but 2"):
        generate(llm, PROMPTS, [GREEDY, GREEDY])


def test_an_unknown_setting_is_named():
    with pytest.raises(ConfigError, match="max_seqs"):
        LLM(max_seqs=3)


def test_what_it_does_can_be_logged_and_replayed(tmp_path: Path):
    llm = LLM(event_log=tmp_path / "log", max_num_seqs=2)
    generate(llm, PROMPTS, SamplingParams(temperature=1.0, max_tokens=20, n=2, stop=("e",)))
    del llm  # so that the rest is written
    gc.collect()
    outcome = replay(event_log.read_file(tmp_path / "log"))
    assert outcome.difference is None and outcome.requests == 2 * len(PROMPTS) and outcome.steps > 5
