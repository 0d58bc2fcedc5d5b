"""Packed weights on disk through the whole engine: the same answers, and one file for one content."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.checkpoints import make, prompts
from support.gguf_files import write

from slotwise import LLM, SamplingParams
from slotwise.compute.kernels.cpu.products import packed_file
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


def test_what_cannot_be_kept_is_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is for quantized checkpoints: the weights of .*dense are plain"):
        answers(dense, packed_weights_cache=1.0)
    with pytest.raises(ConfigError, match="packed_weights_cache needs device cpu, not reference"):
        answers(write(dense, tmp_path / "one.gguf", "Q8_0"), packed_weights_cache=1.0, device="reference")
    with pytest.raises(ConfigError, match="packed_weights_cache must be a number from 0"):
        answers(dense, packed_weights_cache=-1.0)
    assert not kept()
