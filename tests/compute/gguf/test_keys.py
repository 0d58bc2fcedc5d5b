"""Every key of an architecture is obeyed, known to change nothing, or refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.checkpoints import make
from support.gguf_files import write

from slotwise.compose.model_defaults import read_defaults, read_pooling
from slotwise.compute.model.gguf.gguf_config import read_gguf_config
from slotwise.compute.model.layers.rope import LinearRope, Rope, YarnRope
from slotwise.compute.model.model_config import ModelConfig
from slotwise.core.params import PoolingSpec
from slotwise.engine.config import EngineConfig
from slotwise.errors import CheckpointError
from slotwise.text.tokenizer import Tokenizer, TokenizerError

PREFIX = "{arch}."
STRANGE: dict[str, Any] = {  # values that ask for something; 3 for all others
    "rope.scaling.type": "yarn", "tensor_data_layout": "other", "attention.causal": False, "swin_norm": True,
    "use_parallel_residual": True, "rope.scaling.finetuned": False, "expert_weights_norm": False, "vocab_size": 5,
    "block_count": 2, "attention.layer_norm_rms_epsilon": 0.5,
}  # fmt: skip
NEUTRAL: dict[str, Any] = {  # values that ask for nothing
    "attention.causal": True, "attention.scale": 32**-0.5, "attn_logit_softcapping": 0.0, "logit_scale": 1.0,
    "final_logit_softcapping": 0.0, "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 0.0,
    "rope.freq_base_swa": 10_000.0, "rope.scaling.factor": 1.0, "embedding_scale": 1.0, "attention.clamp_kqv": 0.0,
    "attention.sliding_window": 0, "rope.scaling.type": "none", "attention.key_length_swa": 32,
}  # fmt: skip
WITHOUT_EFFECT = {  # whatever they say, in a file without experts and windows
    "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon", "pooling_type",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.freq_base_swa",
    "rope.scaling.original_context_length",  # of YaRN
}  # fmt: skip


def keys_of_architectures() -> list[str]:
    """Those that the gguf package knows, without the name of the architecture."""
    groups = [group for _, group in inspect.getmembers(gguf.Keys, inspect.isclass)]
    values = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
    return sorted(value.removeprefix(PREFIX).replace("{dense}", "dense_2") for value in values
                  if value.startswith(PREFIX))


def other_keys(prefix: str) -> list[str]:
    """Those that the gguf package knows under `prefix`, and of each group of keys one."""
    groups = [group for _, group in inspect.getmembers(gguf.Keys, inspect.isclass)]
    values = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
    return sorted(value.format(id=0, name="rag") for value in values if value.startswith(prefix))


def typed(value: Any) -> gguf.GGUFValueType:
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    return kinds.get(type(value), gguf.GGUFValueType.STRING)


def read(folder: Path, path: Path, arch: str = "llama", **keys: Any) -> ModelConfig:
    def edit(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            writer.kv_data[0].pop(f"{arch}.{key}", None)
            writer.add_key_value(f"{arch}.{key}", value, typed(value))

    return read_gguf_config(write(folder, path, edit=edit))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama2", tmp_path_factory.mktemp("plain"))


def test_every_key_is_obeyed_without_effect_or_refused(plain: Path, tmp_path: Path) -> None:
    before, found = read(plain, tmp_path / "x.gguf"), dict[str, str]()
    for key in keys_of_architectures():
        try:
            config = read(plain, tmp_path / "x.gguf", **{key: STRANGE.get(key, 3)})
        except CheckpointError as error:
            assert key.rpartition(".")[2] in str(error) or key == "expert_count"  # which asks for other keys
            found[key] = "refused"
        else:
            found[key] = "obeyed" if config != before else "without effect"
    without = {key for key, what in found.items() if what == "without effect"}
    experts = {key for key in found if key.startswith("expert_")}
    assert without - experts == WITHOUT_EFFECT
    assert {key for key, what in found.items() if what == "obeyed"} >= {
        "context_length", "rope.freq_base", "rope.scaling.factor", "attention.layer_norm_rms_epsilon"}


def test_values_that_ask_for_nothing_change_nothing(plain: Path, tmp_path: Path) -> None:
    before = read(plain, tmp_path / "x.gguf")
    assert read(plain, tmp_path / "x.gguf", **NEUTRAL) == before


@pytest.mark.parametrize(("keys", "rope"), [
    ({"rope.scaling.factor": 4.0}, LinearRope(10_000.0, 4.0)),  # as llama.cpp, where no type is named
    ({"rope.scaling.type": "none", "rope.scaling.factor": 1.0}, Rope(10_000.0)),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 1.25,
      "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.yarn_ext_factor": 1.0,
      "rope.scaling.original_context_length": 512},
     YarnRope(10_000.0, 4.0, 512, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25, truncate=True)),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 1.0},
     YarnRope(10_000.0, 4.0, 2048, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0, truncate=True))])
def test_rotary_embeddings(keys: dict[str, Any], rope: Rope, plain: Path, tmp_path: Path) -> None:
    assert read(plain, tmp_path / "x.gguf", **keys).ropes == (rope,) * 3


@pytest.mark.parametrize(("keys", "key"), [
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
    ({"rope.scaling.type": "longrope"}, "rope.scaling.type"), ({"something.new": 1}, "something.new")])
def test_what_is_refused_beside_others(keys: dict[str, Any], key: str, plain: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=key):
        read(plain, tmp_path / "x.gguf", **keys)


def test_experts_are_normed_as_the_file_says(tmp_path: Path) -> None:
    folder = make("qwen3_moe", tmp_path / "model", decoder_sparse_step=1)
    before = read(folder, tmp_path / "x.gguf", "qwen3moe")
    other = read(folder, tmp_path / "x.gguf", "qwen3moe", expert_weights_norm=False)
    assert before.mixture is not None and other.mixture is not None
    assert other.mixture.routing == dataclasses.replace(before.mixture.routing, is_normalized=False)
    for key, value in (("expert_gating_func", 2), ("expert_weights_scale", 2.5), ("expert_shared_count", 1)):
        with pytest.raises(CheckpointError, match=key):
            read(folder, tmp_path / "x.gguf", "qwen3moe", **{key: value})


def test_a_granite_without_positions_is_refused(tmp_path: Path) -> None:
    folder = make("granite", tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.finetuned is false"):
        read(folder, tmp_path / "x.gguf", "granite", **{"rope.scaling.finetuned": False})


NO_NAMES = {  # keys of a description, which no answer depends on
    f"general.{name}" for name in (
        "author", "basename", "description", "doi", "file_type", "finetune", "languages", "license", "license.link",
        "license.name", "name", "organization", "quantized_by", "repo_url", "size_label", "tags", "url", "uuid",
        "version")} | {
    f"general.{group}.{name}" for group in ("base_model.0", "dataset.0") for name in (
        "author", "description", "doi", "name", "organization", "repo_url", "url", "uuid", "version")} | {
    f"general.source.{name}" for name in ("doi", "repo_url", "url", "uuid")} | {
    "general.base_model.count", "general.dataset.count"}
OF_FILES = {"general.alignment", "general.architecture", "general.type"}  # tests/compute/gguf/test_hostile.py
OF_SAMPLING = {  # keys by what becomes of them: a default of requests, a warning, nothing
    **dict.fromkeys(("temp", "top_k", "top_p", "min_p", "penalty_repeat"), "obeyed"),
    **dict.fromkeys(("sequence", "xtc_probability", "mirostat"), "told"),
    **dict.fromkeys(("xtc_threshold", "mirostat_tau", "mirostat_eta", "penalty_last_n"), "nothing")}  # alone


def with_key(folder: Path, path: Path, key: str, value: Any, **more: Any) -> Path:
    def edit(writer: gguf.GGUFWriter) -> None:
        for name, one in {key: value, **more}.items():
            writer.kv_data[0].pop(name, None)
            if isinstance(one, list):
                writer.add_array(name, one)
            else:
                writer.add_key_value(name, one, typed(one))

    return write(folder, path, edit=edit)


def test_every_general_key_is_obeyed_descriptive_or_refused(plain: Path, tmp_path: Path) -> None:
    before, passed, told = read(plain, tmp_path / "x.gguf"), set(), {}
    for key in [*other_keys("general."), "general.tensor_extra.prec_a4", "general.sampling.new"]:
        if key in OF_FILES:
            continue
        last = key.rpartition(".")[2]
        value = {"sequence": "strange", "top_p": 0.5, "min_p": 0.5}.get(last, 3)
        path = with_key(plain, tmp_path / "x.gguf", key, value)
        try:
            assert read_gguf_config(path) == before
        except CheckpointError as error:
            assert key in str(error)
            continue
        passed.add(key)
        if key.startswith("general.sampling."):
            found = read_defaults(EngineConfig.of(model=str(path)))
            told[last] = "obeyed" if found.given else "told" if found.ignored else "nothing"
            assert found.ignored in ((), (key,))
    assert passed == NO_NAMES | {f"general.sampling.{name}" for name in OF_SAMPLING}
    assert told == OF_SAMPLING
    last_n = "general.sampling.penalty_last_n"
    path = with_key(plain, tmp_path / "x.gguf", last_n, 64, **{"general.sampling.penalty_repeat": 1.5})
    assert read_defaults(EngineConfig.of(model=str(path))).ignored == (last_n,)


@pytest.mark.parametrize(("version", "why"), [(2, ""), (3, "general.quantization_version is 3")])
def test_blocks_of_another_version_are_refused(version: int, why: str, plain: Path, tmp_path: Path) -> None:
    path = with_key(plain, tmp_path / "x.gguf", "general.quantization_version", version)
    with pytest.raises(CheckpointError, match=why) if why else contextlib.nullcontext():
        read_gguf_config(path)


OF_TOKENS = {  # keys that are obeyed: tests/compute/gguf/test_tokenizers.py
    f"tokenizer.ggml.{name}" for name in (
        "add_bos_token", "add_eos_token", "add_space_prefix", "merges", "model", "pre", "scores", "token_type",
        "tokens")
} | {f"tokenizer.ggml.{name}_token_id" for name in (
    "bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask", "prefix", "suffix", "middle", "fim_pre",
    "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")} | {"tokenizer.chat_template"}
WITHOUT_TOKENS = {  # keys of tokenizers without effect, whatever they say
    "tokenizer.ggml.add_sep_token", "tokenizer.ggml.token_type_count", "tokenizer.huggingface.json",
    "tokenizer.chat_template.rag", "tokenizer.chat_templates"}
REFUSED_OF_TOKENS = {
    "tokenizer.ggml.remove_extra_whitespaces": True, "tokenizer.ggml.precompiled_charsmap": [1, 2],
    "tokenizer.rwkv.world": "x", "tokenizer.ggml.normalizer.lowercase": True, "tokenizer.ggml.suppress_tokens": [3],
    "tokenizer.ggml.something_new": 1}


def test_every_key_of_a_tokenizer_is_obeyed_without_effect_or_refused(folder: Path, tmp_path: Path) -> None:
    assert {*other_keys("tokenizer.")} <= OF_TOKENS | WITHOUT_TOKENS | REFUSED_OF_TOKENS.keys()
    assert Tokenizer.load(with_key(folder, tmp_path / "x.gguf", "tokenizer.ggml.remove_extra_whitespaces", False))
    assert Tokenizer.load(with_key(folder, tmp_path / "x.gguf", "tokenizer.ggml.add_sep_token", True))
    for key, value in REFUSED_OF_TOKENS.items():
        with pytest.raises(TokenizerError, match=rf"x\.gguf: {key} is set, which is not supported"):
            Tokenizer.load(with_key(folder, tmp_path / "x.gguf", key, value))


def test_marks_of_a_gap_are_those_that_the_file_names(folder: Path, tmp_path: Path) -> None:
    """Also where the file types them as words."""
    plain = Tokenizer.load(write(folder, tmp_path / "x.gguf"))
    assert plain.fill_marks is None
    ids = [token for token in range(300, 400) if plain.token_text(token).isalpha()][:3]
    keys = {f"tokenizer.ggml.fim_{name}_token_id": token
            for name, token in zip(("pre", "suf", "mid"), ids, strict=True)}
    first, *others = keys.items()
    marks = (tokenizer := Tokenizer.load(with_key(folder, tmp_path / "x.gguf", *first, **dict(others)))).fill_marks
    assert marks == tuple(map(plain.token_text, ids))
    prompt = tokenizer.encode(marks.prompt("def ", "return"), add_special_tokens=False)
    assert [token for token in prompt if token in ids] == ids and prompt[0] == ids[0] and prompt[-1] == ids[-1]
    assert Tokenizer.load(with_key(folder, tmp_path / "x.gguf", *first)).fill_marks is None


@pytest.mark.parametrize(("kind", "pooling"), [
    (None, "max"), (0, "max"), (1, "mean"), (3, "last"), (2, "cls"), (4, "")])
def test_vectors_are_pooled_as_the_file_says(kind: int | None, pooling: str, plain: Path, tmp_path: Path) -> None:
    read(plain, tmp_path / "x.gguf", **({} if kind is None else {"pooling_type": kind}))
    defaults = read_pooling(tmp_path / "x.gguf").of_family("max")
    if pooling:
        assert defaults.params == PoolingSpec(pooling) and not defaults.objection
    else:
        assert "pooling_type is" in defaults.objection
