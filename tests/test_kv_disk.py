"""Blocks on disk behind a live server and an `LLM`: found after a restart, a sleep and a reload of the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.live import Live, cli, serving
from support.live_server import eventually

from slotwise import LLM, SamplingParams, builtin
from slotwise.compose import engine_builder
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.core.transfer.kv_transfer_config import PRODUCER, TCP, KVTransferConfig
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.kv_disk import DiskLink

BLOCK, LENGTH, NUM_PROMPTS = 16, 960, 12


def prompt(number: int) -> list[int]:
    return [5 + (token * (number + 3)) % 900 for token in range(LENGTH)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


def start(folder: Path, log: str) -> Any:
    return serving("builtin", "--api-key", "one", "--api-key", "two", "--admin-api-key", "root", "--dtype", "float32",
                   "--block-size", str(BLOCK), "--max-num-seqs", "4", "--kv-disk", str(folder / "blocks"),
                   "--kv-disk-size", "1", "--max-stall-ms", "0", log=folder / log)  # always read


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    """A restarted server, on blocks that the first one wrote for two API keys."""
    with start(folder, "first") as first:
        for number in range(NUM_PROMPTS):
            written(first, folder, number)
        written(first, folder, 0, "two")
    with start(folder, "second") as second:
        yield second


def written(server: Live, folder: Path, number: int, key: str = "one") -> None:
    """Sends a prompt and waits for its blocks: a queue that is full would drop some."""
    before = len(files_in(folder))
    ask(server, number, key)
    eventually(lambda: len(files_in(folder)) >= before + LENGTH // BLOCK)


def files_in(folder: Path) -> list[Path]:
    return list((folder / "blocks").glob("*.kv"))


def ask(server: Live, number: int, key: str = "one") -> dict[str, int]:
    """The tokens of a prompt by cause."""
    headers = {"Authorization": f"Bearer {key}"}
    answer = server.client.post("/v1/completions", headers=headers, json={
        "prompt": prompt(number), "max_tokens": 1, "temperature": 0}).raise_for_status().json()
    (explained,) = server.client.get(f"/explain/{answer['id']}", headers=headers).raise_for_status().json()["requests"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == explained["cached_tokens"]
    return {span["cause"]: span["tokens"] for span in explained["cache"]["spans"]}


def post(server: Live, path: str, key: str = "root", **body: Any) -> Any:
    return server.client.post(path, headers={"Authorization": f"Bearer {key}"}, json=body or None)


def found(server: Live, numbers: range) -> bool:
    """Whether any of some prompts was found on disk: how much of each is read depends on the load of the machine."""
    return any("found_on_disk" in ask(server, number) for number in numbers)


def test_a_restarted_server_finds_the_prompts_of_each_key(server: Live, folder: Path) -> None:
    assert found(server, range(3))
    metrics = server.client.get("/metrics", headers={"Authorization": "Bearer root"}).text
    assert 'slotwise:kv_disk_blocks_total{event="read"' in metrics and "slotwise:kv_disk_bytes" in metrics
    assert "found_on_disk" not in ask(server, 3, "two")  # of the other key


def test_a_sleep_and_another_model_in_between(server: Live) -> None:
    for level in (1, 2):
        assert post(server, f"/sleep?level={level}").status_code == 200
    assert post(server, "/wake_up").status_code == 200
    assert found(server, range(4, 7))
    post(server, "/v1/load_model", model=str(builtin.path())).raise_for_status()
    assert found(server, range(7, 10))


def test_a_key_removes_its_own_prompts_and_the_operator_all(server: Live, folder: Path) -> None:
    ask(server, 0, "two")
    number = len(files_in(folder))
    removed = post(server, "/reset_prefix_cache", "one").raise_for_status().json()
    assert removed["tenant"] == "own" and 0 < removed["num_stored_blocks_removed"] < number
    kept = {path.stem[-16:] for path in files_in(folder)}
    assert len(kept) == 1
    assert ask(server, 11) == {"new": LENGTH // BLOCK * BLOCK - BLOCK, "last_block": BLOCK}
    assert "found" in ask(server, 0, "two")
    assert post(server, "/reset_prefix_cache?x=1").status_code == 400
    removed = post(server, "/reset_prefix_cache").raise_for_status().json()
    assert removed["tenant"] == "all" and not {path.stem[-16:] for path in files_in(folder)} & kept
    assert "found" not in ask(server, 0, "two")


SHARED = "def total(numbers):\n    return sum(number for number in numbers if number)\n\n" * 4
WORDS = {"one": "xx xj jx jjx", "two": "zz zq qz qqz"}  # letters that neither the shared text nor the other key has


@pytest.mark.parametrize("seed", range(3))
def test_no_answer_to_a_key_shows_what_another_key_sent(server: Live, seed: int) -> None:
    """Whatever both send, from memory and from disk, and whenever either removes its own."""
    draw, ids = Random(seed), list[str]()
    for number in range(24):
        key = draw.choice(("one", "two"))
        words = WORDS[key].split()
        own = " ".join(draw.choices(words, k=draw.choice((8, 40))))
        headers = headers_of(key) | {"X-Session-Id": f"session-of-{key}"}
        answer = server.client.post("/v1/completions", headers=headers, json={
            "prompt": SHARED[: draw.choice((40, len(SHARED)))] + own, "max_tokens": 1,
            "request_id": f"{seed}-{number}-of-{key}", "cache_salt": draw.choice((None, f"salt-of-{key}"))})
        ids.append(answer.raise_for_status().json()["id"])
        if draw.random() < 0.15:
            post(server, "/reset_prefix_cache", key).raise_for_status()
    for key, other in (("one", "two"), ("two", "one")):
        def get(path: str, key: str = key) -> Any:
            return server.client.get(path, headers=headers_of(key))

        report = get("/cache/report").json()
        explained = [get(f"/explain/{one}").json() for one in ids if one.endswith(key)]
        assert explained and report["divergences"]
        assert all(get(f"/explain/{one}").status_code == 404 for one in ids if one.endswith(other))
        spans = [span for one in explained for request in one["requests"] for span in request["cache"]["spans"]]
        shown = [*report["divergences"], *(span for span in spans if "text" in span)]
        assert any(set(WORDS[key]) - {" "} & set(str(one["text"])) for one in shown)
        for one in shown:
            assert not set(str(one["text"]) + one["advice"].partition("(")[2]) & set(WORDS[other]) - {" "}, one
        stream, metrics = get("/events?follow=0").text, get("/metrics").text
        for text in (str(report), str(explained), stream, metrics):
            assert f"of-{other}" not in text
    post(server, "/reset_prefix_cache", "two").raise_for_status()
    ask(server, 0)
    assert "found" in ask(server, 0)


def headers_of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_an_llm_finds_what_another_has_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskLink, "_seconds_to_compute", lambda *blocks: 60.0)
    settings = {"dtype": "float32", "max_num_seqs": 2, "block_size": BLOCK,
                "kv_disk": str(tmp_path / "blocks"), "kv_disk_size": 1, "disable_log_stats": False}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def run(llm: LLM) -> tuple[list[int], float]:
        (output,) = llm.generate([{"prompt_token_ids": prompt(0)}], params)
        causes = {one.labels["cause"]: one.value for one in llm.get_metrics()
                  if one.name == "slotwise:prompt_tokens_by_cause"}
        return output.outputs[0].token_ids, causes["found_on_disk"]

    llm = LLM(**settings)
    tokens, read = run(llm)
    assert not read
    eventually(lambda: len(list((tmp_path / "blocks").glob("*.kv"))) == LENGTH // BLOCK)
    llm.sleep(2)
    llm.wake_up()
    assert run(llm) == (tokens, LENGTH - BLOCK)
    del llm
    for change, is_read in (({"kv_cache_dtype": "int8"}, False), ({}, True)):
        other = LLM(**settings | change)
        assert (run(other)[1] > 0) == is_read
        if is_read:
            other.reset_prefix_cache()
            assert not list((tmp_path / "blocks").glob("*.kv")) and run(other)[1] == LENGTH - BLOCK
        del other


def test_blocks_of_weights_that_could_not_be_calibrated_are_others(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskLink, "_seconds_to_compute", lambda *blocks: 60.0)
    settings = {"quantization": "int4", "max_num_seqs": 2, "block_size": BLOCK, "packed_weights_cache": 0,
                "kv_disk": str(tmp_path / "blocks"), "kv_disk_size": 1}
    params = SamplingParams(temperature=0, max_tokens=1)
    num_kept = 0
    for obstacle, is_read in (("", False), ("there is no memory", False), ("there is no memory", True), ("", True)):
        monkeypatch.setattr(engine_builder, "_calibration_obstacle", lambda *model, why=obstacle: why)
        llm = LLM(**settings)
        (output,) = llm.generate([{"prompt_token_ids": prompt(0)}], params, use_tqdm=False)
        assert bool(output.num_cached_tokens) == is_read
        num_kept += 0 if is_read else LENGTH // BLOCK
        eventually(lambda number=num_kept: len(list((tmp_path / "blocks").glob("*.kv"))) == number)
        del llm


@pytest.mark.parametrize(("settings", "why"), [
    ({"tensor_parallel_size": 2}, "several ranks"), ({"batching": "static"}, "batching static"),
    ({"device": "cuda"}, "device cuda"), ({"enable_prefix_caching": False}, "needs enable_prefix_caching"),
    ({"speculative_config": Speculation("draft_model", model="m")}, "a draft model"),
    ({"kv_disk": ""}, "name a folder"),
    ({"kv_transfer_config": KVTransferConfig(TCP, PRODUCER, secret="x" * 16)}, "kv_transfer_config")])
def test_what_does_not_go_together_is_refused_by_name(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig.of(**{"model": "m", "kv_disk": "/blocks"} | settings)


def test_a_folder_that_others_may_enter_is_refused_in_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = cli("serve", "builtin", "--kv-disk", str(tmp_path), "--port", "0")
    assert done.returncode and "--kv-disk" in done.stderr and "chmod 700" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
