"""Small tokenizers of both families, trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from slotwise.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def add(a, b):\n    return a + b\n",
    "naïve café Zürich straße żółw",
    "日本語のテキスト 中文 한국어",
    "🙂🙃 family 👨‍👩‍👧 flag 🇨🇭",
] * 3


def byte_level() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|a b|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.add_tokens(["<plain added>"])
    return inner


def sentence_pieces() -> Inner:
    """Llama 2's arrangement: byte fallback, "▁" for a space, one before the text."""
    special = ["<unk>", "<s>", "</s>"]
    inner = Inner(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = special + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=alphabet, show_progress=False)
    inner.train_from_iterator(CORPUS[:2], trainer)
    state = json.loads(inner.to_str())  # only the first three of its tokens are special
    for token in state["added_tokens"]:
        token["special"] = token["id"] < 3
    state["added_tokens"] = state["added_tokens"][:3]
    return Inner.from_str(json.dumps(state))


def metaspace() -> Inner:
    inner = Inner(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"],
                                                         show_progress=False))
    return inner


def word_pieces() -> Inner:
    inner = Inner(models.WordPiece(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"],
                                                               show_progress=False))
    return inner


FAMILIES = {"byte_level": byte_level, "sentence_pieces": sentence_pieces, "metaspace": metaspace,
            "word_pieces": word_pieces}


@pytest.fixture(scope="session")
def tokenizers_by_family() -> dict[str, Tokenizer]:
    return {name: Tokenizer(build()) for name, build in FAMILIES.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's text files."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path
