"""The offline API on the built-in model."""

from __future__ import annotations

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tqdm import tqdm

from slotwise import LLM, SamplingParams, TextPrompt, TokensPrompt
from slotwise.engine.config import ConfigError
from slotwise.measure.simulate.replay import replay
from slotwise.observe import log_file
from slotwise.observe.offline import Counter, Gauge, Histogram
from slotwise.offline.arguments import METHODS

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
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entries) == 3 and next(iter(entries)) == token and entries[token].rank == 1
        assert [entry.rank for entry in entries.values()] == [1, 2, 3]
        assert 0 >= entries[token].logprob == max(entry.logprob for entry in entries.values())
        assert all(entry.decoded_token == llm.tokenizer.token_text(one) for one, entry in entries.items())
    own = [entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(own))
    plain = generate(llm, PROMPTS[0])[0].outputs[0]
    assert plain.logprobs is None and plain.cumulative_logprob is None


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
    assert not llm._choices and not llm._engine.has_work


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
    with pytest.raises(ConfigError, match="there is no argument 'max_seqs'; did you mean max_num_seqs"):
        LLM(max_seqs=3)


def test_a_dict_may_hold_a_text_and_ids_beside_it(llm: LLM):
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = generate(llm, PROMPTS[0])[0]
    for prompt in (TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=ids, prompt=PROMPTS[0])):
        (output,) = generate(llm, prompt)
        assert (output.prompt, output.prompt_token_ids) == (PROMPTS[0], ids)
        assert output.outputs == expected.outputs
    assert generate(llm, TokensPrompt(prompt_token_ids=ids))[0].prompt is None and generate(llm, []) == []


def test_a_prefix_is_found_only_by_its_salt_and_until_it_is_forgotten(llm: LLM):
    ids = [5 + i % 50 for i in range(200)]

    def cached(**more: str) -> int | None:
        return generate(llm, TokensPrompt(prompt_token_ids=ids, **more))[0].num_cached_tokens

    assert [cached(), cached(cache_salt="a")] == [0, 0]
    known = cached()
    assert known and known >= 128 and cached(cache_salt="a") == known and cached(cache_salt="b") == 0
    assert llm.reset_prefix_cache() is True
    assert [cached(), cached(cache_salt="a"), cached(), cached(cache_salt="a")] == [0, 0, known, known]
    with pytest.raises(ValueError, match="reset_connector"):
        llm.reset_prefix_cache(reset_connector=True)


def test_outputs_have_times_and_counts(llm: LLM):
    (output,) = generate(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, n=2))
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.scheduled_ts < metrics.first_token_ts < metrics.last_token_ts
    assert metrics.last_token_ts <= metrics.finished_time and metrics.num_generation_tokens == 10
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.arrival_time
    assert [completion.finished() for completion in output.outputs] == [True, True]


def test_the_reason_of_a_stop_is_its_string_or_its_id_and_none_for_the_end_token(llm: LLM):
    whole = generate(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert (whole.finish_reason, whole.stop_reason) == ("stop", None)
    middle = whole.token_ids[3]
    stopped = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[middle])
    found = generate(llm, PROMPTS[0], stopped)[0].outputs[0]
    assert (found.finish_reason, found.stop_reason) == ("stop", middle)
    assert found.token_ids == whole.token_ids[: whole.token_ids.index(middle) + 1]
    assert found.text == llm.tokenizer.decode(found.token_ids[:-1])
    shown = SamplingParams(temperature=0, max_tokens=24, stop=whole.text[6:9], include_stop_str_in_output=True)
    assert generate(llm, PROMPTS[0], shown)[0].outputs[0].text == whole.text[:9]


def test_special_tokens_have_a_text_where_it_is_wanted(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, skip_special_tokens=False)
    completion = generate(llm, PROMPTS[0], params)[0].outputs[0]
    assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=False)
    assert completion.text != generate(llm, PROMPTS[0], replace(params, skip_special_tokens=True))[0].outputs[0].text
    bare = generate(llm, PROMPTS[0], replace(params, detokenize=False))[0].outputs[0]
    assert bare.text == "" and bare.token_ids == completion.token_ids


def test_bad_words_are_not_written(llm: LLM):
    free = generate(llm, PROMPTS[0])[0].outputs[0].text
    word = free.split()[0]
    kept = generate(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, bad_words=[word]))[0].outputs[0].text
    assert kept.split() and kept.split()[0] != word


def test_parameters_that_were_changed_are_checked_when_they_are_used(llm: LLM):
    params = llm.get_default_sampling_params()
    params.max_tokens = 3
    params.ignore_eos = True
    assert len(generate(llm, PROMPTS[0], params)[0].outputs[0].token_ids) == 3
    params.top_p = 7
    with pytest.raises(ValueError, match="top_p: must be a number"):
        generate(llm, PROMPTS[0], params)
    with pytest.raises(ValueError, match=r"must be slotwise\.SamplingParams, not dict"):
        generate(llm, PROMPTS[0], {"max_tokens": 3})
    assert not llm._engine.has_work


def test_an_earlier_priority_runs_first():
    llm = LLM(max_num_seqs=1, scheduling_policy="priority", max_model_len=128, kv_cache_memory=8 << 20)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, False, None, [5, 0, -5])
    began = [output.metrics.scheduled_ts for output in outputs]
    assert began == sorted(began, reverse=True)
    assert len(llm.generate(PROMPTS, params, False, priority=3)) == 3
    with pytest.raises(ValueError, match="3 prompts but 2 priority"):
        llm.generate(PROMPTS, params, False, priority=[1, 2])


def test_progress_is_a_bar_of_any_kind(llm: LLM, capsys: pytest.CaptureFixture[str]):
    told = []

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            told.append(n)
            return super().update(n)

    llm.generate(PROMPTS, GREEDY, Bar)
    assert sum(told) == 3 and "3/3" in capsys.readouterr().err
    llm.chat([{"role": "user", "content": PROMPTS[0]}], GREEDY, False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_not_supported_says_what_to_do(llm: LLM, name: str):
    with pytest.raises(NotImplementedError, match=re.escape(f"LLM.{name} is not supported: {METHODS[name]}")):
        getattr(llm, name)(["a prompt"], use_tqdm=False)


@pytest.mark.parametrize(("given", "error", "says"), [
    ({"lora_requests": None}, TypeError, "no argument 'lora_requests'; did you mean lora_request"),
    ({"guided_options_request": {}}, ValueError, "guided_options_request {} is not supported"),
    ({"mm_processor_kwargs": {"crop": 1}}, ValueError, "mm_processor_kwargs")])
def test_an_argument_of_a_call_is_refused_by_name(llm: LLM, given, error, says):
    with pytest.raises(error, match=says):
        llm.generate(PROMPTS, GREEDY, False, **given)
    neutral = {"lora_request": None, "tokenization_kwargs": {}, "mm_processor_kwargs": None}
    assert len(llm.generate(PROMPTS, GREEDY, False, **neutral)) == 3


def test_metrics_are_counted_where_they_are_wanted(llm: LLM):
    with pytest.raises(RuntimeError, match="disable_log_stats=False"):
        llm.get_metrics()
    counted = LLM(disable_log_stats=False, served_model_name=["toy", "other"], max_num_seqs=2, max_model_len=128,
                  kv_cache_memory=8 << 20)
    outputs = generate(counted, PROMPTS, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    found = {metric.name: metric for metric in counted.get_metrics()}
    tokens, running = found["slotwise:generation_tokens"], found["slotwise:num_requests_running"]
    assert isinstance(tokens, Counter) and isinstance(running, Gauge)
    assert (tokens.value, running.value, tokens.labels) == (15, 0, {"model_name": "toy"})
    prompts = found["slotwise:prompt_tokens"]
    assert isinstance(prompts, Counter) and prompts.value == sum(len(output.prompt_token_ids) for output in outputs)
    lengths = found["slotwise:request_generation_tokens"]
    assert isinstance(lengths, Histogram) and (lengths.count, lengths.sum) == (3, 15)
    assert lengths.buckets["2.0"] == 0 and lengths.buckets["5.0"] == 3 == lengths.buckets["+Inf"]


def test_what_it_does_can_be_logged_and_replayed(tmp_path: Path):
    llm = LLM(event_log=tmp_path / "log", max_num_seqs=2)
    generate(llm, PROMPTS, SamplingParams(temperature=1.0, max_tokens=20, n=2, stop=("e",)))
    del llm  # so that the rest is written
    gc.collect()
    outcome = replay(log_file.read_file(tmp_path / "log"))
    assert outcome.difference is None and outcome.requests == 2 * len(PROMPTS) and outcome.steps > 5
