"""A tokenizer whose rules may take any time for a text, run in a worker process: it comes with a checkpoint."""

from __future__ import annotations

import logging
from http import HTTPStatus
from pathlib import Path

from slotwise.server.errors import ApiError
from slotwise.server.turns import Turns
from slotwise.server.worker import CallError, CallRefused, Worker
from slotwise.server.worker_main import Limits
from slotwise.text.tokenizer import TokenizerError

LIMITS = Limits(seconds=10.0, memory=2 << 30, answer=32 << 20)  # the first call loads the tokenizer
CHANGED = "the checkpoint has changed since the start: restart the server"

logger = logging.getLogger(__name__)


class LimitedTokenizer:
    """Encodes in a worker process.

    Args:
        folder: of `tokenizer.json`, which each new worker reads.
        digest: of the tokenizer read from there at the start (`Tokenizer.digest`).
        turns: of the clients.
    """

    def __init__(self, folder: Path, digest: str, turns: Turns, limits: Limits = LIMITS) -> None:
        self._folder = str(folder)
        self._digest = digest
        self._has_told = False
        self._worker = Worker("slotwise.text.encoding", limits, turns)

    async def encode(self, holder: str, text: str, *, add_special_tokens: bool,
                     wants_offsets: bool = False) -> list[int]:
        """Token ids of `text`, or where they begin in it: see `Tokenizer.offsets`.

        Raises:
            TokenizerError: it has none.
            ApiError: the tokenizer exceeds its limits, or is no longer the one that was read at the start.
            QueueFull: too many texts are waiting.
        """
        try:
            ids: list[int] | None = await self._worker.call(
                holder, "encode", lambda: (self._folder, self._digest, text, add_special_tokens, wants_offsets))
        except CallRefused as error:
            raise TokenizerError(str(error)) from error
        except CallError as error:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"the tokenizer {error}", code="tokenizer_failed") \
                from error
        except UnicodeError as error:
            raise TokenizerError("the text is not valid Unicode") from error
        if ids is None:
            raise self._changed()
        return ids

    def _changed(self) -> ApiError:
        """The error of a text without a tokenizer for it; the first one is logged, too."""
        if not self._has_told:
            logger.error("%s: %s", self._folder, CHANGED)
            self._has_told = True
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, CHANGED, code="checkpoint_changed")

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
