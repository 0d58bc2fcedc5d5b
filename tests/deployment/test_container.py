"""The Dockerfile and the compose files agree with the package, the parser and one another."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.dockerfiles import Stage, environment, line_of, read

from slotwise.api.http_server import FLUSH
from slotwise.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
STAGES = read(ROOT / "Dockerfile")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["slotwise"]
CUDA = yaml.safe_load((ROOT / "compose.cuda.yaml").read_text())["services"]["slotwise"]
INSTRUCTIONS = {"WORKDIR", "RUN", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
IMAGES = ("cpu", "cuda")


def asked(image: str, *more: str) -> argparse.Namespace:
    """What the parser makes of an image's command."""
    name, *arguments = STAGES[image].command("ENTRYPOINT")
    assert name == "slotwise"
    return build_parser("serve").parse_args([*arguments, *more])


def is_sent(path: str) -> bool:
    """Whether the build context has a path, by `.dockerignore`: the last pattern that matches decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and any(
                fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in (path, path.split("/")[-1])):
            sent = line.startswith("!")
    return sent


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_every_stage_is_made_of_known_instructions_and_earlier_stages() -> None:
    known: list[str] = []
    for stage in STAGES.values():
        assert stage.base in known or stage.base == "python:3.11-slim"
        assert {name for name, _ in stage.steps} <= INSTRUCTIONS
        known.append(stage.name)
    assert known[-1] == "cpu", "the last stage is what `docker build .` builds"


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_every_file_that_is_copied_exists(stage: Stage) -> None:
    for rest in stage.all("COPY"):
        *sources, target = rest.split()
        if sources[0].startswith("--from="):
            assert sources.pop(0).removeprefix("--from=") in STAGES
            assert sources == [target] and target in ("/wheels", "/opt/slotwise")
            continue
        for source in sources:
            assert (ROOT / source).exists() and is_sent(source), source


def test_the_context_has_what_the_package_is_built_of_and_nothing_else() -> None:
    assert all(map(is_sent, ("src", "pyproject.toml", PROJECT["project"]["readme"])))
    assert not any(map(is_sent, (".git", ".venv", "tests", "build", "src/slotwise/__pycache__", "deploy")))


def test_requirements_are_those_of_the_package() -> None:
    (torch,) = [name for name in PROJECT["project"]["dependencies"] if name.startswith("torch")]
    for name in ("packages-cpu", "packages-cuda"):
        assert [torch in step for step in STAGES[name].all("RUN")].count(True) == 1
        assert any("[otel]" in step for step in STAGES[name].all("RUN"))
    (setuptools,) = PROJECT["build-system"]["requires"]
    assert any(f'"{setuptools}"' in step for step in STAGES["wheel"].all("RUN"))
    assert "otel" in PROJECT["project"]["optional-dependencies"]
    assert any("whl/cpu" in step for step in STAGES["packages-cpu"].all("RUN"))
    assert not any("whl/cpu" in step for step in STAGES["packages-cuda"].all("RUN"))


@pytest.mark.parametrize("image", IMAGES)
def test_the_command_is_one_of_the_parsers(image: str) -> None:
    given = asked(image, "/models/a", "--max-num-seqs", "32")
    assert (given.host, given.device) == ("0.0.0.0", "cuda" if image == "cuda" else "auto")
    line = line_of(STAGES, image)
    (port,) = [rest for stage in line for rest in stage.all("EXPOSE")]
    assert given.port == int(port)
    (health,) = [stage.command("HEALTHCHECK") for stage in line if stage.all("HEALTHCHECK")]
    assert f"'127.0.0.1', {port}," in health[-1] and "'/health'" in health[-1]


@pytest.mark.parametrize("image", IMAGES)
def test_it_runs_without_rights_and_keeps_its_caches_in_a_volume(image: str) -> None:
    line, variables = line_of(STAGES, image), environment(STAGES, image)
    *_, user = [rest for stage in line for rest in stage.all("USER")]
    assert user.isdecimal() and int(user) >= 1000
    (created,) = [rest for stage in line for rest in stage.all("RUN") if "useradd" in rest]
    (volume,) = [rest for stage in line for rest in stage.all("VOLUME")]
    assert f"--uid {user}" in created and f"--home-dir {volume} --create-home" in created
    assert variables["XDG_CACHE_HOME"] == volume
    assert variables["SLOTWISE_API_KEY"] == "", "a container without a key refuses to serve"
    assert variables["PATH"].startswith("/opt/slotwise/bin:")
    assert all(value.startswith(volume) for name, value in variables.items() if name.endswith("_CACHE_DIR"))


def test_compose_builds_the_images_and_needs_a_key() -> None:
    assert (COMPOSE["build"]["target"], CUDA["build"]["target"]) == IMAGES
    assert COMPOSE["environment"]["SLOTWISE_API_KEY"].startswith("${SLOTWISE_API_KEY:?")
    published, port = COMPOSE["ports"][0].rsplit(":", 1)
    assert int(port) == asked("cpu").port and published.startswith("127.0.0.1:")
    assert COMPOSE["volumes"] == [f"cache:{environment(STAGES, 'cpu')['XDG_CACHE_HOME']}"]
    assert seconds(COMPOSE["stop_grace_period"]) > asked("cpu").shutdown_timeout + FLUSH


def test_compose_takes_what_is_written_beside_its_command(tmp_path: Path) -> None:
    """The example in the comment is a list of arguments."""
    (line,) = [line for line in (ROOT / "compose.yaml").read_text().splitlines() if "command:" in line]
    arguments = yaml.safe_load(line.split("such as")[1])
    assert asked("cpu", *map(str, arguments)).max_num_seqs == int(arguments[-1])


def test_the_documented_arguments_of_an_image_are_the_parsers() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text().replace("\\\n", "")
    found = re.findall(r"^docker run .* slotwise:(cpu|cuda)\b(.*)$", text, re.MULTILINE)
    assert [image for image, _ in found] == ["cpu", "cpu", "cuda"]
    assert [asked(image, *arguments.split()).model for image, arguments in found] == [
        None, "/models/SmolLM2-135M", None]


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.cuda.yaml")])
def test_compose_itself_accepts_the_files(files: tuple[str, ...]) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, timeout=60).returncode:
        pytest.skip("docker compose is not installed")
    options = [word for file in files for word in ("--file", file)]

    def config(**more: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLOTWISE")}
        return subprocess.run([docker, "compose", *options, "config", "--format", "json"], cwd=ROOT, env=clean | more,
                              capture_output=True, text=True, timeout=60)

    refused = config()
    assert refused.returncode and "SLOTWISE_API_KEY" in refused.stderr
    accepted = config(SLOTWISE_API_KEY="key")
    assert accepted.returncode == 0, accepted.stderr
    service: dict[str, Any] = json.loads(accepted.stdout)["services"]["slotwise"]
    assert service["environment"]["SLOTWISE_API_KEY"] == "key"
    assert service["build"]["target"] == ("cuda" if len(files) > 1 else "cpu")
