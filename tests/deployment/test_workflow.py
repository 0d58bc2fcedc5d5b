"""The workflow runs what the repository's own script runs; the changelog has the form that it names."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import yaml

from slotwise.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def test_the_workflow_runs_every_check_and_every_test() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML 1.1 reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands == {"test": ["bash .ci/run tests"],
                        "clients": ["make clients", "make --jobs 2 clients-more ONLY=ci"]}
    assert os.access(ROOT / ".ci" / "run", os.R_OK)
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    pythons = {step["with"]["python-version"] for step in steps if "python-version" in step.get("with", {})}
    assert pythons == {PROJECT["requires-python"].removeprefix(">=")}, "the oldest version that is promised is tested"


def test_a_release_is_tried_on_every_promised_python_and_published_without_a_token() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())
    assert set(workflow[True]) == {"release"} and workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == "try" and jobs["try"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}, "no other job may publish"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    oldest = [step["with"]["python-version"] for step in jobs["build"]["steps"] if "python-version" in step.get(
        "with", {})]
    tried = [*oldest, *jobs["try"]["strategy"]["matrix"]["python"]]
    assert repr(tuple(tried)).replace("'", '"') in (ROOT / "deploy" / "try_wheel.py").read_text()
    assert tried[0] == PROJECT["requires-python"].removeprefix(">=")


def test_the_changelog_has_sections_of_known_kinds() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    released = versions[versions[0] == "Unreleased" :]
    assert released[0] == __version__ and all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in released)
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert kinds == sorted(set(kinds), key=KINDS.index)
        parts = re.split(r"^### .+$", section, flags=re.MULTILINE)[1:]
        assert parts and all(part.strip().startswith("- ") for part in parts)


def test_the_changelogs_links_lead_somewhere() -> None:
    links = LINK.findall((ROOT / "CHANGELOG.md").read_text())
    assert links and all((ROOT / link).exists() for link in links)
