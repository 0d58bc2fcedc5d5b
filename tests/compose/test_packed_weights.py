"""Packed weights on disk through the whole engine: the same answers, and one file for one content."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make, prompts
from support.gguf_files import write

from slotwise import LLM, SamplingParams
from slotwise.compose import engine_builder
from slotwise.compute.kernels.cpu.products import packed_file
from slotwise.compute.model.calibration import read_calibrated
from slotwise.compute.model.decoder import Decoder
from slotwise.engine.config import ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SMALL = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64, "kv_cache_memory": 4_000_000}


@pytest.fixture
def dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_file, "home", lambda: tmp_path / "packed-weights")
    return make("llama3", tmp_path / "dense", tokenizer=True, dtype="bfloat16", hidden_size=128, intermediate_size=256)


def answers(model: Path, **settings: object) -> list[list[int]]:
    llm = LLM(model=str(model), **SMALL, **settings)
    asked = [{"prompt_token_ids": ids} for ids in prompts([5, 40])]
    return [list(output.outputs[0].token_ids) for output in llm.generate(asked, GREEDY, use_tqdm=False)]


def kept() -> list[Path]:
    return sorted(packed_file.home().glob("*"))


def test_answers_are_the_same_and_a_content_has_one_file(dense: Path, tmp_path: Path) -> None:
    file = write(dense, tmp_path / "one.gguf", "Q8_0")
    expected = answers(file)
    assert not kept()
    assert answers(file, packed_weights_cache=1.0) == expected
    (path,) = kept()
    made = path.stat()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(file, elsewhere)
    assert answers(elsewhere / file.name, packed_weights_cache=1.0) == expected
    assert kept() == [path] and (path.stat().st_ino, path.stat().st_size) == (made.st_ino, made.st_size)
    answers(write(dense, tmp_path / "two.gguf", "Q4_0"), packed_weights_cache=1.0)
    assert len(kept()) == 2


def test_weights_in_int4_are_calibrated_once(
    dense: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another type of weights, or disk space of 0, calibrates again; where memory is short, a warning says so."""
    calls: list[bool] = []

    def counted(*arguments: Any) -> Decoder:
        calls.append(True)
        return read_calibrated(*arguments)

    monkeypatch.setattr(engine_builder, "read_calibrated", counted)
    first = answers(dense, quantization="int4")
    assert answers(dense, quantization="int4") == first and len(calls) == len(kept()) == 1
    answers(dense, quantization="int4", dtype="float32")
    assert len(calls) == len(kept()) == 2
    monkeypatch.setattr(engine_builder, "_calibration_obstacle", lambda *_: "that takes 9 GiB")
    assert answers(dense, quantization="int4") == first and not caplog.records, "kept weights need no calibration"
    shutil.rmtree(packed_file.home())
    answers(dense, quantization="int4")
    assert "rounded without calibration, which loses more, because that takes 9 GiB" in caplog.text
    assert len(calls) == 2 and not kept()
    monkeypatch.undo()
    monkeypatch.setattr(packed_file, "home", lambda: dense.parent / "packed-weights")
    assert answers(dense, quantization="int4", packed_weights_cache=0.0) == first and not kept()


def test_what_cannot_be_kept_is_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is for quantized weights: those of .*dense are plain"):
        answers(dense, packed_weights_cache=1.0)
    with pytest.raises(ConfigError, match="packed_weights_cache needs device cpu, not reference"):
        answers(write(dense, tmp_path / "one.gguf", "Q8_0"), packed_weights_cache=1.0, device="reference")
    with pytest.raises(ConfigError, match="packed_weights_cache must be a number from 0"):
        answers(dense, packed_weights_cache=-1.0)
    assert not kept()
