from __future__ import annotations

import pytest

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.disciplines.disciplines import Chunked, Dynamic, Inline, OneAtATime, Orca, PromptsAlone, Static
from slotwise.engine.config import ConfigError, EngineConfig


@pytest.mark.parametrize(("settings", "discipline"), [
    ({}, Chunked), ({"prefill": "chunked"}, Chunked), ({"prefill": "inline"}, Inline),
    ({"prefill": "alone"}, PromptsAlone),
    ({"kind": "orca"}, Orca), ({"kind": "one_at_a_time"}, OneAtATime), ({"kind": "static"}, Static),
    ({"kind": "dynamic", "batch_size": 2, "max_wait_ms": 0}, Dynamic),
])
def test_settings_name_a_discipline(settings, discipline):
    assert type(Batching(**settings).discipline(8)) is discipline


@pytest.mark.parametrize(("settings", "says"), [
    ({"kind": "continous"}, "batching must be one of continuous, orca"),
    ({"prefill": "late"}, "prefill must be one of chunked"),
    ({"batch_size": 4}, "batch_size belongs to batching static and dynamic, not to continuous"),
    ({"kind": "static", "prefill": "inline"}, "prefill belongs to batching continuous"),
    ({"kind": "static", "max_wait_ms": 5}, "max_wait_ms belongs to batching dynamic, not to static"),
    ({"kind": "orca", "long_prefill_token_threshold": 5}, "belongs to batching continuous, not to orca"),
    ({"prefill": "inline", "long_prefill_token_threshold": 5}, "cuts prompts, and prefill inline does not"),
    ({"kind": "static", "batch_size": 0}, "batch_size must be a whole number from 1 to"),
    ({"kind": "dynamic", "max_wait_ms": -1}, "max_wait_ms must be a number from 0 to"),
    ({"long_prefill_token_threshold": -1}, "must be a whole number from 0 to"),
    ({"kind": "static", "batch_size": 9}, "a batch_size of 9 needs as many slots, and max_num_seqs is 8"),
])
def test_contradictions_are_refused_in_one_line(settings, says):
    with pytest.raises(ValueError) as caught:
        Batching(**settings).discipline(8)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_engine_is_not_configured_with_a_contradiction():
    with pytest.raises(ConfigError, match="batch_size of 9"):
        EngineConfig.of(model="any", batching="static", batch_size=9, max_num_seqs=8)
