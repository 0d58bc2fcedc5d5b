"""Several processes that compute one model give the tokens of one process, and end together.

Where starting and ending them is not what is tested, ranks are threads (`rank_threads.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import make, prompts
from support.live import Live, serving
from support.rank_threads import ranks_on_threads
from support.records import cached_of

from slotwise import LLM, StructuredOutputsParams
from slotwise import SamplingParams as AskedParams
from slotwise.compose import ranks
from slotwise.compose.engine_builder import build_engine, other_ranks
from slotwise.compose.rank_process import obey
from slotwise.compose.ranks import RankLostError, _Rank, visible_gpus
from slotwise.compute.model.loading import read_config
from slotwise.core.params import SamplingSpec
from slotwise.core.record import Decision
from slotwise.core.request import RequestSpec
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.ipc import BlockingChannel, frame, pair
from slotwise.engine.messages import Add, Finish
from slotwise.errors import CheckpointError
from slotwise.platform import spawn

GREEDY = SamplingSpec(temperature=0.0, max_tokens=10, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=24)
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, top_p=0.9, logprobs=2, prompt_logprobs=1, max_tokens=4)
LISTENS, LOOPBACK = "0A", "0100007F"  # a state, and 127.0.0.1, in /proc/net/tcp
SMALL = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory": 8 << 20}


@pytest.fixture
def threads() -> Iterator[None]:
    with ranks_on_threads():
        yield


def engine_of(folder: Path, ranks: int, **settings: object) -> Engine:
    config = EngineConfig.of(**({"model": str(folder), **SMALL, "tensor_parallel_size": ranks} | settings))
    return build_engine(config)[0]


def staged(folder: Path, stages: int, width: int = 1, **settings: object) -> Engine:
    return engine_of(folder, width, pipeline_parallel_size=stages, **settings)


def tokens_of(
    engine: Engine, asked: list[list[int]], params: SamplingSpec, preempted: list[Decision] | None = None,
    cached: list[int] | None = None,
) -> dict[int, list[int]]:
    """The output of each prompt; all ended well.  Notes the preemptions, and the tokens found in the cache."""
    preempted, cached = [] if preempted is None else preempted, [] if cached is None else cached
    for number, prompt in enumerate(asked):
        engine.handle(Add(number, RequestSpec(prompt, params, number)))
    found: dict[int, list[int]] = {number: [] for number in range(len(asked))}
    while engine.has_work:
        record = engine.step()
        assert not record.outcome.failure and not record.result.failed, record.outcome.failure
        preempted.extend(record.preempted)
        cached.extend(cached_of(record))
        for name, tokens in zip(record.plan.request_ids, record.tokens, strict=False):
            found[name] += tokens
    return found


def test_two_ranks_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    """Those of other families: `test_rank_families.py`."""
    folder = make("llama_bias", tmp_path / "model")
    config = read_config(folder)
    block = 2 * 16 * 4 * config.num_layers * max(2, config.num_kv_heads) * config.head_dim  # bytes
    few = {"max_num_batched_tokens": 24, "kv_cache_memory": 9 * block, "block_size": 16,
           "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    one, two = engine_of(folder, 1, **few), engine_of(folder, 2, **few)  # prompts are chunked, and rows are preempted
    asked = prompts([5, 40, 17, 70, 1, 33])
    preempted: list[Decision] = []
    assert tokens_of(two, asked, LONG, preempted) == tokens_of(one, asked, LONG) and preempted
    assert tokens_of(two, asked, SAMPLED) == tokens_of(one, asked, SAMPLED)


@pytest.mark.parametrize(("family", "stages", "width"), [("qwen2_moe", 2, 2), ("gpt_oss", 4, 1)])
def test_stages_give_the_tokens_of_one_process(
        threads: None, family: str, stages: int, width: int, tmp_path: Path) -> None:
    folder = make(family, tmp_path / "model")
    config = read_config(folder)
    block = 2 * 16 * 4 * config.num_layers * max(2, config.num_kv_heads) * config.head_dim  # bytes
    memory = (18 if any(config.windows) else 12) * block
    few = {"max_num_batched_tokens": 24, "kv_cache_memory": memory, "block_size": 16,
           "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    one, several = engine_of(folder, 1, **few), staged(folder, stages, width, **few)
    assert several.depth == stages - 1
    asked = prompts([5, 40, 17, 70, 1, 33, 61, 9])
    preempted: list[Decision] = []
    expected, cached = tokens_of(one, asked, LONG), list[int]()
    assert tokens_of(several, asked, LONG, preempted) == expected
    assert preempted or any(config.windows), "windows leave blocks enough for all rows"
    assert tokens_of(several, asked[4:], LONG, cached=cached) == {
        at: expected[at + 4] for at in range(4)} and any(cached)
    assert tokens_of(several, asked, SAMPLED) == tokens_of(one, asked, SAMPLED)


def test_a_slot_that_another_request_has_taken_learns_nothing_of_the_one_before(
        threads: None, tmp_path: Path) -> None:
    folder, asked = make("llama2", tmp_path / "model"), prompts([30, 44, 9, 51, 26, 38])
    alone, engine = engine_of(folder, 1), staged(folder, 2, max_num_seqs=2, max_num_batched_tokens=16)
    expected = tokens_of(alone, asked, LONG)
    found: dict[int, list[int]] = {}
    for number, prompt in enumerate(asked):  # every second one is aborted with its row in flight
        engine.handle(Add(number, RequestSpec(prompt, LONG, number)))
    while engine.has_work:
        record = engine.step()
        for name, tokens in zip(record.plan.request_ids, record.tokens, strict=False):
            found[name] = found.get(name, []) + list(tokens)
            if int(name) % 2 and len(found[name]) == 3:
                engine.handle(Finish(name, "abort"))
    for name, tokens in found.items():
        assert tokens == expected[name][: len(tokens)] and len(tokens) >= (3 if int(name) % 2 else len(expected[name]))


def test_grammars_penalties_and_vectors_are_those_of_one_process(threads: None) -> None:
    settings = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory": 8 << 20, "max_num_batched_tokens": 32}
    one, two = (LLM(**settings, pipeline_parallel_size=stages) for stages in (1, 2))
    asked = ["def main():", "import os\n" * 20, "x = 1", "class A:", "for i in"]
    chosen = [
        AskedParams(max_tokens=12, seed=3, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,9} [0-9]+")),
        AskedParams(max_tokens=12, seed=4, presence_penalty=1.0, repetition_penalty=1.3, logprobs=1)]
    for params in chosen:
        told = [[output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]
                for llm in (one, two)]
        assert told[0] == told[1]
    vectors = [[output.outputs.embedding for output in llm.embed(asked, use_tqdm=False)] for llm in (one, two)]
    assert vectors[0] == vectors[1]


def test_heads_may_differ_and_be_held_twice(threads: None, tmp_path: Path) -> None:
    folder = make("smollm2", tmp_path / "odd", num_attention_heads=6, num_key_value_heads=3)
    asked = prompts([5, 40])
    assert tokens_of(engine_of(folder, 2), asked, GREEDY) == tokens_of(engine_of(folder, 1), asked, GREEDY)


@pytest.mark.parametrize(("family", "settings", "says"), [
    ("smollm2", {}, "3 heads of queries and 1 of keys"),
    ("llama2", {"overlap": 1}, "overlap is not supported"),
    ("llama2", {"pipeline_parallel_size": 4}, "pipeline_parallel_size 4: the model has 3 layers"),
    ("llama2", {"pipeline_parallel_size": 9}, "are 18 processes: at most 16")])
def test_what_ranks_cannot_share_is_refused(
    family: str, settings: dict[str, object], says: str, tmp_path: Path,
) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=says):
        engine_of(make(family, tmp_path / "model"), 2, **settings)


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_on_gpus_have_one_each(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, expected in (("", ["0", "1"]), ("3,1,2", ["3", "1"]), ("GPU-8a,GPU-71", ["GPU-8a", "GPU-71"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus(2) == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    kernels = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="2 ranks needs as many GPUs, and torch sees 1"):
        other_ranks(EngineConfig.of(model="any", **{setting: 2}), kernels, None, print)


@pytest.mark.slow
def test_ranks_of_plain_torch_exchange_through_gloo_until_their_engine_is_dropped(tmp_path: Path) -> None:
    folder, settings = make("mixtral", tmp_path / "model", tokenizer=True), {"device": "reference", **SMALL}
    ranks = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    asked = [{"prompt_token_ids": prompt} for prompt in prompts([5, 40, 17])]
    params, told = AskedParams(temperature=1.0, max_tokens=4, seed=7, ignore_eos=True), []
    for sizes in ({}, ranks):
        llm = LLM(str(folder), **settings, **sizes)
        told.append([output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)])
        assert torch.distributed.is_initialized() == bool(sizes)
        for pid in (os.getpid(), *children(os.getpid()).values()):
            assert listening(pid) <= {LOOPBACK}, "other machines cannot reach a rank"
    with pytest.raises(ConfigError, match="one model of several ranks at a time"):
        LLM(str(folder), **settings, **ranks)
    assert told[0] == told[1]
    processes = torch.distributed.group.WORLD
    del llm
    gc.collect()
    assert not torch.distributed.is_initialized()
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context((tmp_path / str(number)).open("w+b")) for number in range(32)]
        del processes
        gc.collect()
        assert not any(os.fstat(file.fileno()).st_size for file in others), "the file of the ranks' store is another"


@pytest.mark.parametrize("sent", [
    b"\xff\xff\xff\xff", frame(b"\xc1"), frame(b"\x81\xa4type\xa4none"), frame(b"x")[:3], b""])
def test_a_rank_that_is_sent_garbage_or_is_cut_off_ends(sent: bytes) -> None:
    ours, theirs = pair()
    with ours, theirs:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        is_message = len(sent) > 4
        assert obey(BlockingChannel(theirs)) == is_message
        theirs.shutdown(socket.SHUT_WR)
        answer = ours.recv(1 << 16)
        assert (b"failed" in answer) == is_message


def test_what_a_rank_says_and_cannot_be_read_is_the_ranks_fault() -> None:
    ours, theirs = pair()
    rank = object.__new__(_Rank)
    rank.number, rank.channel = 3, BlockingChannel(ours)
    with ours, theirs:
        theirs.sendall(frame(b"\xc1"))
        with pytest.raises(RankLostError, match="rank 3 sent what cannot be read"):
            rank.report()


def test_a_rank_that_freezes_while_it_loads_is_not_waited_for_for_ever(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped before its first heartbeat."""
    monkeypatch.setattr(ranks, "LOADING_SILENCE", 1.0)
    start = spawn.start

    def stopped(*arguments: Any, **options: Any) -> Any:
        process = start(*arguments, **options)
        os.kill(process.pid, signal.SIGSTOP)
        started.append(process)
        return process

    started: list[Any] = []
    monkeypatch.setattr(spawn, "start", stopped)
    with pytest.raises(RankLostError, match="rank 1 has been frozen for 1 s while it was loading"):
        engine_of(make("llama2", tmp_path / "model"), 2)
    assert started[0].wait(60) == -signal.SIGKILL


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens, as the system writes them."""
    opened = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            opened.add(os.readlink(one))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in opened}


def test_a_lost_rank_fails_the_step_and_all_after_it(tmp_path: Path) -> None:
    """A rank of the same layers; `attacks/test_rank_faults.py` kills one of the next stage."""
    engine = engine_of(make("llama2", tmp_path / "model"), 2)
    (rank,) = engine.executor.ranks.processes  # type: ignore[attr-defined]
    engine.handle(Add(0, RequestSpec([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=100))))
    engine.step()
    rank.kill()
    ends = time.monotonic() + 120
    with pytest.raises(RuntimeError, match="rank 1 of 2"):
        while time.monotonic() < ends:
            engine.handle(Add(time.monotonic_ns(), RequestSpec([1, 2, 3], GREEDY)))
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


@pytest.mark.slow
def test_a_frozen_rank_ends_its_streams_and_the_next_engine_says_the_same(server: Live) -> None:
    body = {"model": "slotwise-builtin", "prompt": "def main():", "max_tokens": 32, "temperature": 0}
    before = server.client.post("/v1/completions", json=body).json()["choices"]
    engine = children(server.process.pid)["slotwise.compose.engine_process"]
    long = body | {"max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=long) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(children(engine)["slotwise.compose.rank_process"], signal.SIGSTOP)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and sum('"error"' in line for line in rest) == 1
    assert any("rank 1 of 2" in line for line in rest)
    ends = time.monotonic() + 120
    while server.client.get("/health").status_code != 200 and time.monotonic() < ends:
        time.sleep(0.1)
    assert server.client.post("/v1/completions", json=body).json()["choices"] == before
    assert children(server.process.pid)["slotwise.compose.engine_process"] != engine


def test_a_grammar_holds_on_two_ranks(server: Live) -> None:
    body = {"model": "slotwise-builtin", "prompt": "x", "max_tokens": 8,
            "structured_outputs": {"choice": ["yes", "no"]}}
    assert server.client.post("/v1/completions", json=body).json()["choices"][0]["text"] in ("yes", "no")


def test_decisions_and_scores_of_two_ranks(server: Live) -> None:
    """A rank has the logits of its part of the vocabulary alone."""
    asked = {"state": "def close(self):", "questions": {"kind": {"type": "choice", "criteria": {"a": None, "b": None}}}}
    answers = [server.client.post("/v1/systemone", json=asked).json()["answers"] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2] and 0 < answers[0]["kind"]["confidence"] < 1
    scores = server.client.post("/score", json={"text_1": "close", "text_2": ["open", "close"]}).json()["data"]
    assert all(0 < one["score"] < 1 for one in scores)
