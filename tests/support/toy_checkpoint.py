"""A checkpoint's folder with a tokenizer and a chat template, for engines that need no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

TEMPLATE = ("{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('not this') }}{% endif %}"
            "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")


def write_checkpoint(path: Path) -> Path:
    """A byte-level tokenizer of 300 tokens, 0 and 1 special; 300 to 399 are the engine's but not the tokenizer's."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(["the quick brown fox jumps over the lazy dog and runs through the long grass"] * 9,
                              trainer)
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    return path
