from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from observe.played import LIMITS

from slotwise.batching.settings import Batching
from slotwise.compose.step_times import remembered
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import EngineInfo
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.step_time import Work

ALONE = Work(1, 1, 10, 0.0)
INFO = EngineInfo("toy", "cpu", "bfloat16", 100, LIMITS, Scheduling(Batching(), 6, 16), ())


def test_what_one_server_learned_the_next_one_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, layers in (("small", 2), ("large", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"num_hidden_layers": {layers}}}')
    config = EngineConfig(model=str(tmp_path / "small"))
    with remembered(config, INFO) as times:
        assert not times.knows
    assert not (tmp_path / "cache").exists(), "nothing was learned, so nothing is kept"
    with pytest.raises(KeyboardInterrupt), remembered(config, INFO) as times:
        times.learn(ALONE, 0.004)
        raise KeyboardInterrupt
    with remembered(config, INFO) as times:
        assert times.seconds(ALONE) == pytest.approx(0.004, rel=0.01)
    with remembered(replace(config, model=str(tmp_path / "large")), INFO) as times:
        assert not times.knows
    with remembered(config, msgspec.structs.replace(INFO, dtype="float32")) as times:
        assert not times.knows
    with remembered(config, msgspec.structs.replace(INFO, threads=2)) as times:
        assert not times.knows
