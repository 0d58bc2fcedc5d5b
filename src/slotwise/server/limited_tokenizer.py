"""A tokenizer whose rules may take any time for a text, run in a worker process: it comes with a checkpoint."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from slotwise.server.errors import ApiError
from slotwise.server.turns import Turns
from slotwise.server.worker import CallError, CallRefused, Worker
from slotwise.server.worker_main import Limits
from slotwise.text.tokenizer import TokenizerError

LIMITS = Limits(seconds=10.0, memory=2 << 30, answer=32 << 20)  # the first call loads the tokenizer


class LimitedTokenizer:
    """Encodes in a worker process.

    Args:
        folder: of `tokenizer.json`.
        turns: of the clients.
    """

    def __init__(self, folder: Path, turns: Turns, limits: Limits = LIMITS) -> None:
        self._folder = str(folder)
        self._worker = Worker("slotwise.text.encoding", limits, turns)

    async def encode(self, holder: str, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`.

        Raises:
            TokenizerError: it has none.
            ApiError: the tokenizer exceeds its limits.
            QueueFull: too many texts are waiting.
        """
        try:
            ids: list[int] = await self._worker.call(
                holder, "encode", lambda: (self._folder, text, add_special_tokens))
        except CallRefused as error:
            raise TokenizerError(str(error)) from error
        except CallError as error:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, f"the tokenizer {error}", code="tokenizer_failed") \
                from error
        except UnicodeError as error:
            raise TokenizerError("the text is not valid Unicode") from error
        return ids

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
