"""Reads a checkpoint's config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slotwise.model.config import ModelConfig
from slotwise.model.families import configure
from slotwise.model.fields import read_json
from slotwise.model.formats import CONFIG
from slotwise.model.generation import read_generation


def read_config(folder: Path, generation: Path | None = None) -> ModelConfig:
    """The checkpoint's config.json, with the further end tokens of its generation_config.json.

    `generation` is a generation_config.json to be read instead of the checkpoint's.

    Raises CheckpointError when config.json is missing, malformed or describes an unsupported model, and for the other
    file when it is malformed or, given as `generation`, missing.
    """
    config = configure(read_json(folder / CONFIG))
    return _ending(config, read_generation(folder, generation).token_ids("eos_token_id"))


def _ending(config: ModelConfig, more: tuple[int, ...]) -> ModelConfig:
    """Add `more` end tokens, without duplicates and without those outside the vocabulary."""
    ends = dict.fromkeys(config.eos_token_ids + more)
    return replace(config, eos_token_ids=tuple([token for token in ends if token < config.vocab_size]))
