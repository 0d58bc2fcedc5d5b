"""A real server that serves one model after another."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from support import checkpoints
from support.gguf_files import write
from support.live import Live, serving
from support.live_server import children, eventually, frozen

from slotwise import LLM, SamplingParams
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.compose.api_server import ModelOptions, ServedModel, chat_of, objection, read_model, read_other
from slotwise.compose.engine_builder import chosen, divided
from slotwise.compose.engine_builder import load as load_weights
from slotwise.compose.load_check import objection as of_model
from slotwise.compute.model.loading import UnreadModel, describe, load_model
from slotwise.compute.runner import memory_budget
from slotwise.core.transfer.kv_transfer_config import KVTransferConfig
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.errors import OneLineError

ADMIN = {"Authorization": "Bearer root"}
PROMPT = list(range(40, 70))
LONGEST = 1000  # tokens of a sequence
HELLO = [{"role": "user", "content": "hello"}]


class Models(NamedTuple):
    first: Path
    second: Path
    unsound: Path  # its weights are not numbers
    shorter: Path  # sound, and its context is shorter than `LONGEST`


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    first = checkpoints.make("llama3", folder / "first", tokenizer=True)
    second = checkpoints.make("qwen3", folder / "second", seed=3, tokenizer=True, vocab_size=1100)
    (second / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    unsound = folder / "unsound"
    shutil.copytree(first, unsound)
    tensors = load_file(unsound / "model.safetensors")
    save_file({name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()},
              unsound / "model.safetensors", metadata={"format": "pt"})
    shorter = folder / "shorter"
    shutil.copytree(second, shorter)
    checkpoints.edit_config(shorter, max_position_embeddings=LONGEST - 1)
    return Models(first, second, unsound, shorter)


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Any:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(str(models.first), "--admin-api-key", "root", "--dtype", "float32", "--max-num-seqs", "4",
                 "--max-model-len", str(LONGEST), "--kv-cache-memory", "50M", log=log) as live:
        yield live


def load(live: Live, model: Any, **more: Any) -> httpx.Response:
    return live.client.post("/v1/load_model", headers=ADMIN, json={"model": str(model), **more})


def complete(live: Live, max_tokens: int = 8, **more: Any) -> httpx.Response:
    return live.client.post("/v1/completions", headers=ADMIN, json={
        "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        **more})


def tokens(live: Live) -> list[int]:
    return complete(live).raise_for_status().json()["choices"][0]["token_ids"]


@cache
def expected(folder: Path) -> list[int]:
    llm = LLM(folder, dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=20 << 20)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def engines(live: Live) -> list[int]:
    return children(live.process.pid, b"slotwise.compose.engine_process")


def names(live: Live) -> list[str]:
    return [model["id"] for model in live.client.get("/v1/models", headers=ADMIN).json()["data"]]


def labels(live: Live) -> set[str]:
    text = live.client.get("/metrics", headers=ADMIN).raise_for_status().text
    return {sample.labels["model_name"] for family in text_string_to_metric_families(text)
            for sample in family.samples if "model_name" in sample.labels}


def template(live: Live) -> str:
    told = live.client.post("/tokenize", headers=ADMIN, json={"messages": HELLO, "return_token_strs": True}).json()
    return live.client.post("/detokenize", headers=ADMIN, json={"tokens": told["tokens"]}).json()["prompt"]


@pytest.fixture
def second(server: Live, models: Models) -> Live:
    """The server with the second model, which it has already unless a test runs alone."""
    if names(server) != ["two"]:
        load(server, models.second, served_model_name="two").raise_for_status()
    return server


def test_another_model_is_served_after_running_requests_have_finished(server: Live, models: Models) -> None:
    first, of_first, before = tokens(server), template(server), engines(server)
    with ThreadPoolExecutor(4) as threads:
        with frozen(before[0]):
            streams = [threads.submit(complete, server, 60) for _ in range(2)]
            eventually(lambda: server.client.get("/health").json()["num_live"] == 2)
            loading = threads.submit(load, server, models.second, served_model_name="two")
            eventually(lambda: server.client.get("/health").status_code == 503)
        assert loading.result().json() == {"model": "two"}
        for stream in streams:
            assert stream.result().json()["usage"]["completion_tokens"] == 60
    assert names(server) == ["two"] and labels(server) == {"two"}
    assert len(engines(server)) == 1 and engines(server) != before
    assert tokens(server) == expected(models.second) != first == expected(models.first)
    assert template(server) == "hello!" != of_first
    assert complete(server, model=str(models.first)).status_code == 404
    assert server.client.get("/health").status_code == 200


def test_what_cannot_be_served_disturbs_nothing(second: Live, models: Models, tmp_path: Path) -> None:
    """Of faults that only a process of its own finds, one; all of them are found below."""
    engine = engines(second)
    broken = tmp_path / "broken"
    shutil.copytree(models.second, broken)
    cut(broken / "model.safetensors")
    templated = tmp_path / "templated"
    shutil.copytree(models.second, templated)
    (templated / "chat_template.jinja").write_text("{% if %}")
    for model, said in ((tmp_path / "nowhere", "absolute path"), ("Qwen/Qwen3-0.6B", "absolute path"),
                        (broken, "model.safetensors"), (models.shorter, "max_model_len 1000 exceeds the 999"),
                        (templated, "template")):
        told = load(second, model)
        assert told.status_code == 400 and told.json()["error"]["param"] == "model"
        assert said in told.json()["error"]["message"]
    assert load(second, models.first, served_model_name="").status_code == 400
    assert second.client.post("/v1/load_model", headers=ADMIN, json={}).status_code == 400
    assert second.client.post("/v1/load_model", json={"model": str(models.first)}).status_code == 401
    assert engines(second) == engine and names(second) == ["two"]


def test_a_model_that_does_not_start_leaves_the_old_one_serving(second: Live, models: Models) -> None:
    """It has the right files, and its first step gives no numbers."""
    told = load(second, models.unsound)
    assert told.status_code == 503 and told.json()["error"]["message"].endswith("two is served again")
    assert tokens(second) == expected(models.second) and names(second) == ["two"] and len(engines(second)) == 1
    assert second.client.get("/health").status_code == 200


def test_two_models_that_do_not_start_are_both_told_and_the_server_says_that_it_sleeps(
        second: Live, models: Models) -> None:
    assert second.client.get("/is_sleeping", headers=ADMIN).json()["level"] == 0
    gone = models.second.with_suffix(".gone")
    models.second.rename(gone)
    try:
        told = load(second, models.unsound)
        assert told.status_code == 503
        message = told.json()["error"]["message"]
        assert "finite" in message and "two did not start again either" in message and "/wake_up" in message
        refused = complete(second)
        assert refused.status_code == 503 and "asleep until it is woken up" in refused.text
    finally:
        gone.rename(models.second)
    assert second.client.post("/wake_up", headers=ADMIN, timeout=120).status_code == 200
    assert complete(second).status_code == 200


@pytest.mark.slow
def test_a_sleeping_model_is_exchanged_for_one_that_is_awake(server: Live, models: Models) -> None:
    assert server.client.post("/sleep?level=2", headers=ADMIN).status_code == 200
    assert load(server, models.unsound).status_code == 503
    assert server.client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True, "level": 2}
    assert load(server, models.first).json() == {"model": "first"}
    assert server.client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False, "level": 0}
    assert names(server) == ["first"] and tokens(server) == expected(models.first) and template(server) != "hello!"
    assert complete(server, model=str(models.first)).raise_for_status().json()["model"] == "first"


def test_a_model_is_checked_without_its_weights(models: Models) -> None:
    config = EngineConfig.of(model=str(models.first), dtype="float32")
    assert of_model(config, 0) == ""
    assert "the weights take" in of_model(config, -(1 << 60))
    assert "kv_cache_dtype" in of_model(replace(config, kv_cache_dtype="fp8"), 0), "settings that the device refuses"


def changed(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: checkpoints.edit_config(folder, **fields)


def stored(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Changes the tensors of a checkpoint."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


NORM = "model.norm.weight"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {  # and a part of what is said
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "a config that is not JSON": (written("config.json", "{"), "not valid JSON"),
    "another architecture": (changed(architectures=["T5Model"]), "T5Model is not supported"),
    "a context below max_model_len": (changed(max_position_embeddings=999), "exceeds the 999 positions"),
    "more layers than are stored": (changed(num_hidden_layers=4, layer_types=...), "lacks"),
    "fewer layers than are stored": (changed(num_hidden_layers=2), ""),
    "other sizes than are stored": (changed(intermediate_size=161), "has shape"),
    "a method of quantization that is not there": (changed(quantization_config={"quant_method": "x"}), "x"),
    "parts of quantized weights that are not there": (changed(quantization_config={
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}), "lacks"),
    "a tensor too few": (stored(lambda tensors: tensors.pop(NORM)), NORM),
    "a tensor too many": (stored(lambda tensors: tensors.update(
        {"model.layers.0.self_attn.q_norm.bias": torch.ones(4)})), "q_norm"),
    "a tensor of another shape": (stored(lambda tensors: tensors.update({NORM: torch.ones(7)})), "has shape [7]"),
    "a tensor of whole numbers": (stored(lambda tensors: tensors.update(
        {NORM: tensors[NORM].to(torch.int32)})), "I32"),
    "a file that is cut": (lambda folder: cut(folder / "model.safetensors"), "model.safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights"),
    "an index of a file that is not there": (lambda folder: renamed(folder, "other.safetensors"), "other.safetensors"),
    "a link out of the folder": (lambda folder: outside(folder / "model.safetensors"), "outside of the checkpoint"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "a tokenizer that is not one": (written("tokenizer.json", "{}"), "tokenizer.json"),
    "a template that does not compile": (written("chat_template.jinja", "{% if %}"), "template"),
    "defaults out of range": (written("generation_config.json", '{"temperature": -1}'), "temperature"),
    "end tokens that are not numbers": (written("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id"),
    "pooling that is not JSON": (written("modules.json", "{"), "modules.json"),
    "pooling in a file that is gone": (lambda folder: (folder / "modules.json").symlink_to("gone"), "modules.json"),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def renamed(folder: Path, listed: str) -> None:
    """The weights are no longer where the index has them."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "renamed.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, listed)}))


def outside(path: Path) -> None:
    path.rename(path.parent.with_suffix(".elsewhere"))
    path.symlink_to(path.parent.with_suffix(".elsewhere"))


async def refusal(server: ServedModel, path: Path) -> str:
    """Why a server does not exchange its model for the one at `path`; "" if it would end its engine for it."""
    try:
        other = read_other(server, ModelOptions(), str(path), "")
        chat, _ = await chat_of(other)
        if chat is not None:
            chat.close()
    except (OneLineError, OSError, ValueError) as error:
        return str(error)
    return of_model(other.config, 0)


@pytest.fixture(scope="module")
def served(models: Models) -> ServedModel:
    config = EngineConfig.of(model=str(models.first), dtype="float32", max_model_len=LONGEST, kv_cache_memory=20 << 20)
    return read_model(config, ServerSettings("m"), ModelOptions())


def test_a_folder_without_a_fault_is_not_refused(models: Models, served: ServedModel) -> None:
    assert asyncio.run(refusal(served, models.second)) == ""


def test_a_gguf_file_whose_context_is_one_token_is_refused(
        models: Models, served: ServedModel, tmp_path: Path) -> None:
    of_one = write(models.first, tmp_path / "one.gguf", edit=lambda writer: writer.kv_data[0].update(
        {"llama.context_length": GGUFValue(1, GGUFValueType.UINT32)}))
    assert "llama.context_length must be a whole number from 2 to" in asyncio.run(refusal(served, of_one))


@pytest.mark.parametrize("fault", BROKEN)
def test_every_fault_of_a_folder_is_found_before_the_old_engine_ends(
        models: Models, served: ServedModel, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.second, folder)
    breaks, said = BROKEN[fault]
    breaks(folder)
    told = asyncio.run(refusal(served, folder))
    assert told and said in told and "\n" not in told


def test_a_context_without_room_for_a_prompt_and_an_output_is_refused_before_weights_are_read(
        models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.second, folder)
    config = EngineConfig.of(model=str(folder), dtype="float32", kv_cache_memory=20 << 20)
    checkpoints.edit_config(folder, max_position_embeddings=1)
    assert "sequences of 1 token" in of_model(config, 0)
    with pytest.raises(ConfigError, match="max_model_len must be a whole number from 2"):
        replace(config, max_model_len=1)
    checkpoints.edit_config(folder, max_position_embeddings=2)
    assert of_model(config, 0) == ""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm = LLM(folder, dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=20 << 20)
    (output,) = llm.generate({"prompt_token_ids": [40]}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_adapters_are_counted_before_weights_are_read(models: Models, ranks: dict[str, int]) -> None:
    """As many as fit, of all ranks: as weights, and beside the cache."""
    lora = {"enable_lora": True, "max_lora_rank": 16, "max_cpu_loras": 8}
    config = EngineConfig.of(model=str(models.first), dtype="float32", kv_cache_memory=20 << 20, **lora, **ranks)
    assert of_model(config, 0) == ""
    told = of_model(replace(config, max_lora_rank=4096, max_cpu_loras=4096), 0)
    assert "of them for adapters" in told and "lower max_cpu_loras or max_lora_rank" in told
    _, kernels = chosen(config, lambda plain: plain)
    described = describe(models.first, "float32", kernels)
    plain, adapted = (UnreadModel(models.first, described, "float32", kernels, divided(config), adapters).sizes
                      for adapters in (None, (8, 16)))
    assert adapted.adapters is not None and adapted.adapters.bytes == adapted.weight_bytes - plain.weight_bytes > 0
    if not ranks:
        read = load_model(models.first, kernels=kernels, dtype="float32", adapters=(8, 16))
        assert adapted.weight_bytes == read.weight_bytes


@pytest.mark.parametrize(("free", "said"), [(200 << 20, "of them for adapters"), (330 << 20, "a cache of")])
def test_an_engine_is_refused_where_it_fits_only_without_its_adapters(
        models: Models, free: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take 288 MiB: the weights do not fit, or what is left is too little for the cache."""
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: free)
    monkeypatch.setattr(memory_budget, "loadable_bytes", lambda: free)
    config = EngineConfig.of(model=str(models.first), dtype="float32", kv_cache_memory=60 << 20)
    assert of_model(config, 0) == ""
    assert said in of_model(replace(config, enable_lora=True, max_lora_rank=256, max_cpu_loras=64), 0)


def test_an_adapter_of_a_model_that_takes_none_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = checkpoints.make("falcon_h1", tmp_path / "scaled")
    told = of_model(EngineConfig.of(model=str(folder), dtype="float32", enable_lora=True), 0)
    assert "enable_lora: adapters are not supported with weights that the model multiplies by factors" in told


@pytest.mark.parametrize(("settings", "said"), [
    ({"quantization": "int4", "dtype": "float32"}, ""), ({"kv_cache_memory": 1}, "raise kv_cache_memory"),
    ({"kv_cache_memory": 1 << 49}, "do not fit"), ({"kv_cache_memory": 100_000}, "does not fit the cache"),
    ({"max_num_batched_tokens": 3}, "must be at least max_num_seqs"), ({"packed_weights_cache": 1.0}, "plain"),
    ({"kv_transfer_config": KVTransferConfig(
        "SharedMemoryConnector", "kv_producer", secret="x" * 32)}, "windowed attention")])
def test_settings_that_do_not_suit_a_model_are_found_before_its_weights_are_read(
        models: Models, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    """By an exchange, and by a start in the same words."""
    folder = models.first
    if "kv_transfer_config" in settings:
        folder = checkpoints.make("mistral", tmp_path / "windowed", tokenizer=True)
    config = replace(EngineConfig.of(model=str(folder), dtype="float32", max_model_len=LONGEST), **settings)
    told = of_model(config, 0)
    assert said in told and bool(said) == bool(told)
    if said:
        with pytest.raises((OneLineError, MemoryError), match=re.escape(said)), pytest.MonkeyPatch.context() as patch:
            patch.setattr(UnreadModel, "read", lambda *arguments: pytest.fail("weights were read"))
            load_weights(config)


def test_servers_that_have_one_model_say_so() -> None:
    config, settings = EngineConfig.of(model="/model"), ServerSettings("m")
    assert objection(config, settings) == ""
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        assert "ranks" in objection(replace(config, **sizes), settings)
    assert "adapters" in objection(replace(config, enable_lora=True), settings)
    assert "event log" in objection(config, replace(settings, event_log="log"))
