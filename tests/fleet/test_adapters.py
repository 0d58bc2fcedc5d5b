"""Adapters of all replicas, through the door: loaded everywhere or nowhere, and again where a replica starts anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support import checkpoints
from support import lora_adapters as lora
from support.live_server import Server, children, eventually
from support.scale_door import door_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ROOT = {"Authorization": "Bearer root"}
SIZES = ("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--kv-cache-memory", "16777216")

pytestmark = pytest.mark.slow


class World(NamedTuple):
    door: Server
    base: Path
    log: Path

    def admin(self, path: str, **body: Any) -> httpx.Response:
        return self.door.post(path, body, **ROOT)

    def states(self) -> list[dict[str, Any]]:
        return self.door.get("/replicas").json()["replicas"]

    def adapters(self) -> list[list[str]]:
        """Of each replica."""
        return [one["adapters"] for one in self.states()]

    def models(self) -> list[str]:
        return [card["id"] for card in self.door.get("/v1/models").json()["data"]]

    def tokens(self, model: str, url: str = "") -> list[int]:
        answer = httpx.post((url or self.door.url) + "/v1/completions", timeout=120, json={
            "model": model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def kill(self, replica: int) -> None:
        """Kills a replica, and waits until another process has taken its place."""
        url = self.states()[replica]["url"]
        port = url.rpartition(":")[2]
        (pid,) = [pid for pid in children(self.door.process.pid, b"replica_main")
                  if port.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: (one := self.states()[replica])["is_up"] and one["url"] != url)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("adapters")
    base = checkpoints.make("llama2", folder / "base", tokenizer=True)
    for seed, name in enumerate(("a", "b"), 1):
        lora.write(folder / name, base, seed=seed)
    options = ("--served-model-name", "base", "--enable-lora", "--admin-api-key", "root", *SIZES)
    with door_of(str(base), "--replicas", "2", *options, log=folder / "door") as door:
        found = World(door, base, folder / "door")
        eventually(lambda: sum(one["is_up"] for one in found.states()) == 2)
        yield found


def path_of(world: World, name: str) -> str:
    return str(world.base.parent / name)


def test_an_adapter_is_loaded_on_all_replicas_and_unloaded(world: World) -> None:
    answer = world.admin(LOAD, lora_name="a", lora_path=path_of(world, "a"))
    assert answer.status_code == 200 and answer.json()["parent"] == "base", answer.text
    assert world.adapters() == [["a"], ["a"]] and world.models() == ["base", "a"]
    assert world.door.get("/v1/models/a").json()["root"] == path_of(world, "a")
    found = world.tokens("a")
    assert found != world.tokens("base")
    assert [world.tokens("a", one["url"]) for one in world.states()] == [found, found]
    again = world.admin(LOAD, lora_name="a", lora_path=path_of(world, "a"))
    assert again.status_code == 400 and again.json()["error"]["code"] == "adapter_exists"
    assert world.adapters() == [["a"], ["a"]]
    assert world.admin(UNLOAD, lora_name="a").json()["deleted"]
    assert world.adapters() == [[], []] and world.models() == ["base"]
    gone = world.door.post("/v1/completions", {"model": "a", "prompt": [5], "max_tokens": 1})
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
    assert world.admin(UNLOAD, lora_name="a").status_code == 404


def test_only_the_admin_key_changes_adapters(world: World) -> None:
    answer = world.door.post(LOAD, {"lora_name": "a", "lora_path": path_of(world, "a")})
    assert answer.status_code in (401, 403) and world.adapters() == [[], []]


def test_what_one_replica_refuses_none_has(world: World) -> None:
    missing = world.admin(LOAD, lora_name="a", lora_path="/nowhere")
    assert missing.status_code == 404 and missing.json()["error"]["message"].startswith("replica ")
    second = world.states()[1]["url"]
    own = httpx.post(second + LOAD, json={"lora_name": "b", "lora_path": path_of(world, "b")}, headers=ROOT, timeout=60)
    assert own.status_code == 200
    refused = world.admin(LOAD, lora_name="b", lora_path=path_of(world, "b"))
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("replica 1: lora_name: 'b'")
    first = httpx.get(world.states()[0]["url"] + "/v1/models", timeout=60).json()["data"]
    assert [card["id"] for card in first] == ["base"]
    assert world.admin(UNLOAD, lora_name="b").status_code == 200  # where it is


def test_a_replica_that_starts_anew_gets_adapters_again_unless_their_files_have_changed(world: World) -> None:
    assert world.admin(LOAD, lora_name="a", lora_path=path_of(world, "a")).status_code == 200
    found = world.tokens("a")
    eventually(lambda: world.adapters() == [["a"], ["a"]])
    world.kill(0)
    eventually(lambda: world.adapters() == [["a"], ["a"]])
    assert world.tokens("a", world.states()[0]["url"]) == found

    changed = lora.write(world.base.parent / "changed", world.base, seed=7)
    for file in changed.iterdir():
        file.replace(world.base.parent / "a" / file.name)
    world.kill(1)
    eventually(lambda: world.states()[1]["refused_adapters"])
    eventually(lambda: world.adapters() == [["a"], []])
    assert world.states()[1]["refused_adapters"] == {"a": "its files have changed"}
    assert [world.tokens("a") for _ in range(4)] == [found] * 4
    assert "replica 1 does not serve the adapter a: its files have changed" in world.log.read_text()

    assert world.admin(LOAD, lora_name="a", lora_path=path_of(world, "a"), load_inplace=True).status_code == 200
    assert world.adapters() == [["a"], ["a"]] and world.states()[1]["refused_adapters"] == {}
    other = world.tokens("a")
    assert other != found
    eventually(lambda: [world.tokens("a", one["url"]) for one in world.states()] == [other, other])
