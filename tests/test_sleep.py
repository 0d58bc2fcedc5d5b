"""Sleep of a real server and of an `LLM`, with the memory of real processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import checkpoints
from support.live import Live, serving
from support.live_server import children, eventually, frozen

from slotwise import LLM, SamplingParams

ADMIN = {"Authorization": "Bearer root"}
PROMPTS = [[20 + place + 3 * token % 900 for token in range(1200)] for place in range(4)]
PER_TOKEN = 3 * 2 * 4 * 128 * 4  # bytes of the cache: layers, keys and values, heads, their size, float32
WRITTEN = 4 * 1200 * PER_TOKEN


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(
        "qwen2_moe", tmp_path_factory.mktemp("mixture"), tokenizer=True, num_key_value_heads=4, head_dim=128,
        use_sliding_window=False, sliding_window=..., mlp_only_layers=[])


@pytest.fixture(scope="module")
def server(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(str(mixture), "--api-key", "k", "--admin-api-key", "root", "--served-model-name", "m", "--dtype",
                 "float32", "--max-num-seqs", "8", "--kv-cache-memory", "200M", log=log) as live:
        yield live


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


def engines(live: Live) -> list[int]:
    return children(live.process.pid, b"slotwise.compose.engine_process")


def complete(live: Live, prompt: list[int], max_tokens: int = 8) -> dict[str, Any]:
    answer = live.client.post("/v1/completions", headers=ADMIN, json={
        "model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True})
    return answer.raise_for_status().json()


def tokens(live: Live) -> list[list[int]]:
    return [complete(live, prompt)["choices"][0]["token_ids"] for prompt in PROMPTS]


def metric(live: Live, name: str) -> float:
    text = live.client.get("/metrics", headers=ADMIN).raise_for_status().text
    return next(sample.value for family in text_string_to_metric_families(text) for sample in family.samples
                if sample.name == f"slotwise:{name}")


def post(live: Live, path: str) -> httpx.Response:
    return live.client.post(path, headers=ADMIN)


def refused(live: Live) -> None:
    answer = live.client.post("/v1/completions", headers=ADMIN, json={"model": "m", "prompt": [5], "max_tokens": 1})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "paused"
    assert int(answer.headers["retry-after"]) >= 1 and "asleep" in answer.json()["error"]["message"]


def asleep(live: Live, level: int) -> None:
    """What the routes tell meanwhile."""
    assert live.client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True, "level": level}
    health = live.client.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "asleep"
    assert live.client.get("/v1/models", headers=ADMIN).json()["data"][0]["id"] == "m"
    assert metric(live, "sleep_level") == level and metric(live, "engine_healthy") == (level == 1)
    refused(live)


def awake(live: Live) -> None:
    assert live.client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False, "level": 0}
    assert live.client.get("/health").status_code == 200 and metric(live, "sleep_level") == 0


def test_level_1_gives_the_cache_back_and_keeps_the_engine(server: Live) -> None:
    expected, engine = tokens(server), engines(server)
    assert complete(server, PROMPTS[0])["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    before = resident(engine[0])
    assert post(server, "/sleep").json() == {"is_sleeping": True, "level": 1}
    assert before - resident(engine[0]) > 0.95 * WRITTEN
    asleep(server, 1)
    assert post(server, "/wake_up").json() == {"is_sleeping": False, "level": 0}
    awake(server)
    assert engines(server) == engine
    first = complete(server, PROMPTS[0])
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "the prefix cache is empty"
    assert tokens(server) == expected and metric(server, "engine_starts_total") == 1


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
def test_a_field_in_a_body_is_refused(server: Live, path: str) -> None:
    told = server.client.post(path, headers=ADMIN, json={"level": 2})
    assert told.status_code == 400 and told.json()["error"]["param"] == "level"
    awake(server)


def test_level_2_ends_the_engine_and_starts_it_again(server: Live) -> None:
    expected, engine = tokens(server), engines(server)
    starts = metric(server, "engine_starts_total")
    assert post(server, "/sleep?level=2").status_code == 200
    eventually(lambda: not engines(server))
    asleep(server, 2)
    told = post(server, "/sleep?level=1")
    assert told.status_code == 400 and told.json()["error"]["param"] == "level"
    assert post(server, "/sleep?level=2").status_code == 200, "it does already"
    assert post(server, "/wake_up").status_code == 200
    awake(server)
    assert len(engines(server)) == 1 and engines(server) != engine
    assert tokens(server) == expected and metric(server, "engine_starts_total") == starts + 1


def test_running_requests_finish_first(server: Live) -> None:
    """Every stream has all of its tokens, though the model was told to sleep while they ran."""
    with ThreadPoolExecutor(4) as threads:
        with frozen(engines(server)[0]):
            streams = [threads.submit(complete, server, PROMPTS[place], 600) for place in range(3)]
            eventually(lambda: server.client.get("/health").json()["num_live"] == 3)
            slept = threads.submit(post, server, "/sleep?level=1")
            eventually(lambda: server.client.get("/health").status_code == 503)
            refused(server)
            busy = post(server, "/wake_up")
            assert busy.status_code == 409 and busy.json()["error"]["code"] == "busy"
        assert [one.result()["usage"]["completion_tokens"] for one in streams] == [600] * 3
        assert slept.result().status_code == 200
    asleep(server, 1)
    assert post(server, "/wake_up").status_code == 200
    awake(server)


@pytest.mark.parametrize(("path", "param"), [
    ("/sleep?level=3", "level"), ("/sleep?level=", "level"), ("/sleep?mode=keep", "mode"), ("/sleep?depth=1", "depth"),
    ("/wake_up?tags=weights", "tags")])
def test_what_has_no_meaning_is_refused_by_name(server: Live, path: str, param: str) -> None:
    told = post(server, path)
    assert told.status_code == 400 and told.json()["error"]["param"] == param
    assert param in told.json()["error"]["message"]
    awake(server)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
def test_only_the_operator_may(server: Live, path: str) -> None:
    told = server.client.post(path, headers={"Authorization": "Bearer k"})
    assert told.status_code == 403 and told.json()["error"]["code"] == "admin_key_needed"
    assert server.client.post(path).status_code == 401
    awake(server)


def test_the_load_of_experts_is_told_over_http(server: Live) -> None:
    complete(server, PROMPTS[0])
    layers = server.client.get("/experts", headers=ADMIN).json()["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2]
    for layer in layers:
        assert len(layer["tokens"]) == 6 and sum(layer["tokens"]) % 3 == 0 and sum(layer["tokens"]) > 0
        assert layer["imbalance_lately"] >= 1


@pytest.mark.slow
def test_ranks_end_with_their_engine_and_start_again(tmp_path: Path) -> None:
    folder = checkpoints.make("llama3", tmp_path / "model", tokenizer=True)
    with serving(str(folder), "--admin-api-key", "root", "--served-model-name", "m", "--dtype", "float32",
                 "--tensor-parallel-size", "2", "--kv-cache-memory", "20M", log=tmp_path / "log") as live:
        expected = complete(live, PROMPTS[0])["choices"][0]["token_ids"]
        (engine,) = engines(live)
        ranks = children(engine, b"slotwise.compose.rank_process")
        assert len(ranks) == 1
        told = post(live, "/sleep?level=1")
        assert told.status_code == 400 and "one rank" in told.json()["error"]["message"]
        assert post(live, "/sleep?level=2").status_code == 200
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (engine, *ranks)))
        assert post(live, "/wake_up").status_code == 200
        assert complete(live, PROMPTS[0])["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("level", [1, 2])
def test_an_offline_model_sleeps(mixture: Path, level: int) -> None:
    llm = LLM(mixture, dtype="float32", max_num_seqs=8, kv_cache_memory_bytes=200 << 20, disable_log_stats=False)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def written() -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = written()
    pid = Path("/proc/self").resolve().name
    before = resident(int(pid))
    llm.sleep(level)
    assert before - resident(int(pid)) > 0.95 * WRITTEN
    with pytest.raises(RuntimeError, match="wake_up"):
        llm.generate("hello", use_tqdm=False)
    with pytest.raises(ValueError, match="level"):
        llm.sleep(3 - level)
    llm.sleep(level)
    llm.wake_up()
    assert written() == expected
    (started,) = [each.value for each in llm.get_metrics() if each.name == "slotwise:engine_starts"]
    assert started == level
    with pytest.raises(ValueError, match="tags"):
        llm.wake_up(tags=["weights"])  # type: ignore[arg-type]
