"""Reads a checkpoint's config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slotwise.model.config import ModelConfig
from slotwise.model.families import configure
from slotwise.model.fields import read_json
from slotwise.model.formats import CONFIG
from slotwise.model.generation import read_generation
from slotwise.model.gguf.config import read_gguf_config


def read_config(checkpoint: Path, generation: Path | None = None) -> ModelConfig:
    """The config of a folder or a GGUF file, with the further end tokens of its generation_config.json.

    `generation` is a generation_config.json to be read instead of the checkpoint's.

    Raises CheckpointError when the config is missing, malformed or describes an unsupported model, and for the other
    file when it is malformed or, given as `generation`, missing.
    """
    config = read_gguf_config(checkpoint) if checkpoint.is_file() else configure(read_json(checkpoint / CONFIG))
    return _ending(config, read_generation(checkpoint, generation).token_ids("eos_token_id"))


def _ending(config: ModelConfig, more: tuple[int, ...]) -> ModelConfig:
    """Add `more` end tokens, without duplicates and without those outside the vocabulary."""
    ends = dict.fromkeys(config.eos_token_ids + more)
    return replace(config, eos_token_ids=tuple([token for token in ends if token < config.vocab_size]))
