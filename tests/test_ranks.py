"""Several processes that compute one model give the tokens of one process, and end together."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import make, prompts
from live import Live, serving

from slotwise.compose.choices import joined
from slotwise.compose.engine import build_engine
from slotwise.compose.ranks import visible_gpus
from slotwise.core.params import SamplingParams
from slotwise.core.step import Decision
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.model.checkpoint import read_config
from slotwise.model.errors import CheckpointError

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=24)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, top_p=0.9, logprobs=2, prompt_logprobs=1, max_tokens=4)
SMALL = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory": 8 << 20}


def engine_of(folder: Path, ranks: int, **settings: object) -> Engine:
    config = EngineConfig.of(**({"model": str(folder), **SMALL, "tensor_parallel_size": ranks} | settings))
    return build_engine(config)[0]


def tokens_of(
    engine: Engine, asked: list[list[int]], params: SamplingParams, preempted: list[Decision] | None = None,
) -> dict[str, list[int]]:
    """The output of each prompt; all ended well.  Notes the preemptions."""
    preempted = [] if preempted is None else preempted
    for number, prompt in enumerate(asked):
        engine.handle(Add(str(number), prompt, params, seed=number))
    found: dict[str, list[int]] = {str(number): [] for number in range(len(asked))}
    while engine.has_work:
        record = engine.step()
        assert not record.failure and not record.failed, record.failure
        preempted.extend(record.preempted)
        for name, tokens in zip(record.request_ids, record.token_ids, strict=False):
            found[name] += tokens
    return found


@pytest.mark.parametrize("family", [
    "llama_bias", "gemma2", "qwen2_moe",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gpt_oss"))])
def test_two_ranks_give_the_tokens_of_one_process(family: str, tmp_path: Path) -> None:
    folder = make(family, tmp_path / "model")
    config = read_config(folder)
    block = 2 * 16 * 4 * config.num_layers * max(2, config.num_kv_heads) * config.head_dim  # bytes
    few = {"max_num_batched_tokens": 24, "kv_cache_memory": 9 * block, "block_size": 16,
           "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    one, two = engine_of(folder, 1, **few), engine_of(folder, 2, **few)  # prompts are chunked, and rows are preempted
    asked = prompts([5, 40, 17, 70, 1, 33])
    preempted: list[Decision] = []
    assert tokens_of(two, asked, LONG, preempted) == tokens_of(one, asked, LONG) and preempted
    assert tokens_of(two, asked, SAMPLED) == tokens_of(one, asked, SAMPLED)


def test_heads_may_differ_and_be_held_twice(tmp_path: Path) -> None:
    folder = make("smollm2", tmp_path / "odd", num_attention_heads=6, num_key_value_heads=3)
    asked = prompts([5, 40])
    assert tokens_of(engine_of(folder, 2), asked, GREEDY) == tokens_of(engine_of(folder, 1), asked, GREEDY)


@pytest.mark.parametrize(("family", "settings", "says"), [
    ("olmo2", {}, "norms all heads together"), ("smollm2", {}, "3 heads of queries and 1 of keys"),
    ("llama2", {"enable_lora": True}, "enable_lora is not supported"),
    ("llama2", {"overlap": 1}, "overlap is not supported"),
    ("llama2", {"speculative_config": {"model": "draft"}}, "draft model is not supported")])
def test_what_ranks_cannot_share_is_refused(
    family: str, settings: dict[str, object], says: str, tmp_path: Path,
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=says):
        engine_of(make(family, tmp_path / "model"), 2, **settings)


def test_ranks_of_plain_torch_exchange_through_gloo(tmp_path: Path) -> None:
    folder, asked = make("mixtral", tmp_path / "model"), prompts([5, 40])
    one, two = (engine_of(folder, ranks, device="reference") for ranks in (1, 2))
    assert tokens_of(two, asked, GREEDY) == tokens_of(one, asked, GREEDY)


def test_ranks_on_gpus_have_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, expected in (("", ["0", "1"]), ("3,1,2", ["3", "1"]), ("GPU-8a,GPU-71", ["GPU-8a", "GPU-71"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus(2) == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    kernels = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="needs as many GPUs, and torch sees 1"):
        joined(EngineConfig.of(model="any", tensor_parallel_size=2), kernels, None, None, print)


def test_a_lost_rank_fails_the_step_and_all_after_it(tmp_path: Path) -> None:
    engine = engine_of(make("llama2", tmp_path / "model"), 2)
    (rank,) = engine.executor.ranks.processes  # type: ignore[attr-defined]
    engine.handle(Add("a", [1, 2, 3], dataclasses.replace(GREEDY, max_tokens=100), seed=0))
    engine.step()
    rank.kill()
    ends = time.monotonic() + 10
    with pytest.raises(RuntimeError, match="rank 1 of 2"):
        while time.monotonic() < ends:
            engine.handle(Add(str(time.monotonic_ns()), [1, 2, 3], GREEDY, seed=0))
            engine.step()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The built-in model, on two ranks."""
    log = tmp_path_factory.mktemp("ranks") / "log"
    with serving("--dtype", "float32", "--tensor-parallel-size", "2", log=log) as live:
        yield live


def children(pid: int) -> dict[str, int]:
    """Process ids of the modules that children of a process run."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        found |= {words[at + 1].decode(): int(child) for at, word in enumerate(words) if word == b"-m"}
    return found


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_ends_its_streams_and_the_next_engine_says_the_same(server: Live, sent: signal.Signals) -> None:
    body = {"model": "slotwise-builtin", "prompt": "def main():", "max_tokens": 32, "temperature": 0}
    before = server.client.post("/v1/completions", json=body).json()["choices"]
    engine = children(server.process.pid)["slotwise.compose.worker"]
    long = body | {"max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=long) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(children(engine)["slotwise.compose.rank_worker"], sent)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and sum('"error"' in line for line in rest) == 1
    assert any("rank 1 of 2" in line for line in rest)
    ends = time.monotonic() + 60
    while server.client.get("/health").status_code != 200 and time.monotonic() < ends:
        time.sleep(0.1)
    assert server.client.post("/v1/completions", json=body).json()["choices"] == before
    assert children(server.process.pid)["slotwise.compose.worker"] != engine


def test_a_grammar_holds_on_two_ranks(server: Live) -> None:
    body = {"model": "slotwise-builtin", "prompt": "x", "max_tokens": 8,
            "structured_outputs": {"choice": ["yes", "no"]}}
    assert server.client.post("/v1/completions", json=body).json()["choices"][0]["text"] in ("yes", "no")
