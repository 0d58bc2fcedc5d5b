"""The checkpoint's own rules, run in worker processes: its chat template, and a tokenizer that may take any time.

Both come with a checkpoint, and may be hostile: a template may not end or exhaust memory, and a tokenizer's regexes may
backtrack for any time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from slotwise.api.http.api_errors import ApiError, from_queue_full
from slotwise.api.http.turns import QueueFull, Turns
from slotwise.api.http.worker_process import CallError, CallLimits, CallRefused, Worker, WorkerError
from slotwise.engine.refusals import CHANGED
from slotwise.text.chat_source import ChatTemplateError
from slotwise.text.tokenizer import TokenizerError

MAX_WAITING, MAX_WAITING_OF_ONE = 4096, 2048  # renderings of all clients, and of one
RENDERINGS = "chat templates to render"  # in an error
TEMPLATE_LIMITS = CallLimits(seconds=5.0, memory=512 << 20, answer=32 << 20)
TOKENIZER_LIMITS = CallLimits(seconds=10.0, memory=2 << 30, answer=32 << 20)  # the first call loads the tokenizer

logger = logging.getLogger(__name__)


class Template:
    """A template's source and its worker.

    Args:
        special_tokens: `bos_token`, `eos_token`, ...: variables of the template.
        for_tools: the source of another one, for conversations with tools; None: there is none.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], limits: CallLimits = TEMPLATE_LIMITS, *,
                 for_tools: str | None = None) -> None:
        self._for_tools = for_tools
        self.known_variables: Mapping[str, Any] | None = None  # what `variables` returns, once it was called
        self._source, self._special_tokens = source, list(special_tokens.items())
        self._worker = Worker("slotwise.text.chat_template", limits, Turns(MAX_WAITING, MAX_WAITING_OF_ONE))

    async def check(self) -> None:
        """Raises ChatTemplateError for a template that does not compile within the limits; logs nothing."""
        self._worker.tells = False
        try:
            await self._call("", "check")
            if self._for_tools is not None:
                await self._call("", "check", source=self._for_tools)
        except ApiError as error:
            raise ChatTemplateError(error.message) from error
        finally:
            self._worker.tells = True

    async def ignores_tools(self) -> bool:
        """Whether the template leaves the tools of a conversation out; False where it exceeds the limits."""
        self._worker.tells = False
        try:
            return bool(await self._call("", "ignores_tools", source=self._for_tools))
        except (ApiError, ChatTemplateError):  # each request will fail with the reason
            return False
        finally:
            self._worker.tells = True

    async def render(self, holder: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any],
                     source: str | None = None, *, is_open: bool = False) -> str:
        """The prompt for `messages`.

        Args:
            holder: the client; clients take turns.
            source: of another template, rendered by the same worker.
            is_open: the prompt will be cut at the end of the last message.

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or exceeds its limits.
            ApiError: too many renderings are waiting, or the worker failed twice.
        """
        try:
            if source is None and variables.get("tools"):
                source = self._for_tools
            return str(await self._call(holder, "render", messages, variables, is_open, source=source))
        except QueueFull as error:
            raise from_queue_full(error, RENDERINGS) from error

    async def variables(self, holder: str, source: str | None = None) -> Mapping[str, Any]:
        """What the template reads, by name: see `text.chat_template.variables_of`.

        Args:
            source: of a request's template; None: the model's own, with or without tools.

        Raises:
            ChatTemplateError, ApiError: as `render`.
        """
        if source is not None:
            return await self._read_by(holder, source)
        if self.known_variables is None:
            found = await self._read_by(holder, self._source)
            if self._for_tools is not None:
                found = await self._read_by(holder, self._for_tools) | found
            self.known_variables = found
        return self.known_variables

    async def _read_by(self, holder: str, source: str) -> dict[str, Any]:
        try:
            return dict(await self._call(holder, "variables", source=source))
        except QueueFull as error:
            raise from_queue_full(error, RENDERINGS) from error

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    async def _call(self, holder: str, function: str, *more: Any, source: str | None = None) -> Any:
        fixed = (self._source if source is None else source, self._special_tokens)
        try:
            return await self._worker.call(holder, function, lambda: (*fixed, *more))
        except CallRefused as error:
            raise ChatTemplateError(str(error)) from error
        except WorkerError as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the worker of the chat template {error}",
                           code="not_rendered") from error
        except CallError as error:
            raise ChatTemplateError(f"the chat template {error}") from error
        except (OverflowError, RecursionError) as error:
            raise ChatTemplateError(f"the messages cannot be given to the chat template: {error}") from error


class LimitedTokenizer:
    """Encodes in a worker process.

    Args:
        folder: of `tokenizer.json`, which each new worker reads.
        digest: of the tokenizer read from there at the start (`Tokenizer.digest`).
        turns: of the clients.
    """

    def __init__(self, folder: Path, digest: str, turns: Turns, limits: CallLimits = TOKENIZER_LIMITS) -> None:
        self._folder = str(folder)
        self._digest = digest
        self._has_told = False
        self._worker = Worker("slotwise.text.tokenizer", limits, turns)

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
