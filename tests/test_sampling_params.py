"""Sampling parameters with vLLM's names: each is obeyed, neutral or refused, and all may be changed."""

from __future__ import annotations

import pickle
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from slotwise import RequestOutputKind, SamplingParams, StructuredOutputsParams
from slotwise.compat.vllm import ANY
from slotwise.core.params import InvalidParams, SamplingSpec
from slotwise.offline.sampling_params import NAMES, UNSUPPORTED

sys.path.append(str(Path(__file__).resolve().parents[1]))  # `docs` is run from the repository's root

from docs.generate.protocols import NEUTRAL, OBEYED, names, offline_treatment

LISTED = names("vllm offline", "SamplingParams")


@pytest.mark.parametrize("name", LISTED)
def test_a_parameter_of_vllm_has_one_treatment(name: str) -> None:
    done, accepted = offline_treatment("SamplingParams", name)
    SamplingParams(**{name: None})
    if done == OBEYED:
        assert name not in UNSUPPORTED
        return
    assert (done == NEUTRAL) == bool(accepted)
    for value in accepted if accepted is not ANY else (1, "x"):
        assert SamplingParams(**{name: value}).for_engine() == SamplingSpec()
    if accepted is not ANY:
        with pytest.raises(InvalidParams, match=f"^{name}: is not supported; ") as wrong:
            SamplingParams(**{name: {"neither": "this"}})
        assert wrong.value.param == name


def test_the_list_has_every_parameter_that_is_not_implemented() -> None:
    assert set(UNSUPPORTED) - {"use_beam_search", "length_penalty"} <= set(LISTED)  # of vLLM before 0.6.6
    with pytest.raises(KeyError):
        offline_treatment("SamplingParams", "no_such_parameter")


def test_the_engine_gets_every_parameter_that_it_has() -> None:
    given: dict[str, Any] = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_tokens": 9, "min_tokens": 2,
        "stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": True, "seed": 4, "logprobs": 5, "prompt_logprobs": 6,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": {8: 1.0},
        "allowed_token_ids": [8, 9], "bad_words_token_ids": [[1, 2]]}
    assert set(given) == {one.name for one in fields(SamplingSpec)} - {"grammar", "thinking"} <= set(NAMES)
    tuples = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    params = SamplingParams(**given).for_engine([[5]])
    assert params == SamplingSpec(**given | tuples | {"bad_words_token_ids": ((5,), (1, 2))})
    assert SamplingParams().for_engine() == SamplingSpec()
    assert SamplingParams(max_tokens=None).for_engine().max_tokens is None


@pytest.mark.parametrize(("given", "says"), [
    ({"temperature": -1}, "temperature: must be"), ({"temperature": float("nan")}, "temperature"),
    ({"temperature": "1"}, "temperature"), ({"top_p": 1e-31}, "top_p"), ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n: must be"), ({"n": True}, "n: must be"), ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 20}, "min_tokens"), ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"),
    ({"stop": [""]}, "stop: each"), ({"stop": 5}, "stop: must be a list"), ({"stop": [5]}, "stop"),
    ({"stop_token_ids": "ab"}, "stop_token_ids: must be a list, not 'ab'"), ({"stop_token_ids": [1.5]}, "stop_token"),
    ({"bad_words": "ab"}, "bad_words: must be a list"), ({"bad_words": [""]}, "bad_words: each"),
    ({"logit_bias": {1: 101}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"), ({"seed": 2**63}, "seed"),
    ({"stream_interval": 0}, "stream_interval: must be"), ({"output_kind": 1}, "output_kind: must be a RequestOut"),
    ({"detokenize": 0}, "detokenize: must be a bool"), ({"stop": "a", "detokenize": False}, "stop: needs detokenize"),
    ({"best_of": 2}, "best_of: only the value of n"), ({"temprature": 0}, "temprature: .* did you mean temperature?"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs: there is no 'regx'"),
    ({"structured_outputs": StructuredOutputsParams(regex="a", choice=["b"])}, "structured_outputs: only one"),
    ({"min_tokens": 2, "guided_decoding": StructuredOutputsParams(regex="a")}, "min_tokens: not available with guided"),
    ({"structured_outputs": 5}, "structured_outputs: must be a StructuredOutputsParams"),
    ({"zzzz": 0}, "zzzz: there is no such parameter$"), ({"repetition_penalty": 0}, "repetition_penalty")])
def test_what_is_wrong_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParams, match=says) as wrong:
        SamplingParams(**given)
    assert wrong.value.param == next(iter(given))


def test_a_clone_shares_nothing_and_both_may_be_changed() -> None:
    params = SamplingParams(stop="a", logit_bias={1: 2.0}, output_kind=RequestOutputKind.DELTA, best_of=1)
    clone = params.clone()
    assert clone == params and pickle.loads(pickle.dumps(params)) == params
    assert isinstance(clone.stop, list) and clone.logit_bias is not None
    clone.stop.append("b")
    clone.logit_bias[5] = 1.0
    clone.temperature = 0.0
    assert params.stop == ["a"] and params.logit_bias == {1: 2.0} and params.temperature == 1.0
    assert clone.for_engine().stop == ("a", "b") and clone.for_engine().logit_bias == {1: 2.0, 5: 1.0}
    with pytest.raises(AttributeError):
        clone.temprature = 0.5  # type: ignore[attr-defined]


def test_none_is_a_default_and_vllms_spellings_are_understood() -> None:
    assert SamplingParams.from_optional(
        n=None, temperature=None, top_p=None, presence_penalty=None, max_tokens=None, stop=None,
        logit_bias={"7": 500, 8: -3}) == SamplingParams(max_tokens=None, logit_bias={7: 100.0, 8: -3})
    assert SamplingParams.from_optional() == SamplingParams()
    params = SamplingParams(seed=-1, logprobs=True, prompt_logprobs=True, stop_token_ids=(1, 2), stop=None)
    assert (params.seed, params.logprobs, params.prompt_logprobs) == (None, 1, 1)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [1, 2], [])


def test_there_are_no_positions() -> None:
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # type: ignore[call-arg, misc]
