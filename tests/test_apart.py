"""Prefill and decode apart with real engines: tokens are those of one engine, whatever becomes of the transfer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from support.apart import HOST, SECRET, Chaos, free_port
from support.checkpoints import prompts
from support.live import Live, serving
from support.live_server import children, eventually
from support.scale_door import door_of

from slotwise import builtin
from slotwise.api.generate.prompt_transfer import HEADER
from slotwise.compose.engine_builder import load
from slotwise.core.params import SamplingSpec
from slotwise.core.request import KVTransfer, RequestSpec
from slotwise.core.speculation.speculation_settings import Speculation
from slotwise.core.transfer.kv_transfer_config import (
    BOTH,
    CONNECTORS,
    CONSUMER,
    PRODUCER,
    SHARED_MEMORY,
    TCP,
    KVTransferConfig,
    secret_of,
)
from slotwise.core.transfer.wire import Wire
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add

SMALL = {"max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 64, "block_size": 16}
PROMPTS = prompts([300, 130, 64, 17, 2, 200])
GREEDY = SamplingSpec(temperature=0.0, max_tokens=12, ignore_eos=True)
TIMEOUT = 5.0


def run(engines: list[Engine], until: Callable[[], bool] = lambda: False) -> dict[str, list[int]]:
    """Step the engines until no request is left, or `until` holds; the tokens of the last one."""
    tokens: dict[str, list[int]] = {}
    end = time.monotonic() + 120.0
    while any(engine.has_work for engine in engines) and not until():
        assert time.monotonic() < end
        for engine in engines:
            if engine.has_work and engine.wait() <= 0:
                record = engine.step()
                assert not record.outcome.failure
                if engine is engines[-1]:
                    for name, new in zip(record.plan.request_ids, record.tokens, strict=False):
                        tokens.setdefault(name, []).extend(new)
    return tokens


def ask(engine: Engine, name: str, prompt: list[int], kv: KVTransfer | None, params: SamplingSpec = GREEDY) -> None:
    engine.handle(Add(name, RequestSpec(prompt, params, kv=kv)))


@pytest.fixture(scope="module", params=[
    (TCP, {"dtype": "float32"}), (SHARED_MEMORY, {"dtype": "float32", "kv_cache_dtype": "int8"}),
    (SHARED_MEMORY, {"dtype": "bfloat16", "speculative_config": Speculation("ngram")})], ids=["tcp", "int8", "drafts"])
def engines(request: pytest.FixtureRequest):
    """A producer, a consumer, where they meet, and the tokens of one engine alone."""
    connector, settings = request.param
    port, model = free_port(), str(builtin.path())
    sends = KVTransferConfig(connector, PRODUCER, kv_port=port, timeout=TIMEOUT, secret=SECRET)
    receives = replace(sends, kv_role=CONSUMER, peers=(HOST,))
    config = EngineConfig(model=model, **SMALL, **settings)
    loaded = load(replace(config, kv_transfer_config=sends))
    alone, _ = loaded.engine(config)
    producer, _ = loaded.engine(replace(config, kv_transfer_config=sends))
    consumer, _ = loaded.engine(replace(config, kv_transfer_config=receives))
    for index, prompt in enumerate(PROMPTS):
        ask(alone, f"r{index}", prompt, None)
    yield producer, consumer, port, run([alone])
    for engine in (producer, consumer):
        engine._kv_link.close()


def test_tokens_are_those_of_one_engine(engines):
    producer, consumer, port, expected = engines
    for index, prompt in enumerate(PROMPTS):
        name = f"r{index}"
        ask(producer, name, prompt, KVTransfer(name, True, TIMEOUT), replace(GREEDY, max_tokens=1))
        ask(consumer, name, prompt, KVTransfer(name, False, TIMEOUT, HOST, port))
    computed: list[int] = []
    step = consumer.step

    def watched() -> Any:
        record = step()
        computed.extend(count for count, kind in zip(record.plan.counts, record.plan.kinds, strict=True) if not kind)
        return record

    consumer.step = watched
    assert run([producer, consumer]) == expected
    assert sum(computed) == len(PROMPTS)  # the last token of each prompt
    consumer.step = step


def test_faults_of_the_transfer_change_no_token(engines, monkeypatch):
    producer, consumer, port, expected = engines
    sender, receiver, draw, seen = producer._kv_link._sender, consumer._kv_link._receiver, Random(3), Counter()
    accept, connect = sender._listener.accept, receiver._connector.connect

    def damaged(wire: Wire) -> Wire:
        Chaos(wire, Random(draw.random()), 0.15, 0.6, seen)
        return wire

    for one in (receiver, receiver._connector, sender, sender._listener):
        monkeypatch.setattr(one, "_timeout", 0.5)
    monkeypatch.setattr(sender._listener, "accept", lambda: damaged(accept()))
    monkeypatch.setattr(receiver._connector, "connect", lambda *where: damaged(connect(*where)))
    tokens: dict[str, list[int]] = {}
    for again in range(3):
        for index, prompt in enumerate(PROMPTS):
            for engine, kv, params in (
                    (producer, KVTransfer(f"f{again}.{index}", True, 0.5), replace(GREEDY, max_tokens=1)),
                    (consumer, KVTransfer(f"f{again}.{index}", False, 0.5, HOST, port), GREEDY)):
                engine.handle(Add(f"{again}.{index}", RequestSpec(prompt, params, salt=str(again), kv=kv)))
        tokens |= run([producer, consumer])
    assert tokens == {f"{again}.{name[1:]}": told for again in range(3) for name, told in expected.items()}
    assert seen.total() > 10
    for engine in (producer, consumer):
        engine._scheduler.check()
        assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


def test_a_producer_that_is_lost_in_the_middle_costs_no_request(engines):
    producer, consumer, port, _ = engines
    sender, prompt = producer._kv_link._sender, prompts([400], seed=5)[0]
    ask(producer, "alone", prompt, None)
    expected = run([producer])["alone"]
    ask(producer, "lost", [7, *prompt[1:]], KVTransfer("lost", True, 0.2), replace(GREEDY, max_tokens=1))
    ask(consumer, "lost", prompt, KVTransfer("lost", False, TIMEOUT, HOST, port))  # another prompt: refused
    assert run([producer, consumer])["lost"] == expected
    ask(producer, "again", prompt[::-1], KVTransfer("again", True, TIMEOUT), replace(GREEDY, max_tokens=1))
    ask(consumer, "again", prompt[::-1], KVTransfer("again", False, TIMEOUT, HOST, port))
    receiver = consumer._kv_link._receiver
    consumer.step()
    run([producer], until=lambda: receiver._transfers["again"].num_arrived > 2)
    sender.close()
    tokens = run([consumer])["again"]
    ask(producer, "whole", prompt[::-1], None)
    assert tokens == run([producer])["whole"]


@pytest.mark.parametrize(("settings", "why"), [
    ({"tensor_parallel_size": 2}, "several ranks"), ({"enable_lora": True}, "enable_lora"),
    ({"batching": "static"}, "batching static"),
    ({"speculative_config": Speculation("draft_model", model="m")}, "a draft model")])
def test_what_does_not_go_together_is_refused_by_name(settings, why):
    with pytest.raises(ConfigError, match=f"kv_transfer_config is not supported with {why}"):
        EngineConfig.of(model="m", kv_transfer_config=KVTransferConfig(TCP, PRODUCER, secret=SECRET), **settings)


def test_settings_are_vllms():
    given = {"kv_connector": TCP, "kv_role": BOTH, "kv_ip": "10.0.0.1", "kv_port": 5, "engine_id": "e",
             "kv_connector_extra_config": {"peers": ["10.0.0.2:5", "10.0.0.3"], "timeout": 2}}
    config = KVTransferConfig.of(given)
    assert config.is_producer and config.is_consumer and config.timeout == 2
    assert [config.accepts(*one) for one in (("10.0.0.2", 5), ("10.0.0.2", 6), ("10.0.0.3", 6))] == [True, False, True]


@pytest.mark.parametrize(("change", "why"), [
    ({"kv_connector": "NixlConnector"}, "kv_connector must be one of"), ({"kv_role": "kv_x"}, "kv_role must be one of"),
    ({"kv_rank": 0}, "there is no key 'kv_rank'"), ({"kv_port": 0}, "kv_port must be"),
    ({"kv_role": CONSUMER}, "needs kv_connector_extra_config.peers"),
    ({"kv_connector_extra_config": {"peers": ["a"]}}, "peers has no effect"),
    ({"kv_connector_extra_config": {"x": 1}}, "has no key 'x'"),
    ({"kv_connector_extra_config": {"timeout": 0}}, "timeout must be"),
    ({"secret": "0123456789abcdef"}, "command lines: set SLOTWISE_KV_TRANSFER_SECRET"),
    ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy must be recompute"),
    ({"kv_connector": SHARED_MEMORY, "kv_ip": "10.0.0.1"}, "kv_ip must be 127.0.0.1")])
def test_other_settings_are_refused_by_name(change, why):
    with pytest.raises(ValueError, match=why):
        KVTransferConfig.of({"kv_connector": TCP, "kv_role": PRODUCER} | change)


def test_a_role_needs_a_secret_which_no_text_shows():
    with pytest.raises(ConfigError, match=r"needs a secret .*SLOTWISE_KV_TRANSFER_SECRET.*--kv-transfer-secret-file"):
        EngineConfig(model="m", kv_transfer_config=KVTransferConfig(TCP, PRODUCER))
    config = EngineConfig(model="m", kv_transfer_config=KVTransferConfig(TCP, PRODUCER, secret=SECRET))
    assert SECRET not in repr(config) and config.kv_transfer_config.told().secret == ""


def test_the_secret_is_read_from_a_file_or_the_environment(tmp_path: Path):
    file, variables = tmp_path / "secret", {"SLOTWISE_KV_TRANSFER_SECRET": "of the environment".replace(" ", "-")}
    file.write_text("0123456789abcdef\n")
    assert secret_of(str(file), variables) == "0123456789abcdef"
    assert secret_of("", variables) == "of-the-environment"
    assert secret_of("", {}) == ""
    for wrong in ("", "short", "with a space in it", "ü" * 20, "x" * 2000, "two\nlines of the file"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="16 to 1024 characters"):
            secret_of(str(file), variables)
    with pytest.raises(OSError):
        secret_of(str(tmp_path / "missing"), variables)


def test_all_connectors_are_described():
    assert set(CONNECTORS) == {SHARED_MEMORY, TCP}


def secret_in(pid: int) -> str:
    """The transfer secret in the environment of a process."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(one.partition("=")[2] for one in variables if one.startswith("SLOTWISE_KV_TRANSFER_SECRET="))


@pytest.mark.slow
def test_one_command_serves_prefill_and_decode_apart(tmp_path: Path):
    small = ("--max-num-seqs", "4", "--max-model-len", "512", "--dtype", "float32")
    with door_of("--prefill-replicas", "1", "--decode-replicas", "1", *small, log=tmp_path / "door") as door:
        eventually(lambda: sum(one["is_up"] for one in door.get("/replicas").json()["replicas"]) == 2)
        assert [one["role"] for one in door.get("/replicas").json()["replicas"]] == [PRODUCER, CONSUMER]

        def text(number: int) -> str:
            body = {"model": "slotwise-builtin", "prompt": [3 + number, *PROMPTS[0]], "max_tokens": 8, "temperature": 0}
            answer = door.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        texts = [text(number) for number in range(3)]
        pids = children(door.process.pid, b"replica_main")
        (secret,) = {secret_in(pid) for pid in pids}
        assert len(secret) == 64 and not any(secret in path.read_text(errors="replace") for pid in pids
                                             for path in (Path(f"/proc/{pid}/cmdline"), tmp_path / "door"))
        for headers in ({}, {HEADER: "guessed"}, {HEADER: secret}):  # no client of a router names a transfer
            refused = door.client.post(door.url + "/v1/completions", headers=headers, json={
                "prompt": [5], "max_tokens": 1, "kv_transfer_params": {
                    "do_remote_prefill": True, "transfer_id": "invented", "remote_host": HOST, "remote_port": 1}})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "transfer_secret_needed")
        metrics = door.get("/metrics").text
        assert 'slotwise:router_prefills_total{replica="0"} 3' in metrics
        assert re.search(r'slotwise:kv_transfers_total\{replica="1".*outcome="complete".*\} 3', metrics)
        assert door.client.put(door.url + "/admin/replicas", json={"replicas": 1}).status_code == 400
        with door.client.stream("POST", door.url + "/v1/chat/completions", json={
                "model": "slotwise-builtin", "messages": [{"role": "user", "content": "def add(a, b): " * 40}],
                "max_tokens": 4, "stream": True}) as response:
            assert response.read().count(b"data: ") >= 3
        said = "def sub(a, b): " * 40
        for path, body in (
                ("/v1/messages", {"messages": [{"role": "user", "content": said}], "max_tokens": 4}),
                ("/v1/responses", {"input": said + "x", "max_output_tokens": 4})):
            answer = door.post(path, {"model": "slotwise-builtin", **body})
            assert answer.status_code == 200 and answer.json()["usage"]["output_tokens"] == 4, answer.text
        eventually(lambda: re.search(r'slotwise:kv_transfers_total\{replica="1".*outcome="complete".*\} 6',
                                     door.get("/metrics").text))
        (replica,) = [pid for pid in children(door.process.pid, b"replica_main")
                      if PRODUCER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(replica, signal.SIGKILL)
        assert [text(number) for number in (0, 1)] == texts[:2]


@pytest.mark.slow
def test_a_proxy_written_for_vllm_works_with_the_secret_as_its_key(tmp_path: Path):
    secret, port = "0123456789abcdef" * 2, free_port()
    (tmp_path / "secret").write_text(secret)
    small = ("--max-num-seqs", "4", "--max-model-len", "512", "--dtype", "float32", "--api-key", secret, "--api-key",
             "of-a-client", "--kv-transfer-secret-file", str(tmp_path / "secret"), "--kv-transfer-config")
    shared = {"kv_connector": TCP, "kv_port": port, "kv_ip": HOST}
    roles = (shared | {"kv_role": PRODUCER}, {
        "kv_connector": TCP, "kv_role": CONSUMER, "kv_connector_extra_config": {"peers": [f"{HOST}:{port}"]}})
    with contextlib.ExitStack() as stack:
        prefill, decode = (stack.enter_context(serving(*small, json.dumps(role), log=tmp_path / role["kv_role"]))
                           for role in roles)

        def ask(server: Live, key: str, **more: Any) -> httpx.Response:
            return server.client.post(server.url + "/v1/completions", headers={"Authorization": f"Bearer {key}"}, json={
                "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, **more})

        asks = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                "remote_block_ids": None, "remote_host": None, "remote_port": None}  # as vLLM's example proxies do
        computed = ask(prefill, secret, max_tokens=1, kv_transfer_params=asks)
        assert computed.status_code == 200, computed.text
        source = computed.json()["kv_transfer_params"]
        assert ask(decode, "of-a-client", kv_transfer_params=source).status_code == 403
        assert ask(prefill, "of-a-client", max_tokens=1, kv_transfer_params=asks).status_code == 403
        received = ask(decode, secret, kv_transfer_params=source)
        assert received.status_code == 200, received.text
        metrics = decode.client.get(decode.url + "/metrics", headers={"Authorization": f"Bearer {secret}"}).text
        assert re.search(r'slotwise:kv_transfers_total\{.*outcome="complete".*\} 1', metrics)
        alone = ask(prefill, "of-a-client")
        assert received.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
        logs = [(tmp_path / role["kv_role"]).read_text() for role in roles]
        assert not any(secret in log for log in logs)
