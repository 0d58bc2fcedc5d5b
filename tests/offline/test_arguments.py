"""Every argument of vLLM's `LLM` is obeyed, neutral or refused by name, and the documents say which."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slotwise import AsyncEngineArgs, EngineArgs, builtin
from slotwise.compat.vllm import ANY, RULES, SAME
from slotwise.engine.config import ConfigError
from slotwise.errors import CheckpointError
from slotwise.offline.arguments import OWN, SETTINGS, Arguments, check

sys.path.append(str(Path(__file__).resolve().parents[2]))  # `docs` is run from the repository's root

from docs.generate.protocols import NEUTRAL, OBEYED, REFUSED, names, offline_treatment

LISTED = names("vllm offline", "LLM")
OTHER = {"neither": ["this", "nor", "that"]}


def of(model: str | None = None, **given: Any) -> Arguments:
    return Arguments.of(model, given)


@pytest.mark.parametrize("name", LISTED)
def test_an_argument_of_vllm_has_one_treatment(name: str) -> None:
    done, accepted = offline_treatment("LLM", name)
    assert (name in RULES) != (name in SETTINGS or name in OWN)
    check(None, {name: None})
    if done == OBEYED:
        return
    assert done == (NEUTRAL if accepted else REFUSED)
    if accepted is ANY:
        check(None, {name: OTHER})
        return
    for value in accepted:
        check("a/model", {name: "a/model" if value == SAME else value})
    with pytest.raises(ConfigError, match=f"^{name} {{'neither': .* is not supported: ") as wrong:
        check("a/model", {name: OTHER})
    assert len(str(wrong.value)) > len(name) + 60 and "{quant" not in str(wrong.value), "it says what to do"


def test_what_is_served_is_not_denied() -> None:
    assert {"tensor_parallel_size", "pipeline_parallel_size"} <= set(SETTINGS)
    texts = " ".join(text for rule in RULES.values() for text in rule.told(str))
    assert not re.search("one device|one worker|no supported model has|load balancer", texts)
    for kind in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):  # of the states of Qwen3-Next and Qwen3.5
        check(None, {kind: "float32"})
        with pytest.raises(ConfigError, match="kept in float32"):
            check(None, {kind: "float16"})


def test_the_list_has_every_argument_that_is_not_implemented() -> None:
    assert set(RULES) <= set(LISTED) and len(LISTED) > 300
    assert not set(RULES) & {*SETTINGS, *OWN}
    with pytest.raises(KeyError):
        offline_treatment("LLM", "no_such_argument")


@pytest.mark.slow
def test_all_neutral_values_at_once_start_an_engine() -> None:
    from slotwise import LLM

    model = str(builtin.path())
    given = {name: None if not rule.accepted else "x" if rule.accepted is ANY else rule.accepted[0]
             for name, rule in RULES.items()}
    given = {name: model if value == SAME else value for name, value in given.items()}
    llm = LLM(model, max_num_seqs=1, max_model_len="64", kv_cache_memory_bytes=8 << 20, **given)
    assert llm.info.limits.max_model_len == 64
    assert len(llm.generate("def f", use_tqdm=False)) == 1


def test_a_folder_may_be_a_path() -> None:
    found = Arguments.of(builtin.path(), {})
    assert found == Arguments.of(str(builtin.path()), {}) and found.name == builtin.NAME


@pytest.mark.parametrize(("given", "field", "value"), [
    ({"max_model_len": "4k"}, "max_model_len", 4000), ({"max_model_len": "4K"}, "max_model_len", 4096),
    ({"max_model_len": "512"}, "max_model_len", 512), ({"max_model_len": -1}, "max_model_len", None),
    ({"max_model_len": "auto"}, "max_model_len", None), ({"dtype": "half"}, "dtype", "float16"),
    ({"dtype": "float"}, "dtype", "float32"), ({"dtype": torch.bfloat16}, "dtype", "bfloat16"),
    ({"dtype": "auto"}, "dtype", "auto"), ({"quantization": None}, "quantization", "none"), ({"seed": None}, "seed", 0),
    ({"enable_prefix_caching": None}, "enable_prefix_caching", True), ({"max_num_seqs": None}, "max_num_seqs", 64),
    ({"kv_cache_memory_bytes": 1 << 20}, "kv_cache_memory", 1 << 20),
    ({"kv_cache_memory_bytes": 1 << 20, "gpu_memory_utilization": 0.9}, "gpu_memory_utilization", None),
    ({"kv_cache_memory_bytes": "1GiB"}, "kv_cache_memory", 1 << 30),
    ({"max_num_batched_tokens": "2k"}, "max_num_batched_tokens", 2000),
    ({"on_pressure": "error"}, "on_pressure", "error"), ({"device": "cpu"}, "device", "cpu")])
def test_an_obeyed_argument_is_a_setting(given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(of(**given).config, field) == value


@pytest.mark.parametrize(("given", "says"), [
    ({"decode_context_parallel_size": 2}, "decode_context_parallel_size 2 is not supported: a model's ranks are "
     "processes of one machine, as many as tensor_parallel_size and pipeline_parallel_size say"),
    ({"decode_context_parallel_size": True}, "decode_context_parallel_size True"),
    ({"pipeline_parallel_size": True}, "pipeline_parallel_size must be a whole number"),
    ({"trust_remote": True}, "did you mean trust_remote_code"),
    ({"max_modellen": 5}, "there is no argument 'max_modellen'; did you mean max_model_len?"),
    ({"zzz": 5}, "there is no argument 'zzz'$"), ({"enable_chunked_prefill": False}, "use prefill inline"),
    ({"tokenizer": "other/model"}, "tokenizer 'other/model' is not supported: the checkpoint's own tokenizer"),
    ({"quantization": "awq"}, "quantization must be one of none, int8"), ({"dtype": "int3"}, "dtype must be one of"),
    ({"max_model_len": "4q"}, "max_model_len must be a whole number .* not '4q'"),
    ({"max_model_len": "0.0015k"}, "max_model_len must be a whole number"), ({"stream_interval": 0}, "stream_interval"),
    ({"revision": "v2"}, "revision 'v2' is not supported: the newest"), ({"max_logprobs": 50}, "at most 20"),
    ({"speculative_config": {"method": "eagle"}}, "speculative_config: method must be one of"),
    ({"swap_space": 4, "cpu_offload_gb": 2.5}, "cpu_offload_gb 2.5"),
    ({"disable_log_stats": 0}, "disable_log_stats 0: False: LLM counts"), ({"chat_template": 5}, "chat_template 5"),
    ({"served_model_name": 5}, "served_model_name 5: the name, or a list")])
def test_an_argument_is_refused_with_what_to_do(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as wrong:
        of(**given)
    assert "\n" not in str(wrong.value)


def test_names_templates_and_logs_are_kept() -> None:
    assert of().name == "slotwise-builtin" and of(served_model_name="a").name == "a"
    found = of(served_model_name=["b", "c"], chat_template="{{ x }}", stream_interval=3, disable_log_stats=False,
               override_generation_config={"top_k": 1}, event_log="file")
    assert (found.name, found.chat_template, found.stream_interval, found.log_stats) == ("b", "{{ x }}", 3, True)
    assert found.override == {"top_k": 1} and found.event_log == "file" and not of(disable_log_stats=True).log_stats
    with pytest.raises(CheckpointError, match="no folder"):
        of("nowhere")


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_engine_args_are_attributes(kind: type[EngineArgs]) -> None:
    args = kind(model="a", enforce_eager=True, max_model_len=64)
    assert vars(args) == {"model": "a", "enforce_eager": True, "max_model_len": 64}
    with pytest.raises(ConfigError, match="data_parallel_size 2"):
        kind(data_parallel_size=2)
