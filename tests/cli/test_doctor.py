"""slotwise doctor: the figures, the advice, and that what it says is what an engine then chooses."""

from __future__ import annotations

import json
import os
import socket
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from support.live import cli

from slotwise.cli import main
from slotwise.platform.host import cpu_quota


@pytest.mark.slow
def test_what_is_told_is_what_an_engine_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    from slotwise.compose.engine_builder import build_engine
    from slotwise.compute.model.model_registry import find
    from slotwise.engine.config import EngineConfig

    settings = {"max_num_seqs": 8, "dtype": "bfloat16", "kv_cache_memory": 1 << 22}
    told = _report(monkeypatch, "builtin", "--max-num-seqs", "8", "--dtype", "bfloat16", "--kv-cache-memory",
                   str(1 << 22))
    _, info = build_engine(EngineConfig.of(model=str(find("builtin").path), **settings))
    model, limits = told["model"], info.limits
    assert {name: model[name] for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs")} == {
        name: getattr(limits, name) for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs")}
    assert (model["device"], model["dtype"], model["product_path"]) == (info.device, info.dtype, info.product_path)
    assert (model["weight_bytes"], model["cache_bytes"]) == (info.memory.weights, info.memory.cache)
    assert model["step_weight_bytes"] == info.roofline.weight_bytes
    one, eight = model["rates"]
    assert (one["streams"], eight["streams"]) == (1, 8) and one["roofline"] <= eight["roofline"]
    assert model["rates"][0]["learned"], "the engine above has learned"


@pytest.mark.slow
def test_one_screen_says_it_all() -> None:
    done = cli("doctor", "builtin")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 24 and all(len(line) <= 100 for line in lines)
    for label in ("versions", "processor", "instructions", "products", "kernels", "GPU", "memory", "cache folder",
                  "port", "model", "weights", "context", "1 stream", "8 streams"):
        assert any(line.startswith(label) for line in lines), label


@pytest.mark.slow
def test_trouble_comes_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("slotwise.cli.doctor.PORT", port)
        monkeypatch.setenv("SLOTWISE_CPU_LINEAR", "float32")
        (shared := tmp_path / "shared").mkdir()
        os.chmod(shared, 0o777)
        monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
        report = _report(monkeypatch, "builtin")
    advice = "\n".join(report["advice"])
    assert f"port {port} is in use: serve with --port " in advice
    assert "$SLOTWISE_CPU_LINEAR chooses the path float32" in advice
    assert "other programs use this machine (load 99.0" in advice
    assert report["machine"]["free_port"] > port and report["can_serve"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "told"), [
    ("nonsense", "no folder and no file nonsense"), ("owner/name", "`slotwise pull owner/name` downloads the model")])
def test_a_model_that_cannot_be_served_says_why(
        model: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # restored afterwards
    assert main(["doctor", model]) == 1
    assert told in capsys.readouterr().out.replace("\n  ", " ")


@pytest.mark.slow
def test_a_model_that_is_not_here_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("slotwise.compute.model.published_models._installed", lambda model: None)
    report = _report(monkeypatch, "smollm2", status=1)
    assert "`slotwise pull smollm2` downloads SmolLM2-135M-Instruct" in report["advice"]
    assert not report["can_serve"] and not list(tmp_path.rglob("*.gguf"))


@pytest.mark.slow
def test_settings_that_contradict_each_other_are_one_line() -> None:
    done = cli("doctor", "builtin", "--max-num-seqs", "64", "--max-num-batched-tokens", "8")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "--max-num-batched-tokens (8) must be at least" in line


def _report(monkeypatch: pytest.MonkeyPatch, *arguments: str, status: int = 0) -> dict[str, Any]:
    """The report of a doctor in this process."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # restored afterwards
    with redirect_stdout(StringIO()) as printed:
        assert main(["doctor", *arguments, "--json"]) == status
    return dict(json.loads(printed.getvalue()))


@pytest.mark.parametrize(("files", "quota"), [
    ({}, 0.0), ({"": "max 100000"}, 0.0), ({"": "200000 100000"}, 2.0), ({"": "nonsense"}, 0.0)])
def test_a_quota_of_a_control_group(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    for folder, content in files.items():
        (tmp_path / folder / "cpu.max").write_text(content)
    assert cpu_quota(tmp_path) == quota
