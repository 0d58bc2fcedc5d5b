"""Templates of published models render as transformers renders them, lose nothing of what clients send, and
are read back by the parsers that they call for."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.published_templates import losses, read_back, renderings, transformers_tokenizer

FOLDER = Path(__file__).with_name("templates")
READ = {
    "Apertus-8B-Instruct": ("apertus", "apertus", "calls"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss", "calls, reasoning"),
    "GLM-4.7-Flash": ("glm45", "qwen3", "calls, reasoning"),
    "HuggingFaceTB-SmolLM3-3B": ("hermes", "qwen3", "calls"), "Qwen-Qwen2.5-7B-Instruct": ("hermes", "", "calls"),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3", "calls, reasoning"), "Qwen3-Coder": ("qwen3_xml", "", "calls"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("hermes", "qwen3", "calls"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "qwen3", "calls"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite", "calls"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "", "calls"),
    "openai-gpt-oss-120b": ("openai", "openai", "calls, reasoning")}


@pytest.mark.parametrize("name", sorted(READ))
def test_a_published_template(name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    assert read_back(source) == READ[name]
    for one in renderings(source, transformers_tokenizer()):
        assert one.verdict in ("equal", "normalized"), one.conversation


@pytest.mark.parametrize("name", sorted(READ))
def test_nothing_that_clients_send_is_lost(name: str) -> None:
    """Fields that are null, empty or absent; our own answers; `developer`; system messages and turns in any order."""
    found = [(tried.name, verdict) for tried, verdict in losses((FOLDER / f"{name}.jinja").read_text())]
    assert [one for one in found if one[1] != "kept"] == []


def test_every_template_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(READ)
