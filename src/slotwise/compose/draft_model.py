"""A draft model beside the model: found, checked and loaded."""

from __future__ import annotations

from pathlib import Path

from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.errors import CheckpointError
from slotwise.kernels.interface import Kernels
from slotwise.model.checkpoint import locate
from slotwise.model.loading import UnreadModel, describe
from slotwise.model.model_config import ModelConfig
from slotwise.text.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer, TokenizerError

TOKENIZER = "tokenizer.json"


class DraftCheckpoint:
    """The draft model that the settings of an engine name.

    Raises:
        CheckpointError: it cannot be found.
    """

    def __init__(self, path: str) -> None:
        try:
            self.folder = locate(path)
        except CheckpointError as error:
            raise CheckpointError(f"speculative_config: model: {error}") from error

    @classmethod
    def of(cls, config: EngineConfig) -> DraftCheckpoint | None:
        """The draft model of `config`; None: it has none."""
        speculation = config.speculative_config
        return None if speculation is None or speculation.model is None else cls(speculation.model)

    def check(self, folder: Path, model: ModelConfig, kernels: Kernels) -> None:
        """Checks that it can propose tokens of the model in `folder`.

        Raises:
            CheckpointError: it cannot be loaded.
            ConfigError: its tokens are others.
        """
        if self.describe(model, kernels).recurrent is not None:
            raise ConfigError(f"speculative_config: the draft model in {self.folder} has recurrent states, which is "
                              "not supported")
        why = _difference(folder, self.folder)
        if why is None:
            own = self.describe(model, kernels).vocab_size
            why = f"{own:,} tokens and not {model.vocab_size:,}" if own != model.vocab_size else ""
        if why:
            raise ConfigError(f"speculative_config: the draft model in {self.folder} has another vocabulary than the "
                              f"model in {folder}: {why}")

    def describe(self, model: ModelConfig, kernels: Kernels) -> ModelConfig:
        """Its config, in the type in which the model is computed."""
        return describe(self.folder, _dtype_of(model), kernels)

    def unread(self, model: ModelConfig, kernels: Kernels) -> UnreadModel:
        """Its files, checked.  Raises CheckpointError."""
        unread = UnreadModel(self.folder, self.describe(model, kernels), _dtype_of(model), kernels)
        if not unread.config.has_head:
            raise CheckpointError(f"{self.folder} has no head, so it cannot draft")
        return unread


def _dtype_of(model: ModelConfig) -> str:
    return str(model.dtype).removeprefix("torch.")


def _difference(folder: Path, other: Path) -> str | None:
    """How the tokens in `other` differ from those in `folder`; "" if they do not, None if one has no tokenizer."""
    paths = folder / TOKENIZER, other / TOKENIZER
    try:
        if _are_equal(*paths):
            return ""
        ours, theirs = (Tokenizer.load(path.parent).inner.get_vocab(with_added_tokens=True) for path in paths)
    except (OSError, TokenizerError):
        return None
    if len(ours) != len(theirs):
        return f"{len(theirs):,} tokens and not {len(ours):,}"
    token = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    if token is None:
        return ""
    place = f"is token {theirs[token]}" if token in theirs else "is none of its tokens"
    return f"{token!r:.40} {place}, and token {ours[token]} of the model"


def _are_equal(one: Path, other: Path) -> bool:
    """Whether two files have the same content.  Raises OSError where one cannot be read."""
    sizes = one.stat().st_size, other.stat().st_size
    return sizes[0] == sizes[1] <= MAX_TOKENIZER_BYTES and one.read_bytes() == other.read_bytes()
