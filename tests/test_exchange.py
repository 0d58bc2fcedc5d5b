"""A real server that serves one model after another."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import httpx
import pytest
import torch
from live import Live, serving
from live_server import children, eventually
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from slotwise import LLM, SamplingParams
from slotwise.compose.check import objection as of_model
from slotwise.compose.exchange import objection
from slotwise.engine.config import EngineConfig
from slotwise.server.settings import ServerSettings

ADMIN = {"Authorization": "Bearer root"}
PROMPT = list(range(40, 70))
HELLO = [{"role": "user", "content": "hello"}]


class Models(NamedTuple):
    first: Path
    second: Path
    unsound: Path  # its weights are not numbers


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
    return Models(first, second, unsound)


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Any:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(str(models.first), "--admin-api-key", "root", "--dtype", "float32", "--max-num-seqs", "4",
                 "--kv-cache-memory", "50M", log=log) as live:
        yield live


def load(live: Live, model: Any, **more: Any) -> httpx.Response:
    return live.client.post("/v1/load_model", headers=ADMIN, json={"model": str(model), **more})


def complete(live: Live, max_tokens: int = 8, **more: Any) -> httpx.Response:
    return live.client.post("/v1/completions", headers=ADMIN, json={
        "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        **more})


def tokens(live: Live) -> list[int]:
    return complete(live).raise_for_status().json()["choices"][0]["token_ids"]


def expected(folder: Path) -> list[int]:
    llm = LLM(folder, dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=20 << 20)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def engines(live: Live) -> list[int]:
    return children(live.process.pid, b"slotwise.compose.worker")


def names(live: Live) -> list[str]:
    return [model["id"] for model in live.client.get("/v1/models", headers=ADMIN).json()["data"]]


def labels(live: Live) -> set[str]:
    text = live.client.get("/metrics", headers=ADMIN).raise_for_status().text
    return {sample.labels["model_name"] for family in text_string_to_metric_families(text)
            for sample in family.samples if "model_name" in sample.labels}


def template(live: Live) -> str:
    told = live.client.post("/tokenize", headers=ADMIN, json={"messages": HELLO, "return_token_strs": True}).json()
    return live.client.post("/detokenize", headers=ADMIN, json={"tokens": told["tokens"]}).json()["prompt"]


def test_another_model_is_served_after_running_requests_have_finished(server: Live, models: Models) -> None:
    first, of_first, before = tokens(server), template(server), engines(server)
    with ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(complete, server, 600) for _ in range(2)]
        eventually(lambda: server.client.get("/load", headers=ADMIN).json()["server_load"] >= 2)
        assert load(server, models.second, served_model_name="two").json() == {"model": "two"}
        for stream in streams:
            assert stream.result().json()["usage"]["completion_tokens"] == 600
    assert names(server) == ["two"] and labels(server) == {"two"}
    assert len(engines(server)) == 1 and engines(server) != before
    assert tokens(server) == expected(models.second) != first
    assert template(server) == "hello!" != of_first
    assert complete(server, model=str(models.first)).status_code == 404
    assert server.client.get("/health").status_code == 200
    assert load(server, models.first).json() == {"model": str(models.first)}
    assert names(server) == [str(models.first)] and tokens(server) == first and template(server) == of_first


def test_what_cannot_be_served_disturbs_nothing(server: Live, models: Models, tmp_path: Path) -> None:
    engine = engines(server)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    cut = tmp_path / "cut"
    shutil.copytree(models.second, cut)
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for model, said in ((tmp_path / "nowhere", "absolute path"), ("Qwen/Qwen3-0.6B", "absolute path"),
                        (other, ""), (cut, "model.safetensors")):
        told = load(server, model)
        assert told.status_code == 400 and told.json()["error"]["param"] == "model"
        assert said in told.json()["error"]["message"]
    assert load(server, models.second, served_model_name="").status_code == 400
    assert server.client.post("/v1/load_model", headers=ADMIN, json={}).status_code == 400
    assert server.client.post("/v1/load_model", json={"model": str(models.second)}).status_code == 401
    assert engines(server) == engine and names(server) == [str(models.first)]


def test_a_model_that_does_not_start_leaves_the_old_one_serving(server: Live, models: Models) -> None:
    """It has the right files, and its first step gives no numbers."""
    first = tokens(server)
    told = load(server, models.unsound)
    assert told.status_code == 503 and told.json()["error"]["message"].endswith(f"{models.first} is served again")
    assert tokens(server) == first and names(server) == [str(models.first)] and len(engines(server)) == 1
    assert server.client.get("/health").status_code == 200


@pytest.mark.slow
def test_a_sleeping_model_is_exchanged_for_one_that_is_awake(server: Live, models: Models) -> None:
    assert server.client.post("/sleep?level=2", headers=ADMIN).status_code == 200
    assert load(server, models.unsound).status_code == 503
    assert server.client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True, "level": 2}
    assert load(server, models.second).status_code == 200
    assert server.client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False, "level": 0}
    assert tokens(server) == expected(models.second)


def test_a_model_is_checked_without_its_weights(models: Models) -> None:
    config = EngineConfig.of(model=str(models.first), dtype="float32")
    assert of_model(config, 0) == ""
    assert "the weights take" in of_model(config, -(1 << 60))
    assert "kv_cache_dtype" in of_model(replace(config, kv_cache_dtype="fp8"), 0), "settings that the device refuses"


def test_servers_that_have_one_model_say_so() -> None:
    config, settings = EngineConfig.of(model="/model"), ServerSettings("m")
    assert objection(config, settings) == ""
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        assert "ranks" in objection(replace(config, **sizes), settings)
    assert "adapters" in objection(replace(config, enable_lora=True), settings)
    assert "event log" in objection(config, replace(settings, event_log="log"))
