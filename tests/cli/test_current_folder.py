"""No command runs code that lies in the current folder, such as a checkpoint's: not in its process, nor in others."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from support.live import READY

from slotwise import builtin
from slotwise.cli import serve_command
from slotwise.compose.launch import launch_engine
from slotwise.engine.config import EngineConfig
from slotwise.platform import child

pytestmark = pytest.mark.slow

SCRIPT = Path(sys.executable).with_name("slotwise")
LOADED = "import importlib.util, runpy, sys, slotwise; print(*sys.modules)"
HELPER = """
import os, sys
sys.path.remove("")  # else this script itself is the victim
from slotwise.compute.kernels.cpu.jit import workers
for path in {paths!r}:
    os.environ["PYTHONPATH"] = path
    workers._call(1)
    (helper,) = workers._waiting
    workers.dismiss()
    if status := helper.wait():
        sys.exit(f"with {{path!r}}: {{status}}")
"""

HELPS = """
import contextlib
from slotwise.cli import main
for arguments in {commands!r}:
    with contextlib.suppress(SystemExit):
        main([*arguments, "--help"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint beside which lies a module of every name that can be imported here, each leaving a mark."""
    files = shutil.ignore_patterns("*.py", "*.md", "__pycache__")
    root = tmp_path_factory.mktemp("hostile")
    folder = Path(shutil.copytree(builtin.path(), root / "model", ignore=files))
    (root / "marks").mkdir()
    before = run(root, sys.executable, "-P", "-c", LOADED).stdout.split()  # as `python -m` has before our code runs
    for name in (set(sys.stdlib_module_names) | set(metadata.packages_distributions())) - {"slotwise", *before}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(f"open({str(root / 'marks' / name)!r}, 'w').close()\n")
    return folder


@pytest.fixture(autouse=True)
def no_marks(folder: Path) -> Iterator[None]:
    clear(folder)
    yield
    assert not marks(folder), "these were imported from the current folder"


def marks(folder: Path) -> list[Path]:
    return sorted((folder.parent / "marks").iterdir())


def clear(folder: Path) -> None:
    for mark in marks(folder):
        mark.unlink()


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=240)


def command(started: str) -> list[str]:
    modules = {"module": "slotwise.cli", "package": "slotwise"}
    return [str(SCRIPT)] if started == "script" else [sys.executable, "-m", modules[started]]


def test_a_module_of_the_current_folder_would_leave_a_mark(folder: Path) -> None:
    run(folder, sys.executable, "-c", "import torch, numba, json")
    assert [mark.name for mark in marks(folder)] == ["json", "numba", "torch"]
    clear(folder)


def test_a_server_and_what_asks_it(folder: Path) -> None:
    """Each started in another way; the commands of other tests are, too."""
    process = subprocess.Popen([*command("module"), "serve", ".", "--port", "0"], cwd=folder, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = READY.search(process.stdout.readline() + process.stdout.readline() + process.stdout.readline())
        assert found is not None and process.stderr is not None, process.stderr.read() if process.stderr else ""
        asked = run(folder, *command("script"), "bench", "serve", "--base-url", found[1], "--num-prompts", "2",
                    "--max-tokens", "2", "--output-lengths", "fixed:2")
        assert asked.returncode == 0, asked.stderr
        watched = run(folder, *command("package"), "top", found[1], "--once")
        assert watched.returncode == 0, watched.stderr
    finally:
        process.terminate()
        process.communicate(timeout=120)


def test_an_engine_in_the_same_process_and_what_reads_its_log(folder: Path, tmp_path: Path) -> None:
    log = str(tmp_path / "log.jsonl")
    for arguments in (
        ("generate", "--model", ".", "--max-tokens", "2", "def f"),
        ("bench", "throughput", "--model", ".", "--num-prompts", "2", "--max-tokens", "2", "--event-log", log),
        ("replay", log), ("explain", log), ("timeline", log, "--output", str(tmp_path / "page.html")),
    ):
        done = run(folder, *command("script" if arguments[0] == "generate" else "module"), *arguments)
        assert done.returncode == 0, (arguments, done.stderr)


def test_a_comparison_starts_a_server_of_its_own(folder: Path, tmp_path: Path) -> None:
    done = run(folder, *command("module"), "compare", "--online", "--model", ".", "--disciplines", "continuous",
               "--num-prompts", "2", "--output-lengths", "fixed:2", "--output", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stderr


def test_the_help_of_every_command(folder: Path) -> None:
    """In one process, for the ways to start one are those of the other tests."""
    commands = [(), ("serve",), ("generate",), ("chat",), ("bench",), ("bench", "serve"), ("bench", "throughput"),
                ("bench", "latency"), ("compare",), ("top",), ("timeline",), ("explain",), ("replay",), ("completion",)]
    done = run(folder, sys.executable, "-P", "-c", HELPS.format(commands=commands))
    assert done.returncode == 0 and done.stdout.count("usage: slotwise") == len(commands), done.stderr


def test_a_process_that_helps_to_compile(folder: Path) -> None:
    """It imports torch and numba before it is told that there is nothing to do."""
    paths = [f".{os.pathsep}", f"{os.pathsep}/nowhere::model"]
    done = run(folder, sys.executable, "-c", HELPER.format(paths=paths))
    assert done.returncode == 0, done.stderr


def test_what_a_child_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "a", "/b", ".", "/c/d"]))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "kernels")
    given = child.environment()
    assert given["PYTHONPATH"].split(os.pathsep)[:2] == ["/b", "/c/d"]
    assert all(os.path.isabs(entry) for entry in given["PYTHONPATH"].split(os.pathsep))
    assert (given["PYTHONSAFEPATH"], given["NUMBA_CACHE_DIR"]) == ("1", str(tmp_path / "kernels"))


def test_an_engine_process_has_no_api_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLOTWISE_API_KEY", "SLOTWISE_ADMIN_API_KEY", "KEYS_OF_A_TIER"):
        monkeypatch.setenv(name, "secret")
    (tmp_path / "tiers").write_text('[[tier]]\nname = "a"\napi_keys_env = "KEYS_OF_A_TIER"\n[[tier]]\nname = "b"')
    asked = argparse.Namespace(tiers=str(tmp_path / "tiers"), max_num_seqs=8, api_key=[])
    assert serve_command.tiers_of(asked)[0].api_keys == ("secret",)
    engine = launch_engine(EngineConfig(model=str(builtin.path())), "text")
    try:
        while not (given := Path(f"/proc/{engine.process.pid}/environ").read_bytes()):  # while it is being started
            assert engine.process.poll() is None
    finally:
        engine.kill()
        engine.process.wait(120)
        engine.channel.close()
    assert b"PYTHONSAFEPATH=1" in given and b"secret" not in given and b"KEY" not in given


@pytest.mark.parametrize("executable", ["", None, "python3"])
def test_without_a_path_to_the_interpreter_none_is_guessed(
        monkeypatch: pytest.MonkeyPatch, executable: str | None) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(RuntimeError, match=r"sys\.executable"):
        child.python("json.tool")


def test_a_compilers_configuration_in_the_current_folder_is_not_read(folder: Path) -> None:
    """Numba reads `.numba_config.yaml` where it is imported, and fails where that is no YAML; a child is elsewhere."""
    (folder / ".numba_config.yaml").write_text("{")
    try:
        assert run(folder, sys.executable, "-P", "-c", "import numba").returncode != 0
        done = run(folder, sys.executable, "-c", HELPER.format(paths=[""]))
        assert done.returncode == 0, done.stderr
        done = run(folder, *command("module"), "generate", "--model", ".", "--max-tokens", "2", "def f")
        assert done.returncode == 0 and not done.stderr, done.stderr
    finally:
        (folder / ".numba_config.yaml").unlink()


SETTINGS = """
import sys
from slotwise.cli import process
sys.path.remove("")
process.ignore_numba_file()
import numba, yaml
before = numba.config.BOUNDSCHECK, int(numba.config.OPT)
open(".numba_config.yaml", "w").write("boundscheck: 1")
numba.core.config.reload_config()
print(*before, numba.config.BOUNDSCHECK, int(numba.config.OPT), yaml.safe_load("[1]"))
"""


def test_a_compilers_configuration_may_be_in_the_environment(tmp_path: Path) -> None:
    """What the file says is ignored, at the import of Numba and later, and what the environment says is not."""
    (tmp_path / ".numba_config.yaml").write_text("boundscheck: 1\nopt: 2")
    done = run(tmp_path, sys.executable, "-c", SETTINGS, NUMBA_OPT="1")
    assert done.stdout.split() == ["None", "1", "None", "1", "[1]"] and not done.stderr, done.stderr
