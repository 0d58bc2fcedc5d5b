"""Reads a checkpoint's tokens for grammars, on a thread of its own while the weights are read.

The compiler's constructor holds the interpreter's lock, half a second for 150,000 tokens, so it runs before the first
request and not with the first grammar.  The tokenizer itself is read first: meanwhile the process has no stderr
(`text.tokenizer.no_panic_messages`), and no other thread's message may be lost.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from slotwise import grammars
from slotwise.kernels.cpu.threads import roam
from slotwise.model.model_config import ModelConfig
from slotwise.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Vocabulary:
    """The tokens of the checkpoint in `folder`, being read."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._vocabulary: Any = None
        self._thread: threading.Thread | None = None
        self._config = config
        try:
            tokenizer = Tokenizer.load(folder)
        except Exception as error:  # a server has refused such a folder; an engine alone needs no tokenizer
            logger.debug("no grammars: %s", error)
            return
        self._thread = threading.Thread(target=self._read, args=(tokenizer,), name="vocabulary")
        self._thread.start()

    def result(self) -> Any:
        """What grammars are compiled for (`grammars.tokenizer_of`); None: this model's tokenizer has none."""
        if self._thread is not None:
            self._thread.join()
        return self._vocabulary

    def _read(self, tokenizer: Tokenizer) -> None:
        roam()
        try:
            if tokenizer.bytes_by_id is not None and self._config.eos_token_ids:
                self._vocabulary = grammars.tokenizer_of(
                    [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
                    sorted(tokenizer.special_ids), self._config.eos_token_ids, self._config.vocab_size,
                    lambda text: tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # an engine runs without grammars
            logger.debug("no grammars: %s", error)
