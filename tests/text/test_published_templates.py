"""Templates of published models render as transformers renders them, and lose nothing of what clients send."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.published_templates import losses, renderings, transformers_tokenizer

from slotwise.api.parsers.tool_formats import tool_parser_of

FOLDER = Path(__file__).with_name("templates")
PARSERS = {
    "HuggingFaceTB-SmolLM3-3B": "", "Qwen-Qwen2.5-7B-Instruct": "hermes", "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_xml", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "ibm-granite-granite-3.3-2B-Instruct": "granite", "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "openai-gpt-oss-120b": "openai"}


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_published_template(name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    assert tool_parser_of(source) == PARSERS[name]
    for one in renderings(source, transformers_tokenizer()):
        assert one.verdict in ("equal", "normalized"), one.conversation


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_nothing_that_clients_send_is_lost(name: str) -> None:
    """Fields that are null, empty or absent; our own answers; `developer`; system messages and turns in any order."""
    found = [(tried.name, verdict) for tried, verdict in losses((FOLDER / f"{name}.jinja").read_text())]
    assert [one for one in found if one[1] != "kept"] == []


def test_every_template_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(PARSERS)
