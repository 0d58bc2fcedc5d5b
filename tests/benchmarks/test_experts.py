"""The benchmark of mixtures, on a small one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import experts


def test_a_run_counts_what_it_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16,
                        "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "head_dim": 16}.items():
        monkeypatch.setitem(experts.CONFIG, name, value)
    monkeypatch.setattr(experts, "READ_SECONDS", 0.001)
    path = tmp_path / "runs.json"
    monkeypatch.setattr(sys, "argv", ["", "--dtype", "float32", "--seconds", "0.01", "--json", str(path)])
    experts.main()
    experts.main()
    first, second = json.loads(path.read_text())["runs"]
    assert first["config"] == second["config"]
    one, eight, many = first["rows"]
    assert (one["rows"], one["experts_hit"]) == (1, 2)
    assert 2 < eight["experts_hit"] < many["experts_hit"] <= 16
    expert = 3 * 64 * 32 * 4
    assert eight["bytes"] - one["bytes"] == pytest.approx(2 * (eight["experts_hit"] - 2) * expert)
    assert all(row["share"] == pytest.approx(row["bound_ms"] / row["step_ms"]) for row in first["rows"])
