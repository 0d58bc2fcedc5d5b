"""Adapters of a server: requests name them on every route, and they come and go while streams run."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import checkpoints
from support import lora_adapters as lora
from support.live import Live, cli, serving
from support.live_server import children

from slotwise import LLM

LENGTHS = [3, 40, 70]
TOKENS = 12
ROOT = {"Authorization": "Bearer root"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
HELLO = [{"role": "user", "content": "import os"}]
SIZES = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory", "50331648")


class World:
    """A checkpoint, adapters of it, what transformers makes of each when it is merged, and a server."""

    def __init__(self, folder: Path) -> None:
        self.base = checkpoints.make("llama2", folder / "base", tokenizer=True)
        self.prompts = checkpoints.prompts(LENGTHS)
        self.merged = {"base": self.base}
        self.paths: dict[str, Path] = {}
        for seed, name in enumerate(("a", "b"), 1):
            self.paths[name] = lora.write(folder / name, self.base, seed=seed)
            self.merged[name] = lora.merged(folder / f"merged-{name}", self.base, self.paths[name])
        self.expected = {name: checkpoints.greedy(path, self.prompts, TOKENS) for name, path in self.merged.items()}

    def arguments(self) -> list[str]:
        module = json.dumps({"name": "b", "path": str(self.paths["b"]), "base_model_name": "parent"})
        return [str(self.base), *SIZES, "--served-model-name", "base", "--enable-lora", "--max-loras", "2",
                "--max-cpu-loras", "4", "--lora-modules", f"a={self.paths['a']}", module, "--admin-api-key", "root",
                "--enable-log-requests"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def server(world: World, log: Path) -> Iterator[Live]:
    with serving(*world.arguments(), log=log) as live:
        yield live


def tokens(server: Live, model: str, prompt: list[int], **fields: Any) -> list[int]:
    import openai  # takes long: not while tests are collected

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)
    extra = {"return_token_ids": True, "ignore_eos": True} | fields
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body=extra)
    assert answer.model == model
    return list(answer.choices[0].model_extra["token_ids"])  # type: ignore[index]


def admin(server: Live, path: str, **body: Any) -> httpx.Response:
    return server.client.post(path, json=body, headers=ROOT)


def load(server: Live, name: str, path: Path, **fields: Any) -> None:
    answer = admin(server, LOAD, lora_name=name, lora_path=str(path), **fields)
    assert answer.status_code == 200, answer.text


def unload(server: Live, name: str) -> None:
    assert admin(server, UNLOAD, lora_name=name).status_code == 200


def test_the_tokens_are_those_of_merged_weights(world: World, server: Live) -> None:
    """Rows of three models in the same steps; more than max_loras would be two."""
    asked = [(name, number) for number in range(len(LENGTHS)) for name in world.expected]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: tokens(server, one[0], world.prompts[one[1]]), asked))
    assert found == [world.expected[name][number] for name, number in asked]
    assert len({str(world.expected[name]) for name in world.expected}) == 3


def text_of(route: str, answer: dict[str, Any]) -> str:
    if route == "/v1/responses":
        return str(answer["output"][0]["content"][0]["text"])
    if route == "/v1/messages":
        return str(answer["content"][0]["text"])
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize(("route", "body"), [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": TOKENS}),
    ("/v1/responses", {"input": HELLO, "max_output_tokens": TOKENS}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": TOKENS})])
def test_every_route_obeys_the_name(world: World, server: Live, route: str, body: dict[str, Any]) -> None:
    prompt = server.client.post("/tokenize", json={"model": "a", "messages": HELLO}).json()["tokens"]
    texts = {}
    for name in world.expected:
        whole = server.client.post("/v1/completions", json={
            "model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}).json()
        answer = server.client.post(route, json=body | {"model": name, "temperature": 0})
        assert answer.status_code == 200 and answer.json()["model"] == name
        texts[name] = text_of(route, answer.json())
        assert texts[name] == whole["choices"][0]["text"]
    assert len(set(texts.values())) == 3


def test_vectors_are_those_of_merged_weights(world: World, server: Live) -> None:
    for name in ("base", "a"):
        llm = LLM(str(world.merged[name]), dtype="float32", max_model_len=128, kv_cache_memory=8 << 20)
        expected = llm.embed([{"prompt_token_ids": world.prompts[1]}], use_tqdm=False)[0].outputs.embedding
        answer = server.client.post("/v1/embeddings", json={"model": name, "input": world.prompts[1]}).json()
        assert answer["model"] == name
        assert answer["data"][0]["embedding"] == pytest.approx(expected, abs=1e-4)


def test_the_list_of_models_has_adapters_with_their_parents(world: World, server: Live) -> None:
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert cards.keys() == {"base", "a", "b"}
    assert [cards[name]["parent"] for name in ("base", "a", "b")] == [None, "base", "parent"]
    assert cards["a"]["root"] == str(world.paths["a"]) and cards["base"]["root"] == str(world.base)
    assert server.client.get("/v1/models/a").json() == cards["a"]
    for route in ("/v1/completions", "/v1/embeddings"):
        unknown = server.client.post(route, json={"model": "c", "prompt": "x", "input": "x"})
        assert unknown.status_code == 404 and "'base' or 'a' or 'b'" in unknown.json()["error"]["message"]


def test_a_server_without_adapters_says_so(tmp_path: Path) -> None:
    with serving("--max-num-seqs", "2", "--max-model-len", "128", log=tmp_path / "log") as plain:
        answer = plain.client.post(LOAD, json={"lora_name": "a", "lora_path": str(tmp_path)})
        assert "--enable-lora" in refusal(answer, 400)
        assert "there is no adapter" in refusal(plain.client.post(UNLOAD, json={"lora_name": "a"}), 404)
        assert "lora_requests_info" not in plain.client.get("/metrics").text


def stream(server: Live, model: str, prompt: list[int], begun: threading.Event, count: int) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True,
            "ignore_eos": True, "return_token_ids": True}
    sent = b""
    with httpx.Client(timeout=120) as client, client.stream(
            "POST", server.url + "/v1/completions", json=body) as answer:
        for part in answer.iter_bytes():
            sent += part
            begun.set()
    events = [json.loads(line[6:]) for line in sent.split(b"\n") if line.startswith(b"data: {")]
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


def test_adapters_come_and_go_while_streams_run(world: World, server: Live) -> None:
    """A stream keeps an unloaded adapter; its name may be another adapter's, which finds no cached prefix of it."""
    prompt, count = world.prompts[2], 400
    longer = checkpoints.greedy(world.merged["a"], [prompt], count)[0]
    begun = [threading.Event(), threading.Event()]
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream, server, name, prompt, event, count)
                   for name, event in zip(("a", "base"), begun, strict=True)]
        for event in begun:
            assert event.wait(120)
        load(server, "c", world.paths["b"])
        assert tokens(server, "c", prompt) == world.expected["b"][2]
        unload(server, "c")
        gone = admin(server, UNLOAD, lora_name="a").json()
        assert gone["deleted"] and gone["num_unfinished_exchanges"] in (0, 1)
        assert server.client.post("/v1/completions", json={"model": "a", "prompt": "x"}).status_code == 404
        load(server, "a", world.paths["b"])
        assert tokens(server, "a", prompt) == world.expected["b"][2]
        load(server, "a", world.paths["a"], load_inplace=True)
        assert tokens(server, "a", prompt) == world.expected["a"][2]
        assert streams[0].result() == longer
        assert streams[1].result()[:TOKENS] == world.expected["base"][2]


def labels(server: Live) -> dict[str, str]:
    (line,) = [line for line in server.client.get("/metrics").text.splitlines()
               if line.startswith("slotwise:lora_requests_info{")]
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


def test_what_tells_of_adapters(world: World, server: Live, log: Path) -> None:
    """With two adapters in the steps a third one's request waits, and metrics, its explanation and the log say so."""
    load(server, "c", world.paths["b"])
    begun = [threading.Event(), threading.Event()]
    seen: list[dict[str, str]] = []
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream, server, name, world.prompts[0], event, 1900)
                   for name, event in zip(("a", "b"), begun, strict=True)]
        for event in begun:
            assert event.wait(120)
        body = {"model": "c", "prompt": world.prompts[1], "max_tokens": 2, "request_id": "third"}
        third = pool.submit(server.client.post, "/v1/completions", json=body)
        while not third.done():
            seen.append(labels(server))
        assert third.result().status_code == 200
        for one in streams:
            one.result()
    told = {"model_name": "base", "max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert told in seen
    explanation = server.client.get("/explain/third").json()["requests"][0]
    assert explanation["adapter"] == "c"
    assert any(part["reason"] == "no_adapter_slot" for part in explanation["parts"])
    assert re.search("id third; .*; adapter c", log.read_text())
    assert labels(server)["running_lora_adapters"] == labels(server)["waiting_lora_adapters"] == ""
    unload(server, "c")


def refusal(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    message = str(answer.json()["error"]["message"])
    assert "\n" not in message
    return message


def test_what_cannot_be_loaded(world: World, server: Live, tmp_path: Path) -> None:
    before = tokens(server, "a", world.prompts[0])
    path = str(world.paths["a"])
    assert "loaded already" in refusal(admin(server, LOAD, lora_name="a", lora_path=path), 400)
    assert "base model" in refusal(admin(server, LOAD, lora_name="base", lora_path=path), 400)
    assert "lora_name" in refusal(admin(server, LOAD, lora_name="a\nb", lora_path=path), 400)
    assert "lora_path" in refusal(admin(server, LOAD, lora_name="c"), 400)
    assert "is_3d_lora_weight" in refusal(
        admin(server, LOAD, lora_name="c", lora_path=path, is_3d_lora_weight=True), 400)
    for missing in ("org/name", str(tmp_path / "none"), "/etc/passwd", "\0", str(tmp_path)):
        assert "lora_path" in refusal(admin(server, LOAD, lora_name="c", lora_path=missing), 404)
    assert "there is no adapter 'c'" in refusal(admin(server, UNLOAD, lora_name="c"), 404)
    for name in ("c", "d"):
        load(server, name, world.paths["b"])
    assert "--max-cpu-loras" in refusal(admin(server, LOAD, lora_name="e", lora_path=path), 400)
    for name in ("c", "d"):
        unload(server, name)
    assert tokens(server, "a", world.prompts[0]) == before


def _hostile(folder: Path, base: Path, kind: str) -> Path:
    path = lora.write(folder / kind, base, seed=3, **({"rank": 32} if kind == "large rank" else {}))
    file, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    elif kind == "huge":
        os.truncate(file, 1 << 40)
    elif kind == "huge table":
        file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    elif kind == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif kind == "link":
        file.unlink()
        file.symlink_to("/etc/passwd")
    elif kind in ("linked config", "linked above", "linked device", "link in a circle"):
        target = {"linked config": folder / "elsewhere.json", "linked above": Path("../elsewhere.json"),
                  "linked device": Path("/dev/zero"), "link in a circle": config}[kind]
        config.rename(folder / "elsewhere.json")
        config.symlink_to(target)
    elif kind == "pickle":
        file.rename(path / "adapter_model.bin")
    elif kind == "long config":
        config.write_text(json.dumps({"peft_type": "LORA", "x": "y" * (2 << 20)}))
    elif kind == "deep config":
        config.write_text("[" * 100_000)
    return path


@pytest.mark.parametrize(("kind", "message"), [
    ("cut", "damaged or incomplete"), ("huge", "max_lora_rank"), ("huge table", "damaged or incomplete"),
    ("linked config", "outside of the checkpoint"), ("linked above", "outside of the checkpoint"),
    ("linked device", "not a LoRA adapter"), ("link in a circle", "not a LoRA adapter"),
    ("pipe", "safetensors only"), ("link", "outside of the checkpoint"), ("pickle", "safetensors only"),
    ("long config", "larger than"), ("deep config", "not valid JSON"), ("large rank", "rank 32|max_lora_rank")])
def test_hostile_folders_end_their_load_alone(
    world: World, server: Live, tmp_path: Path, kind: str, message: str,
) -> None:
    path = _hostile(tmp_path, world.base, kind)
    status = 404 if "not a LoRA adapter" in message else 400
    told = refusal(admin(server, LOAD, lora_name="c", lora_path=str(path)), status)
    assert any(part in told for part in message.split("|")), told
    assert tokens(server, "a", world.prompts[0]) == world.expected["a"][0]


def test_only_the_admin_key_loads(world: World, server: Live) -> None:
    for path, body in ((LOAD, {"lora_name": "c", "lora_path": str(world.paths["a"])}), (UNLOAD, {"lora_name": "a"})):
        assert server.client.post(path, json=body).status_code == 401
    assert "a" in {card["id"] for card in server.client.get("/v1/models").json()["data"]}


def _wait_for_adapters(server: Live, *names: str) -> None:
    """Until the next engine serves these, and no others are left."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        answers = [server.client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1})
                   for name in names]
        served = {card["id"] for card in server.client.get("/v1/models").json()["data"]}
        if all(answer.status_code == 200 for answer in answers) and served == {"base", *names}:
            return
        assert {answer.status_code for answer in answers} <= {200, 500, 503}
        time.sleep(0.2)
    raise AssertionError("the adapters never came back")


def test_adapters_are_there_again_after_a_sleep(world: World, server: Live) -> None:
    assert server.client.post("/sleep?level=2", headers=ROOT).status_code == 200
    assert server.client.post("/v1/completions", json={"model": "a", "prompt": "x"}).status_code == 503
    assert server.client.post("/wake_up", headers=ROOT).status_code == 200
    _wait_for_adapters(server, "a", "b")
    for name in world.expected:
        assert tokens(server, name, world.prompts[1]) == world.expected[name][1]


def test_the_next_engine_has_the_adapters_whose_files_are_the_same(world: World, server: Live, log: Path) -> None:
    config = world.paths["b"] / "adapter_config.json"
    before = config.read_text()
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 1}))
    try:
        (engine,) = children(server.process.pid, b"slotwise.compose.engine_process")
        os.kill(engine, signal.SIGKILL)
        _wait_for_adapters(server, "a")
    finally:
        config.write_text(before)
    assert tokens(server, "a", world.prompts[1]) == world.expected["a"][1]
    assert server.client.post("/v1/completions", json={"model": "b", "prompt": "x"}).status_code == 404
    assert "the adapter b is no longer served: its files have changed" in log.read_text()


@pytest.mark.parametrize(("arguments", "message"), [
    (("--max-loras", "2"), "--max-loras is about adapters: add --enable-lora"),
    (("--lora-modules", "a=/tmp"), "--lora-modules is about adapters: add --enable-lora"),
    (("--enable-lora", "--lora-modules", "a"), "must be NAME=PATH"),
    (("--enable-lora", "--lora-modules", '{"name": "a"}'), "must be NAME=PATH"),
    (("--enable-lora", "--lora-modules", "a=org/name"), "local folders"),
    (("--enable-lora", "--lora-modules", "a=/"), "not a LoRA adapter"),
    (("--enable-lora", "--max-loras", "17"), "--max-cpu-loras 16 must be at least --max-loras 17"),
    (("--enable-lora", "--kv-transfer-config", '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_producer"}'),
     "--kv-transfer-config is not supported with --enable-lora")])
def test_options_that_contradict_each_other(arguments: tuple[str, ...], message: str) -> None:
    ended = cli("serve", *arguments)
    assert ended.returncode != 0 and message in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr


@pytest.mark.parametrize("sizes", ["--tensor-parallel-size", pytest.param(
    "--pipeline-parallel-size", marks=pytest.mark.slow)])
def test_ranks_load_their_parts_beside_a_stream(world: World, sizes: str, tmp_path: Path) -> None:
    with serving(*world.arguments(), sizes, "2", log=tmp_path / "log") as live:
        long = {"model": "b", "prompt": world.prompts[0], "max_tokens": 600, "ignore_eos": True, "stream": True}
        with live.client.stream("POST", "/v1/completions", json=long) as reply:
            lines = reply.iter_lines()
            next(lines)
            unload(live, "a")
            load(live, "later", world.paths["a"])
            assert admin(live, LOAD, lora_name="none", lora_path=str(tmp_path)).status_code == 404
            for model, name in (("base", "base"), ("later", "a"), ("b", "b")):
                assert [tokens(live, model, prompt) for prompt in world.prompts] == world.expected[name]
            assert not any('"error"' in line for line in lines)
