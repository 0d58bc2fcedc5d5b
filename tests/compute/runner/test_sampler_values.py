"""Sampling parameters of every value: refused by name, or a token comes of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from slotwise.compute.runner.sampling.cpu_sampler import Sampler
from slotwise.core.params import BIAS, RANGES, InvalidParams, SamplingSpec
from slotwise.core.record import NewRequest
from slotwise.core.request import RequestSpec

VALUES: tuple[Any, ...] = (
    0, -1, 1, True, False, None, 0.5, -0.5, 1.0, 5e-324, 1e-320, 1e-45, 1e-38, 1e-30, 0.01, 100, 1e38, 1e308, -1e308,
    math.inf, -math.inf, math.nan, 2**63 - 1, 2**63, -(2**63), 2**70, 10**400, "1", "x", (), [1], {}, 1 + 2j)
VOCAB = 50
LARGE = 40.0  # of logits: as large as models have


def sampled(params: SamplingSpec) -> int:
    sampler = Sampler(1, VOCAB)
    sampler.join(NewRequest("r", 0, RequestSpec((1, 2, 3), params, 5), ()))
    logits = torch.linspace(-LARGE, LARGE, VOCAB)[None]
    for position in (3, 4, 5):
        (token,) = sampler.sample(logits, [0], [position]).tokens
    return token


@pytest.mark.parametrize("name", RANGES)
def test_a_value_is_refused_by_name_or_gives_a_token(name: str) -> None:
    allowed = RANGES[name]
    values = [*VALUES, allowed.least, allowed.most]
    taken = 0
    for value in values:
        try:
            params = SamplingSpec(**{"max_tokens": None} | {name: value})
        except InvalidParams as error:
            assert error.param == name and str(error).startswith(f"{name}: ") and len(str(error)) < 200
            continue
        taken += 1
        assert 0 <= sampled(params) < VOCAB, value
    assert taken >= 2, "the ends of the range are part of it"


def test_the_ends_of_all_ranges_together_give_tokens() -> None:
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for ends in itertools.product(*[(RANGES[name].least, RANGES[name].most) for name in names]):
        for bias in (BIAS.least, BIAS.most):
            params = SamplingSpec(**dict(zip(names, ends, strict=True)), logit_bias={1: bias, 49: -bias})
            assert 0 <= sampled(params) < VOCAB, params


@pytest.mark.parametrize("bias", [{2**70: 1}, {-1: 1}, {1.5: 1}, {"1": 1}, {True: 1}, {1: math.nan}, {1: math.inf},
                                  {1: 1e308}, {1: "1"}, {1: None}, {1: True}, [1], 5, dict.fromkeys(range(1025), 1)])
def test_a_bias_that_means_nothing_is_refused(bias: Any) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingSpec(logit_bias=bias)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(("name", "value"), [
    ("stop", 5), ("stop", ("",)), ("stop", ("x" * 1025,)), ("stop", ("x",) * 65), ("stop", (5,)),
    ("stop_token_ids", (-1,)), ("stop_token_ids", (2**70,)), ("stop_token_ids", (1.5,)), ("stop_token_ids", "ab"),
    ("stop_token_ids", (True,)), ("stop_token_ids", tuple(range(257))), ("allowed_token_ids", 5),
    ("allowed_token_ids", (-1,)), ("allowed_token_ids", tuple(range(4097))), ("bad_words_token_ids", 5),
    ("bad_words_token_ids", (5,)), ("bad_words_token_ids", ((),)), ("bad_words_token_ids", ("ab",)),
    ("bad_words_token_ids", ((1,),) * 257), ("bad_words_token_ids", ((1,) * 1025,))])
def test_tokens_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingSpec(**{name: value})
    assert caught.value.param == name


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingSpec(temperature=np.float32(0.5), top_k=np.int64(4), logit_bias={np.int32(1): np.float32(2)})
    assert params == SamplingSpec(temperature=0.5, top_k=4, logit_bias={1: 2.0})
    assert type(params.temperature) is float and type(params.top_k) is int
    assert params.check_vocabulary(2) is None
    with pytest.raises(InvalidParams, match="logit_bias: token ids must be between 0 and 0"):
        params.check_vocabulary(1)
    for params in (SamplingSpec(allowed_token_ids=(0, 1)), SamplingSpec(bad_words_token_ids=((0,), (0, 1)))):
        assert params.check_vocabulary(2) is None
        with pytest.raises(InvalidParams, match="token ids must be between 0 and 0"):
            params.check_vocabulary(1)


@pytest.mark.parametrize(("fields", "is_possible"), [
    ({"allowed_token_ids": (3,), "bad_words_token_ids": ((3,),)}, False),
    ({"allowed_token_ids": (3, 4), "bad_words_token_ids": ((3,), (4, 4))}, True),
    ({"allowed_token_ids": (3,), "stop_token_ids": (3,), "min_tokens": 1}, False),
    ({"allowed_token_ids": (3,), "stop_token_ids": (3,)}, True),
    ({"allowed_token_ids": (2,), "min_tokens": 1}, False),
    ({"allowed_token_ids": (2,), "min_tokens": 1, "ignore_eos": True}, True),
    ({"bad_words_token_ids": tuple([(token,) for token in range(8)])}, False),
    ({"bad_words_token_ids": tuple([(token,) for token in range(7)])}, True)])
def test_parameters_that_leave_no_token_are_refused(fields: dict[str, Any], is_possible: bool) -> None:
    params = SamplingSpec(**fields)
    if is_possible:
        params.check_vocabulary(8, (2,))
        return
    with pytest.raises(InvalidParams, match="leave none of the tokens that are allowed"):
        params.check_vocabulary(8, (2,))
