"""`suffix`: a model with fill-in-the-middle tokens fills the gap between two texts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import Server, running
from tokenizers import Tokenizer as Inner

from slotwise.api.generate.prompts import MAX_SUFFIXES
from slotwise.text.declared_tokens import KNOWN_MARKS
from slotwise.text.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
QWEN = KNOWN_MARKS[0]


def write(folder: Path, target: Path, *tokens: str) -> Path:
    """The checkpoint of `folder` with more added tokens."""
    shutil.copytree(folder, target)
    inner = Inner.from_file(str(target / "tokenizer.json"))
    inner.add_special_tokens(list(tokens))
    inner.save(str(target / "tokenizer.json"))
    return target


@pytest.fixture(scope="module")
def filling(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(folder, tmp_path_factory.mktemp("filling") / "model", *QWEN)


@pytest.fixture(scope="module")
def coder(filling: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(filling, tmp_path_factory.mktemp("log") / "engine") as started:
        yield started


def asked(server: Server, **fields: Any) -> Any:
    return server.post(COMPLETIONS, {"max_tokens": 2, "return_token_ids": True} | fields)


def test_the_prompt_is_what_stands_before_and_behind_the_gap(coder: Server, filling: Path) -> None:
    tokenizer = Tokenizer.load(filling)
    marks = [tokenizer.inner.token_to_id(mark) for mark in QWEN]
    before, behind = tokenizer.encode("the fox "), tokenizer.encode(" the dog")
    (choice,) = asked(coder, prompt="the fox ", suffix=" the dog").json()["choices"]
    assert choice["prompt_token_ids"] == [marks[0], *before, marks[1], *behind, marks[2]]


def test_each_of_several_prompts_has_the_suffix(coder: Server) -> None:
    alone = [asked(coder, prompt=text, suffix="lazy").json()["choices"][0] for text in ("the", "fox")]
    together = asked(coder, prompt=["the", "fox"], suffix="lazy").json()["choices"]
    assert [choice["prompt_token_ids"] for choice in together] == [choice["prompt_token_ids"] for choice in alone]


@pytest.mark.parametrize("suffix", ["", None])
def test_no_suffix_is_an_ordinary_completion(coder: Server, server: Server, suffix: str | None) -> None:
    for one in (coder, server):
        given, plain = asked(one, prompt="the fox", suffix=suffix), asked(one, prompt="the fox")
        assert given.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("fields", [
    {"prompt": [2, 3]}, {"prompt": ["the", [2]]}, {"echo": True}, {"truncate_prompt_tokens": 5}, {"suffix": 7},
    {"prompt": ["x"] * 40, "suffix": "y" * (MAX_SUFFIXES // 40 + 1)}])
def test_what_has_no_meaning_beside_a_gap_is_refused(coder: Server, fields: dict[str, Any]) -> None:
    answer = asked(coder, **({"prompt": "the", "suffix": "fox"} | fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")


def test_a_model_without_the_tokens_refuses_it(server: Server) -> None:
    error = asked(server, prompt="the", suffix="fox").json()["error"]
    assert error["param"] == "suffix" and error["code"] == "unsupported_parameter"


def test_a_tokenizer_needs_all_of_the_tokens(folder: Path, tmp_path: Path) -> None:
    assert Tokenizer.load(write(folder, tmp_path / "some", *QWEN[:2])).fill_marks is None
    assert Tokenizer.load(write(folder, tmp_path / "others", *KNOWN_MARKS[1])).fill_marks == KNOWN_MARKS[1]
