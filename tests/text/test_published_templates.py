"""Templates of published models render as transformers renders them, and tell how their models call tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_templates import renderings, transformers_tokenizer

from slotwise.server.parsers.registry import tool_parser_of

FOLDER = Path(__file__).with_name("templates")
PARSERS = {
    "HuggingFaceTB-SmolLM3-3B": "", "Qwen-Qwen2.5-7B-Instruct": "hermes", "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_xml", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "",
    "ibm-granite-granite-3.3-2B-Instruct": "", "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "openai-gpt-oss-120b": "openai"}


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_published_template(name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    assert tool_parser_of(source) == PARSERS[name]
    rendered = list(renderings(source, transformers_tokenizer()))
    for one in rendered:
        assert one.ours == one.theirs, one.conversation
    assert sum(one.ours is not None for one in rendered) == len(rendered)


def test_every_template_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(PARSERS)
