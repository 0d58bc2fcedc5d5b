"""Reads a checkpoint's tokens for grammars, on a thread of its own while the weights are read.

The compiler's constructor holds the interpreter's lock, half a second for 150,000 tokens, so it runs before the first
request and not with the first grammar.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from slotwise import grammars
from slotwise.kernels.cpu.openmp import roam
from slotwise.model.config import ModelConfig
from slotwise.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Vocabulary:
    """The tokens of the checkpoint in `folder`, being read."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._tokenizer: Any = None
        self._thread = threading.Thread(target=self._read, args=(folder, config), name="vocabulary")
        self._thread.start()

    def result(self) -> Any:
        """What grammars are compiled for (`grammars.tokenizer_of`); None: this model's tokenizer has none."""
        self._thread.join()
        return self._tokenizer

    def _read(self, folder: Path, config: ModelConfig) -> None:
        roam()
        try:
            tokenizer = Tokenizer.load(folder)
            if tokenizer.bytes_by_id is not None and config.eos_token_ids:
                self._tokenizer = grammars.tokenizer_of(
                    [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
                    sorted(tokenizer.special_ids), config.eos_token_ids, config.vocab_size,
                    lambda text: tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # a server has refused such a folder; an engine alone needs no tokenizer
            logger.debug("no grammars: %s", error)
