"""Prompts are checked against the engine attached last."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from engine.test_client import INFO

from slotwise import builtin
from slotwise.server.errors import ApiError
from slotwise.server.prompts import Prompts
from slotwise.text.tokenizer import Tokenizer


def test_a_replacement_engine_with_a_smaller_cache_bounds_prompts() -> None:
    engines = [INFO]
    prompts = Prompts(Tokenizer.load(builtin.path()), None, lambda: engines[-1])
    prompts.check([INFO.vocab_size - 1], "prompt")
    assert prompts.max_tokens(40, 10, None) == 40
    engines.append(msgspec.structs.replace(
        INFO, vocab_size=INFO.vocab_size - 1, limits=replace(INFO.limits, num_blocks=4)))
    with pytest.raises(ApiError):
        prompts.check([INFO.vocab_size - 1], "prompt")
    with pytest.raises(ApiError):
        prompts.max_tokens(40, 10, None)
