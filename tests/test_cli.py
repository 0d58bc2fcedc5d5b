"""The command line as a user meets it: help that reads, text that comes, failures of one line."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.live import CLI, cli

from slotwise import builtin
from slotwise.api.protocol.protocol import ChatRequest
from slotwise.cli import as_typed, main
from slotwise.errors import described
from slotwise.offline.llm import LLM

pytestmark = pytest.mark.slow


def one_line(*arguments: str) -> str:
    """The one line a failing command says, in a process of its own."""
    run = cli(*arguments)
    assert run.returncode == 1, run.stderr
    (line,) = run.stderr.strip().splitlines()
    return line


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints, in this process."""
    assert main(arguments) == 0
    return capfd.readouterr().out


@pytest.fixture
def one_line_here(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The same in this process, where torch has long been loaded."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 1
        (line,) = capfd.readouterr().err.strip().splitlines()
        return line

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    files = shutil.ignore_patterns("*.py", "*.md", "__pycache__")
    return Path(shutil.copytree(builtin.path(), tmp_path / "model", ignore=files))


def test_generate_continues_a_prompt():
    run = cli("generate", "--temperature", "0", "--max-tokens", "24", "def is_empty(self):")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("def is_empty(self):\n    ")


def test_generate_reads_stdin_and_takes_a_checkpoint(folder, capfd, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("import os"))
    assert said(capfd, "generate", "--model", str(folder), "--max-tokens", "4").startswith("import os")


def test_chat_answers_each_line(capfd, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("def close(self):\ndef open(self):\n"))
    assert len(said(capfd, "chat", "builtin", "--max-tokens", "8").strip().splitlines()) >= 2


@pytest.mark.parametrize("override", [{}, {"temperature": 0.6, "max_new_tokens": 9, "min_p": 0.1}])
def test_a_chat_in_the_terminal_has_the_defaults_of_one_over_http(override, monkeypatch, capfd):
    seen, stream = [], LLM.stream_outputs
    monkeypatch.setattr(LLM, "stream_outputs", lambda llm, prompt, params: seen.append((llm, params)) or stream(
        llm, prompt, params))
    monkeypatch.setattr("sys.stdin", io.StringIO("def close(self):\n"))
    said(capfd, "chat", "builtin", "--override-generation-config", json.dumps(override))
    ((llm, params),) = seen
    defaults = llm.sampling_defaults
    served = ChatRequest(messages=[]).sampling_params(defaults.max_tokens, None, defaults.of_sampling)
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty")
    assert [getattr(params, name) for name in names] == [getattr(served, name) for name in names]


@pytest.mark.parametrize("command", [(), ("serve",), ("generate",), ("chat",)])
def test_help_reads_well(command):
    run = cli(*command, "--help")
    assert run.returncode == 0
    assert all(len(line) <= 100 for line in run.stdout.splitlines())
    assert "usage: slotwise" in run.stdout


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_missing_model_is_one_line(command, tmp_path):
    where = [str(tmp_path / "nowhere")] if command == "serve" else ["--model", str(tmp_path / "nowhere"), "hi"]
    assert "nowhere" in one_line(command, *where)


@pytest.mark.parametrize("command", [("serve",), ("generate", "hi", "--model")])
def test_broken_weights_are_one_line(folder, tmp_path, monkeypatch, command):
    """Kernels are being compiled when it is found: neither a thread nor a helper that does so adds a line."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in one_line(*command, str(folder))


def test_missing_weights_are_one_line(folder, one_line_here):
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in one_line_here("generate", "--model", str(folder), "hi")


def test_an_unsupported_architecture_is_one_line(folder, one_line_here):
    config = json.loads((folder / "config.json").read_text())
    for name, says in (("RwkvForCausalLM", "recurrence (WKV), which is not built"), ("Unheard", "LlamaForCausalLM")):
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        line = one_line_here("generate", "--model", str(folder), "hi")
        assert name in line and says in line


@pytest.mark.parametrize(("options", "says"), [
    (("--max-model-len", "99999"), "generate: --max-model-len 99999 exceeds the 1024 positions"),
    (("--max-num-seqs", "64", "--max-num-batched-tokens", "8"), "--max-num-batched-tokens (8) must be at least"),
    (("--kv-cache-memory", "10"), "raise --kv-cache-memory to at least the 131,072 bytes of one"),
    (("--kv-cache-memory", "200000", "--max-model-len", "1000"), "raise --kv-cache-memory to 2,097,152 bytes"),
    (("--override-generation-config", '{"x": 1}'), "--override-generation-config: x is not supported"),
])
def test_settings_that_cannot_work_are_one_line_that_names_options_as_they_are_typed(one_line_here, options, says):
    assert says in one_line_here("generate", "--dtype", "bfloat16", *options, "def main():")


def test_only_names_of_settings_become_options():
    settings = ("dtype", "model", "kv_cache_memory", "generation_config", "max_tokens", "batch_size")
    for message, shown in (
            ("dtype must be x, and dtype y", "--dtype must be x, and dtype y"), ("model x is", "model x is"),
            ("raise kv_cache_memory, (batch_size)", "raise --kv-cache-memory, (--batch-size)"),
            ("/a/generation_config.json: not_a_name", "/a/generation_config.json: not_a_name"),
            ("'max_tokens' `max_tokens` max_tokens=3", "'max_tokens' `max_tokens` max_tokens=3")):
        assert as_typed(message, {name: "--" + name.replace("_", "-") for name in settings}) == shown
    assert as_typed("max_loras is", {"max_loras": "SLOTWISE_MAX_LORAS"}) == "SLOTWISE_MAX_LORAS is"


def test_an_error_is_not_a_bare_number():
    assert described(OSError(12, "Cannot allocate memory")) == "Cannot allocate memory"
    assert described(FileNotFoundError(2, "No such file or directory", "x")) == "x: No such file or directory"
    assert described(MemoryError()) == "there is not enough memory" and described(KeyError()) == "KeyError"


def test_a_bound_of_the_address_space_is_named_with_what_fails():
    """Libraries fail beyond it in ways that do not name memory."""
    command = ["bash", "-c", 'ulimit -v 33554432; exec "$@"', "-", *CLI, "replay", "nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr == (
        "slotwise replay: nosuch: No such file or directory (`ulimit -v` leaves this process 32,768 MiB of address "
        "space: raise it if that may be why)\n")


@pytest.mark.parametrize(("argument", "ends"), [("-m", ""), ("x.py", "ImportError: ")])
def test_an_older_python_is_told_in_a_sentence(argument, ends):
    program = f"import sys; sys.argv[0] = {argument!r}; sys.version_info = (3, 10, 13); import slotwise"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"{ends}Slotwise needs Python 3.11 or newer, and this is ")
    assert ends or len(done.stderr.splitlines()) == 1
