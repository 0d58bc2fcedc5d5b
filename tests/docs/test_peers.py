"""The comparison with peers says where a peer is ahead, whatever the figures are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))  # `docs` is run from the repository's root, never installed

from docs.generate import results


def run(engine: str, weights: str, **changed: float) -> dict[str, Any]:
    """A round in which every figure is 10, but for `rate`, `first`, `ready` and `memory`."""
    figures = {"output_tokens_per_second": changed.get("rate", 10), "first_token_ms": 1e3 * changed.get("first", 10)}
    return {"engine": engine, "weights": weights, "version": "1.2.3", "users": dict.fromkeys(("1", "8", "64"), figures),
            "ready_seconds": changed.get("ready", 10), "memory_bytes": changed.get("memory", 10) * 2**30,
            "same_answers": 3, "compared_answers": 4}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> str:
    runs = [run("slotwise", "bfloat16"), run("vllm", "bfloat16", rate=9, first=11, ready=80, memory=11),
            run("openvino", "bfloat16", rate=20, memory=5), run("slotwise-q8", "Q8_0", first=4, ready=2),
            run("llamacpp-q8", "Q8_0", first=5, ready=1), run("slotwise-q4", "Q4_1"),
            run("llamacpp", "Q4_1", rate=99)]
    monkeypatch.setattr(results, "load", lambda name: {"runs": runs})
    return results.peers_on_the_real_model()


def test_a_peer_that_is_ahead_comes_first_and_one_that_is_not_is_left_out(page: str) -> None:
    first, table = page.split("\n\n")
    assert first == (
        "Ahead of Slotwise by 5% or more, with the same weights: **OpenVINO GenAI** in tokens/s with 1 user (2.0×), "
        "tokens/s with 8 users (2.0×), tokens/s with 64 users (2.0×) and memory (2.0×); **llama.cpp** in starting "
        "(2.0×).")
    assert "| tokens/s: 1, 8, 64 users | 10, 10, 10 | 9, 9, 9 | 20, 20, 20 |" in table
    assert "| answers that load did not change | 75% |" in table


def test_slotwise_is_compared_with_the_same_weights(page: str) -> None:
    """llama.cpp's first token is earlier than that of Slotwise in bfloat16, and later than with the same file."""
    assert "llama.cpp** in starting" in page and "llama.cpp** in the first" not in page
