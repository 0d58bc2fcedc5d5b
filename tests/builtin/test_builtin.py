"""The shipped model: whole, small, loadable by others, and able to write functions that parse and end."""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from slotwise import builtin

if TYPE_CHECKING:  # imported where it is used, not by every process that looks for tests
    from transformers import PreTrainedTokenizerBase

SHIPPED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HELD_OUT = Path(__file__).parents[2] / "training" / "heldout.json"
MEGABYTE = 1_000_000
END = 1
BARE = Tokenizer.from_file(str(builtin.path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(builtin.path())


@pytest.fixture(scope="module")
def completions(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list[int]]]:
    """Twelve held-out signatures and the new token ids written after each, at temperature 0.2."""
    from transformers import AutoModelForCausalLM

    entries = json.loads(HELD_OUT.read_text())["signatures"][:12]
    signatures = [entry["signature"] for entry in entries]
    model = AutoModelForCausalLM.from_pretrained(builtin.path(), dtype=torch.float32)
    inputs = tokenizer(signatures, return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(1)
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=True, temperature=0.2,
            max_new_tokens=256,
        )
    return list(zip(signatures, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True))


def parses(source: str) -> bool:
    try:
        ast.parse(textwrap.dedent(source))
    except SyntaxError:
        return False
    return True


def test_it_is_whole_and_under_twenty_megabytes() -> None:
    sizes = {name: (builtin.path() / name).stat().st_size for name in (*SHIPPED, "NOTICE.md")}
    assert all(sizes.values())
    assert sum(sizes.values()) < 20 * MEGABYTE


def test_the_weights_are_bfloat16_and_of_the_stated_size() -> None:
    with safe_open(builtin.path() / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 (it is no dict)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 3_000_000 < sum(tensor.numel() for tensor in tensors) < 8_000_000


def test_both_configurations_name_the_end_token() -> None:
    for name in ("config.json", "generation_config.json"):
        assert json.loads((builtin.path() / name).read_text())["eos_token_id"] == END
    assert BARE.token_to_id("<|end|>") == END


def test_most_completions_end_by_themselves(completions: list[tuple[str, list[int]]]) -> None:
    assert sum(END in row for _, row in completions) >= 9


def test_most_completions_parse(
    completions: list[tuple[str, list[int]]], tokenizer: PreTrainedTokenizerBase
) -> None:
    sources = [signature + tokenizer.decode(row, skip_special_tokens=True) for signature, row in completions]
    assert sum(map(parses, sources)) >= 7


def test_completions_differ_in_length_and_text(completions: list[tuple[str, list[int]]]) -> None:
    lengths = [row.index(END) if END in row else len(row) for _, row in completions]
    assert len(set(lengths)) >= 6
    assert max(lengths) >= 2 * min(lengths)


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = BARE.encode(text, add_special_tokens=False).ids
    assert BARE.decode(ids) == text


@given(st.text(alphabet=st.sampled_from(list("def f(self):\n    return 'x'_=.,"))))
def test_a_completion_starts_at_a_token_boundary(body: str) -> None:
    """The tokens of a signature do not depend on the body after it, so a prompt is a prefix of what was trained on."""
    signature, rest = "def f(self, name=None):", "\n    " + body.strip()
    alone, whole = BARE.encode(signature).ids, BARE.encode(signature + rest).ids
    assert whole[: len(alone)] == alone


def test_encoding_begins_with_the_begin_token_once(tokenizer: PreTrainedTokenizerBase) -> None:
    assert BARE.encode("def f():").ids == tokenizer("def f():")["input_ids"]
    assert tokenizer("def f():")["input_ids"].count(tokenizer.bos_token_id) == 1


def test_the_chat_template_writes_one_file(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "You complete code."},
        {"role": "user", "content": "def first():"},
        {"role": "assistant", "content": "\n    pass"},
        {"role": "user", "content": "\n def second(a, b):\n"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|begin|># You complete code.\n\n\ndef first():\n    pass\n\n\ndef second(a, b):")
    alone = tokenizer.apply_chat_template(messages[-1:], tokenize=False, add_generation_prompt=True)
    assert BARE.encode(alone, add_special_tokens=False).ids == BARE.encode("def second(a, b):").ids
