"""The Dockerfile's shell steps run in a bare virtual environment, and what they install serves as the image would.

Nothing is downloaded: the environment sees the packages of this one, and pip has no index.  So pip checks that they are
all that the built wheel needs, and installs Slotwise alone.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dockerfiles import environment, line_of, read
from support.live import READY

from slotwise.compute.kernels.cpu.jit import store

ROOT = Path(__file__).resolve().parents[2]
STAGES = read(ROOT / "Dockerfile")
OURS = ("slotwise", "__editable__")
SERVER = "/opt/slotwise"

pytestmark = pytest.mark.slow


class Machine:
    """A folder that stands for the file system of a build."""

    def __init__(self, root: Path) -> None:
        self.root = root
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.origin is not None
        self._packages = root / "packages"
        self._packages.mkdir()
        for entry in Path(spec.origin).parents[1].iterdir():
            if not entry.name.startswith(OURS) and entry.suffix != ".pth":
                (self._packages / entry.name).symlink_to(entry)
        kernels = root / "var" / "cache" / "slotwise" / "slotwise" / "kernels"
        kernels.parent.mkdir(parents=True, mode=0o700)
        if (compiled := store.home()) is not None and compiled.is_dir():  # an image does not compile them again
            shutil.copytree(compiled, kernels)

    def at(self, text: str) -> str:
        """`text` with the paths of the image in this folder."""
        for path in ("/opt/slotwise", "/wheels", "/source", "/var/cache/slotwise"):
            text = text.replace(path, f"{self.root}{path}")
        return text

    def run(self, step: str, folder: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["sh", "-ec", self.at(step)], cwd=folder, capture_output=True, text=True, timeout=240,
                              env=clean | {"PATH": path, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"

    def see_packages(self) -> None:
        """Lets the new environment import this one's packages, Slotwise excepted."""
        (site,) = (self.root / SERVER[1:] / "lib").glob("python*/site-packages")
        for old in site.glob("setuptools*"):  # Python 3.11 brings one that torch would have replaced
            shutil.rmtree(old)
        (site / "seen.pth").write_text(f"{self._packages}\n")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """After the steps of the stages that build the wheel and install it."""
    made = Machine(tmp_path_factory.mktemp("image"))
    for name in ("wheel", "packages-cpu"):
        folder = made.root
        for instruction, rest in STAGES[name].steps:
            if instruction == "WORKDIR":
                folder = Path(made.at(rest))
                folder.mkdir(parents=True)
            elif instruction == "RUN":
                made.run(rest, folder)
                if "-m venv" in rest:
                    made.see_packages()
            else:
                assert instruction == "COPY"
                copy(rest, folder)
    return made


def copy(rest: str, folder: Path) -> None:
    """What `COPY` does with files of the context; stages share one folder here."""
    *sources, target = rest.split()
    if sources[0].startswith("--from="):
        return
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / source, folder / target)


@pytest.fixture
def command(machine: Machine) -> tuple[list[str], dict[str, str]]:
    """The image's command on any free port, and the environment of its process."""
    name, *arguments = STAGES["cpu"].command("ENTRYPOINT")
    assert arguments[-2] == "--port"
    given = {key: machine.at(value) for key, value in environment(STAGES, "cpu").items()}
    given["PATH"] = given["PATH"].replace("$PATH", os.environ["PATH"])
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SLOTWISE"))}
    return [machine.at(f"{SERVER}/bin/{name}"), *arguments[:-1], "0"], clean | given


@pytest.fixture
def served(command: tuple[list[str], dict[str, str]], machine: Machine) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server of the image, with a key, and its port."""
    words, variables = command
    with (machine.root / "log").open("w") as log:
        process = subprocess.Popen(words, env=variables | {"SLOTWISE_API_KEY": "key"}, stdout=subprocess.PIPE,
                                   stderr=log, text=True, cwd="/")
        try:
            assert process.stdout is not None
            found = next((match[1] for line in process.stdout if (match := READY.search(line))), "")
            assert found, (machine.root / "log").read_text()
            yield process, found.rsplit(":", 1)[1]
        finally:
            process.kill()
            process.wait(120)


def healthy(port: str, variables: dict[str, str]) -> bool:
    """Whether the command of HEALTHCHECK succeeds on a port."""
    (stage,) = [stage for stage in line_of(STAGES, "cpu") if stage.all("HEALTHCHECK")]
    words = [word.replace("8000", port) for word in stage.command("HEALTHCHECK")]
    words[0] = str(shutil.which(words[0], path=variables["PATH"]))
    return subprocess.run(words, env=variables, capture_output=True, timeout=60).returncode == 0


def test_slotwise_is_installed_from_the_wheel_alone(machine: Machine) -> None:
    python = machine.at(f"{SERVER}/bin/python")
    script = "import slotwise, slotwise.builtin; print(slotwise.__file__, slotwise.builtin.path())"
    done = subprocess.run([python, "-P", "-c", script], capture_output=True, text=True, cwd="/", timeout=60,
                          env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    package, model = map(Path, done.stdout.split())
    assert package.is_relative_to(machine.at(SERVER))
    there = {path.relative_to(ROOT / "src" / "slotwise") for path in (ROOT / "src" / "slotwise").rglob("*")
             if path.is_file() and path.suffix not in (".pyc", ".nbi", ".nbc")}
    installed = {path.relative_to(package.parent) for path in package.parent.rglob("*") if path.is_file()}
    assert not there - installed, "the wheel lacks these files"
    assert (model / "model.safetensors").stat().st_size


def test_without_a_key_the_image_refuses_to_serve(command: tuple[list[str], dict[str, str]]) -> None:
    words, variables = command
    done = subprocess.run(words, env=variables, capture_output=True, text=True, cwd="/", timeout=60)
    assert done.returncode == 1 and "SLOTWISE_API_KEY is set, but holds no key" in done.stderr


def test_the_health_check_succeeds_on_the_server_and_fails_without_one(
        command: tuple[list[str], dict[str, str]], served: tuple[subprocess.Popen[str], str]) -> None:
    _, variables = command
    process, port = served
    assert healthy(port, variables)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert not healthy(port, variables)
