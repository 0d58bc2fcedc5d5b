"""The model's chat template, run in a worker process: it comes with a checkpoint, and may be hostile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from slotwise.server.errors import ApiError, from_queue_full
from slotwise.server.turns import QueueFull, Turns
from slotwise.server.worker import CallError, CallRefused, Worker, WorkerError
from slotwise.server.worker_main import Limits
from slotwise.text.chat_source import ChatTemplateError

MAX_WAITING, MAX_WAITING_OF_ONE = 4096, 2048  # renderings of all clients, and of one
RENDERINGS = "chat templates to render"  # in an error
LIMITS = Limits(seconds=5.0, memory=512 << 20, answer=32 << 20)


class Template:
    """A template's source and its worker.

    Args:
        special_tokens: `bos_token`, `eos_token`, ...: variables of the template.
        for_tools: the source of another one, for conversations with tools; None: there is none.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], limits: Limits = LIMITS, *,
                 for_tools: str | None = None) -> None:
        self._for_tools = for_tools
        self._variables: frozenset[str] | None = None  # once they were asked for
        self._source, self._special_tokens = source, list(special_tokens.items())
        self._worker = Worker("slotwise.text.rendering", limits, Turns(MAX_WAITING, MAX_WAITING_OF_ONE))

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
        except (ApiError, ChatTemplateError):  # requests are told so
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

    async def variables(self, holder: str, source: str | None = None) -> frozenset[str]:
        """The names of variables that the template reads, or may read.

        Args:
            source: of a request's template; None: the model's own, with or without tools.

        Raises:
            ChatTemplateError, ApiError: as `render`.
        """
        if source is not None:
            return await self._read_by(holder, source)
        if self._variables is None:
            own = await self._read_by(holder, self._source)
            self._variables = own if self._for_tools is None else own | await self._read_by(holder, self._for_tools)
        return self._variables

    async def _read_by(self, holder: str, source: str) -> frozenset[str]:
        try:
            return frozenset(await self._call(holder, "variables", source=source))
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
