"""What the arguments of slotwise generate and bench mean: a model, the URL of a server, or a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_server import Behavior, fake_server
from support.live import cli, serving

from slotwise import builtin
from slotwise.cli import build_parser
from slotwise.cli.bench import with_benchmark
from slotwise.cli.generate_and_chat import _divided
from slotwise.cli.pull import names_model
from slotwise.cli.remote import Server, ServerError, is_url


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving("builtin", log=tmp_path_factory.mktemp("generate") / "stderr") as live:
        yield live.url


FOLDER = str(builtin.path())


@pytest.mark.parametrize(("arguments", "model", "prompts"), [
    (["def add(a, b):"], "", ["def add(a, b):"]),
    (["def add(a, b):", "def sub(a, b):"], "", ["def add(a, b):", "def sub(a, b):"]),
    (["smollm2", "Hello"], "smollm2", ["Hello"]), (["smollm2"], "smollm2", []),
    (["builtin", "a", "b"], "builtin", ["a", "b"]),
    ([FOLDER, "x"], FOLDER, ["x"]), (["model.gguf", "x"], "model.gguf", ["x"]),
    (["owner/name:Q4_K_M", "x"], "owner/name:Q4_K_M", ["x"]), (["and/or"], "", ["and/or"]),
    (["./missing", "x"], "./missing", ["x"]), (["http://127.0.0.1:8000", "x"], "http://127.0.0.1:8000", ["x"]),
    (["localhost:8000", "x"], "localhost:8000", ["x"]), (["Answer:42"], "", ["Answer:42"]),
    (["--model", "builtin", "smollm2"], "", ["smollm2"]),
    (["http://h", "--model", "name", "x"], "http://h", ["x"]), (["a", "--seed", "1", "b"], "", ["a", "b"]),
    ([], "", [])])
def test_the_first_argument_is_a_model_where_it_names_one(arguments: list[str], model: str, prompts: list[str]) -> None:
    asked = build_parser("generate").parse_args(["generate", *arguments])
    assert _divided(asked) == (model, prompts)


def test_a_folder_without_a_checkpoint_is_a_prompt(tmp_path: Path) -> None:
    assert not names_model(str(tmp_path), is_before_others=False)
    (tmp_path / "config.json").touch()
    assert names_model(str(tmp_path), is_before_others=False)
    assert not names_model("x" * 100_000, is_before_others=True)


@pytest.mark.slow
def test_a_server_continues_prompts_as_a_model_here_does(url: str) -> None:
    options = ("--temperature", "0", "--max-tokens", "16")
    prompts = ("def is_empty(self):", "def close(self):")
    for given in (prompts[:1], prompts):
        here, there = cli("generate", "builtin", *given, *options), cli("generate", url, *given, *options)
        assert (there.returncode, there.stderr) == (0, "") and there.stdout == here.stdout
    piped = cli("generate", url, *options, stdin=prompts[0])
    assert piped.stdout == cli("generate", url, prompts[0], *options).stdout


def test_fields_that_are_given_are_sent(tmp_path: Path) -> None:
    with fake_server(Behavior()) as fake:
        done = cli("generate", fake, "x", "--top-k", "3", "--stop", "a", "--stop", "b", "--model", "named")
        assert done.returncode == 0, done.stderr
        (body,) = _seen(fake)
    assert body == {"model": "named", "prompt": "x", "max_tokens": 256, "top_k": 3, "stop": ["a", "b"], "stream": True}


def _seen(url: str) -> list[dict[str, object]]:
    import httpx

    return list(httpx.get(f"{url}/seen", timeout=120).json()["bodies"])


@pytest.mark.parametrize(("url", "base"), [
    ("http://127.0.0.1:8000", "http://127.0.0.1:8000"), ("http://host/v1/", "http://host"),
    ("HTTPS://host:1/api/v1/chat/completions", "https://host:1/api"), ("localhost:8000", "http://localhost:8000")])
def test_the_address_of_a_server(url: str, base: str) -> None:
    assert is_url(url) and Server(url).url == base


@pytest.mark.parametrize("url", ["http://", "http://h:x", "http://h:99999999", "http://u:p@h", "http://h?x=1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ServerError):
        Server(url)


def test_a_key_with_a_line_break_is_not_sent() -> None:
    with pytest.raises(ServerError, match="cannot be sent"):
        Server("http://h", "a\nb")


@pytest.mark.parametrize(("given", "meant"), [
    (["bench", "http://h"], ["bench", "serve", "http://h"]),
    (["bench", "smollm2", "--seed", "1"], ["bench", "throughput", "smollm2", "--seed", "1"]),
    (["bench", "serve", "http://h"], ["bench", "serve", "http://h"]), (["bench"], ["bench"]),
    (["bench", "--help"], ["bench", "--help"]), (["bench", "sevre"], ["bench", "sevre"])])
def test_a_model_or_a_url_in_the_place_of_a_benchmark(given: list[str], meant: list[str]) -> None:
    assert with_benchmark(given) == meant


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "told"), [
    (["throughput", "http://h:1"], "http://h:1 is a server's address, and this measures an engine in this process: "
     "`slotwise bench serve http://h:1` measures a server"),
    (["serve", "smollm2"], "smollm2 is not the URL of a server; `slotwise bench throughput smollm2` measures a model"),
    (["serve", "http://a", "--base-url", "http://b"], "http://a and --base-url http://b: give one address"),
    (["latency", "builtin", "--model", "x"], "builtin and --model x: give one model")])
def test_what_a_benchmark_does_not_measure_is_one_line(arguments: list[str], told: str) -> None:
    done = cli("bench", *arguments)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and told in line


@pytest.mark.slow
def test_a_benchmark_of_a_url(url: str) -> None:
    done = cli("bench", url, "--num-prompts", "2", "--output-lengths", "fixed:4", "--input-lengths", "fixed:4")
    assert done.returncode == 0 and "slotwise-builtin" in done.stdout, done.stderr
