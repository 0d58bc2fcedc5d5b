"""What a result says of where it came from, and how it reaches the disk."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import slotwise
from slotwise.measure.bench.results import commit, default_filename, environment, workload_facts, write_json
from slotwise.measure.workload.distributions import Fixed, Uniform
from slotwise.measure.workload.workloads import Recipe, generate


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.com", "-c", "commit.gpgsign=false"]
    run = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def test_the_environment_is_told() -> None:
    told = environment()
    assert set(told) == {"slotwise", "python", "torch", "commit", "machine", "cores", "created"}
    assert told["slotwise"] == slotwise.__version__
    assert told["torch"] and told["machine"] and told["cores"] >= 1
    json.dumps(told)


def test_a_commit_is_that_of_the_checkout_and_says_when_it_was_changed(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "Begin", "--no-verify")
    git(tmp_path, "tag", "-a", "v1", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert len(commit(tmp_path)) >= 12 and head.startswith(commit(tmp_path))
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == head[:12] + "-dirty"


def test_a_folder_within_someone_elses_checkout_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    inner = tmp_path / "site-packages"
    inner.mkdir()
    assert commit(inner) == ""


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1.5})
    assert json.loads(path.read_text()) == {"a": 1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1.5}
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(OSError, match="nowhere"):
        write_json(tmp_path / "nowhere" / "result.json", {})


def test_names_of_files_hold_nothing_that_a_system_minds() -> None:
    assert default_filename("serve", "org/My Model:7b").startswith("serve-My-Model-7b-")


def test_facts_of_a_workload() -> None:
    facts = workload_facts(generate(Recipe(4, Fixed(5), Uniform(3, 3)), 0))
    assert facts == {
        "description": {"input_lengths": "fixed:5", "output_lengths": "uniform:3:3", "arrivals": "at-once"},
        "num_requests": 4, "max_tokens": 3, "prompt_tokens": 20, "output_tokens": 12, "output_cv": 0.0}
