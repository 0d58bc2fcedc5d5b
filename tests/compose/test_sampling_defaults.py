"""Default sampling parameters: where they come from, and what is refused or told."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slotwise import builtin
from slotwise.compose.model_defaults import IGNORED, OBEYED, announce, read_defaults
from slotwise.core.params import SamplingSpec
from slotwise.core.request_defaults import SamplingDefaults
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.errors import CheckpointError, OneLineError

ALL = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 77}
GIVEN = {name: value for name, value in ALL.items() if name != "max_new_tokens"} | {"max_tokens": 77}
# Fields of transformers' class without effect on the tokens of one sampled answer of a decoder.
WITHOUT_EFFECT = {
    "early_stopping", "length_penalty",  # of beams
    "use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",  # of speculation
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "continuous_batching_config", "prefill_chunk_size", "low_memory",  # of how it is computed
    "renormalize_logits", "remove_invalid_values", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "transformers_version",
    "pad_token_id", "bos_token_id", "decoder_start_token_id",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def read(folder: Path, setting: str = "auto", override: Any = None, **fields: Any) -> SamplingDefaults:
    """The defaults of a checkpoint whose file has these fields."""
    if fields:
        (folder / "generation_config.json").write_text(json.dumps(fields))
    return read_defaults(EngineConfig(str(folder), generation_config=setting), override)


def named(folder: Path, **fields: Any) -> str:
    path = folder.parent / "named.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_no_file_and_an_empty_one_change_nothing(folder: Path) -> None:
    assert read(folder) == SamplingDefaults() == read(folder, eos_token_id=2, transformers_version="5.0.0")
    assert SamplingDefaults().given == {}


def test_all_fields_of_the_file_are_defaults(folder: Path) -> None:
    defaults = read(folder, **ALL)
    assert defaults.given == GIVEN and SamplingSpec(**defaults.given) == SamplingSpec(**GIVEN)
    assert defaults.max_tokens_limit is None and defaults.limited(1000) == 1000 and not defaults.ignored
    assert str(folder / "generation_config.json") == defaults.source


def test_null_counts_as_absent(folder: Path) -> None:
    assert read(folder, **dict.fromkeys(ALL)) == SamplingDefaults()


def test_vllm_leaves_the_files_defaults_out(folder: Path) -> None:
    assert read(folder, "vllm", **ALL, num_beams=4) == SamplingDefaults()
    assert read(folder, "vllm", {"top_k": 3}, **ALL).given == {"top_k": 3}


def test_another_file_replaces_the_checkpoints(folder: Path) -> None:
    setting = named(folder, temperature=0.3, max_new_tokens=9)
    defaults = read(folder, setting, **ALL)
    assert defaults.given == {"temperature": 0.3, "max_tokens": 9} and defaults.source == setting


def test_an_override_wins_over_the_file_and_null_is_neutral(folder: Path) -> None:
    defaults = read(folder, "auto", {"temperature": 1.5, "top_p": None}, **ALL)
    expected = GIVEN | {"temperature": 1.5}
    del expected["top_p"]
    assert defaults.given == expected and SamplingSpec(**defaults.given).top_p == 1.0
    assert defaults.source.endswith("generation_config.json and override_generation_config")


@pytest.mark.parametrize(("setting", "override", "limit"), [
    ("auto", {}, None), ("auto", {"max_new_tokens": 5}, 5), ("vllm", {"max_new_tokens": 5}, 5),
    ("named", {}, 9), ("named", {"max_new_tokens": 12}, 12), ("named", {"max_new_tokens": None}, None)])
def test_what_the_operator_gives_bounds_every_request(
        setting: str, override: dict[str, Any], limit: int | None, folder: Path) -> None:
    setting = named(folder, max_new_tokens=9) if setting == "named" else setting
    defaults = read(folder, setting, override, **ALL)
    assert defaults.max_tokens_limit == limit
    assert defaults.limited(10**6) == (limit or 10**6) and defaults.limited(2) == 2 and defaults.limited(None) is None


BAD: tuple[tuple[str, Any], ...] = (
    ("temperature", float("nan")), ("temperature", -1), ("temperature", "0.5"), ("temperature", True),
    ("temperature", [0.5]), ("top_p", float("inf")), ("top_p", 1e-31), ("top_p", 1.5), ("top_k", 2.5), ("top_k", -2),
    ("top_k", 10**30), ("min_p", 2), ("min_p", {"__float__": "NaN"}), ("repetition_penalty", 0),
    ("repetition_penalty", float("-inf")), ("max_new_tokens", 0), ("max_new_tokens", 1.0),
    ("max_new_tokens", "x" * 999))


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_is_no_number_or_out_of_range_is_refused_by_file_and_field(name: str, value: Any, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} must be a"):
        read(folder, **{name: value})
    with pytest.raises(ConfigError, match=f"override_generation_config: {name} must be a"):
        read(folder, "vllm", {name: value})
    assert read(folder, "vllm") == SamplingDefaults(), "the way out that the message names"


@pytest.mark.parametrize(("override", "told"), [
    ({"max_tokens": 5}, "max_tokens is not supported; these are: temperature, "),
    ({"num_beams": 2}, "num_beams is not"),
    ({1: 2}, "1 is not supported"), ([1], "must be an object of fields"), ("x", "must be an object of fields")])
def test_an_override_of_something_else_is_refused(override: Any, told: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        read(folder, "auto", override)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_a_file_that_is_no_object_is_refused(content: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(OneLineError, match=r"generation_config\.json"):
        read(folder)


@pytest.mark.parametrize(("fields", "ignored"), [
    ({"num_beams": 4, "no_repeat_ngram_size": 3}, ("num_beams", "no_repeat_ngram_size")),
    ({"do_sample": False}, ("do_sample",)), ({"max_length": 40}, ("max_length",)),
    ({"max_length": 40, "max_new_tokens": 4}, ()), ({"suppress_tokens": []}, ()), ({"typical_p": 1.0}, ()),
    ({"num_beams": 1, "do_sample": True, "guidance_scale": None, "min_length": 0}, ())])
def test_fields_that_would_change_answers_are_named(
        fields: dict[str, Any], ignored: tuple[str, ...], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    defaults = read(folder, **fields)
    assert defaults.ignored == ignored
    announce(defaults)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == bool(ignored) and all(name in told[0] for name in ignored)


def test_the_defaults_are_told_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    announce(read(folder))
    assert not caplog.records
    announce(read(folder, "auto", {"max_new_tokens": 5}, **ALL))
    (record,) = caplog.records
    line = record.getMessage()
    assert "temperature 0.6, top_p 0.95, top_k 20, min_p 0.1, repetition_penalty 1.05, max_tokens 5, at most 5" in line
    assert str(folder) in line and "\n" not in line
    assert record.fields["default_sampling_params"] == GIVEN | {"max_tokens": 5}


def test_every_field_of_transformers_class_is_obeyed_told_or_without_effect() -> None:
    from transformers import GenerationConfig

    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert len(fields) > 40
    listed = set(OBEYED) | {"eos_token_id"} | set(IGNORED) | WITHOUT_EFFECT
    assert not fields - listed, "say what becomes of these fields"
    assert not set(OBEYED) & set(IGNORED) and not WITHOUT_EFFECT & (set(IGNORED) | set(OBEYED))


def test_what_the_built_in_model_says() -> None:
    assert read_defaults(EngineConfig(str(builtin.path()))).given == {"temperature": 0.2, "max_tokens": 384}


def test_a_server_without_a_default_length_names_the_option_that_bounds_it(
        folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    announce(read(folder), 8192)
    (record,) = caplog.records
    option = record.getMessage().partition("--override-generation-config '")[2].partition("'")[0]
    assert "8192" in record.getMessage()
    bounded = read(folder, "auto", json.loads(option))
    assert bounded.limited(5000) == bounded.max_tokens == bounded.max_tokens_limit
    caplog.clear()
    announce(bounded, 8192)
    (record,) = caplog.records
    assert "max_new_tokens" not in record.getMessage()
