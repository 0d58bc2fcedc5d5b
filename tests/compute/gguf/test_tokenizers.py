"""Tokenizers, templates and special tokens of GGUF files."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import add_tokenizer

from slotwise.platform.gguf_file import find_special_tokens, open_model
from slotwise.text.chat_source import find_chat_template, find_tool_template
from slotwise.text.gguf_tokenizer import SPLITS
from slotwise.text.tokenizer import Tokenizer, TokenizerError

TEXTS = [
    "", "def add(a, b):\n    return a + b\n", "  two  spaces ", "Zürich 12345", "日本語🙂", "<s>user</s>", "a\r\n\tb"]
SCORED = {  # a SentencePiece vocabulary: tokens and their scores
    "▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "▁a": -5.0, "ab": -6.0, "▁ab": -7.0, "bc": -8.0, "abc": -9.0,
    "▁▁": -10.0, "ca": -11.0, "aa": -12.0, "ba": -13.0, "▁abc": -14.0}
SPECIAL = ["<unk>", "<s>", "</s>"]


def vocabulary(path: Path, *, bos: bool = True, prefix: bool = True, **more: Any) -> Path:
    """A file with a SentencePiece vocabulary, and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIAL, *octets, *SCORED]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (len(tokens) - len(SCORED)) + list(SCORED.values()))
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(SCORED)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(bos)
    writer.add_add_space_prefix(prefix)
    for key, value in more.items():
        writer.add_string(f"tokenizer.{key.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def merged(text: str) -> list[str]:
    """SentencePiece: the neighbors whose joined token scores highest become one, the first of equals first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(-SCORED[one + other], place) for place, (one, other) in enumerate(pairwise(pieces))
                  if one + other in SCORED]
        if not joined:
            return pieces
        _, place = min(joined)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def test_a_byte_level_tokenizer_is_that_of_its_checkpoint(folder: Path, file: Path) -> None:
    ours, original = Tokenizer.load(file), Tokenizer.load(folder)
    for text in TEXTS:
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert ours.special_ids == original.special_ids and ours.special_tokens == original.special_tokens
    assert ours.slow_folder is None
    assert find_chat_template(file) == find_chat_template(folder)
    assert find_tool_template(file) is None


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(vocabulary(tmp_path_factory.mktemp("spm") / "spm.gguf", chat_template="{{ bos_token }}",
                                     chat_template__tool_use="{{ tools }}"))


@settings(max_examples=200, deadline=None)
@given(st.text("abc ", max_size=30))
def test_sentencepiece_merges_by_scores(scored: Tokenizer, text: str) -> None:
    ids = scored.encode(text, add_special_tokens=False)
    assert [scored.inner.id_to_token(token) for token in ids] == (merged(text) if text else [])
    assert scored.decode(ids) == text


def test_sentencepiece_falls_back_to_bytes(scored: Tokenizer) -> None:
    ids = scored.encode("é", add_special_tokens=False)
    assert [scored.inner.id_to_token(token) for token in ids] == ["▁", "<0xC3>", "<0xA9>"]
    assert scored.decode(ids) == "é"


@pytest.mark.parametrize(("bos", "prefix", "expected"), [
    (True, True, ["<s>", "▁a"]), (False, True, ["▁a"]), (True, False, ["<s>", "a"])])
def test_beginnings_are_obeyed(bos: bool, prefix: bool, expected: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(vocabulary(tmp_path / "spm.gguf", bos=bos, prefix=prefix))
    assert [tokenizer.inner.id_to_token(token) for token in tokenizer.encode("a")] == expected


def test_named_templates(tmp_path: Path) -> None:
    path = vocabulary(tmp_path / "spm.gguf", chat_template="one", chat_template__tool_use="two")
    assert (find_chat_template(path), find_tool_template(path)) == ("one", "two")
    assert find_chat_template(vocabulary(tmp_path / "none.gguf")) is None


HARMONY = ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|endoftext|>"]


@pytest.mark.parametrize(("tokens", "named", "ends"), [
    (["a", "<|eot_id|>", "<|im_end|>", "</s>", "<|end|>"], {"eos": 3, "eot": 77}, ["</s>", "<|eot_id|>", "<|im_end|>",
                                                                               "<|end|>"]),  # 77: none of them
    (HARMONY, {"eos": 0}, ["<|return|>", "<|endoftext|>", "<|call|>"]),
    (HARMONY[1:], {"eos": 4}, ["<|endoftext|>", "<|call|>", "<|end|>"]),  # as of other models
    (["<|flush|>", "<|calls|>", "<|end|>"], {}, ["<|flush|>", "<|calls|>"]),
    (["</s>", "<eos>", "<|tool_response>", "<turn|>"], {"eos": 1}, ["<eos>", "<|tool_response>", "<turn|>"]),
    (["</s>", "<|plamo:eos|>"], {"eos": 1}, ["<|plamo:eos|>"]),
    (["x", "</s>", "y"], {"eos": 0, "eom": 2}, ["x", "y", "</s>"]),
    (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>"], {}, [
        "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]),
    (["<|fim_pad|>", "other"], {"fim_pad": 1}, ["other"]),
])
def test_end_tokens_are_those_of_llamacpp(tokens: list[str], named: dict[str, int], ends: list[str],
                                          tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "ends.gguf", "llama")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))  # ordinary words, by mistake
    for role, token in named.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = find_special_tokens(open_model(tmp_path / "ends.gguf").metadata, tokens)
    assert sorted(tokens[token] for token in found.ends) == sorted(ends)
    assert [tokens[token] for token in found.ends][:1] == ([tokens[named["eos"]]] if "eos" in named else ends[:1])


def test_a_token_that_ends_a_text_is_special_whatever_its_type_says(folder: Path, tmp_path: Path) -> None:
    """`<|im_end|>`, typed as an ordinary word, is one token of a prompt and hidden in an answer."""
    description = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary["<|im_end|>"] = vocabulary.pop(last)
    description["model"]["merges"] = [merge for merge in description["model"]["merges"] if "".join(merge) != last]
    made = tmp_path / "folder"
    made.mkdir()
    (made / "tokenizer.json").write_text(json.dumps(description))
    (made / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    add_tokenizer(writer, made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.load(tmp_path / "x.gguf")
    ids = tokenizer.encode("hi<|im_end|>", add_special_tokens=False)
    assert ids[-1] == vocabulary["<|im_end|>"] and tokenizer.decode(ids) == "hi"


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("martian")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(TokenizerError, match=r"x\.gguf: tokenizer\.ggml\.pre 'martian' is not supported"):
        Tokenizer.load(tmp_path / "x.gguf")


@pytest.mark.parametrize("kind", SPLITS)
def test_every_kind_of_words_is_usable(kind: str, folder: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    add_tokenizer(writer, folder, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.load(tmp_path / "x.gguf")
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
