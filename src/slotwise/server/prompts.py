"""Prompts of all forms to token ids, checked against the model's limits before the engine receives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slotwise.engine.messages import EngineInfo
from slotwise.server.body_precheck import MAX_MESSAGES
from slotwise.server.errors import bad_request, from_queue_full, from_text, too_long
from slotwise.server.limited_tokenizer import LimitedTokenizer
from slotwise.server.protocol import ChatRequest, Prompt, TokenizeRequest
from slotwise.server.templates import Template
from slotwise.server.turns import QueueFull, Turns
from slotwise.text.chat_source import ChatTemplateError
from slotwise.text.tokenizer import SHORT, Tokenizer, TokenizerError

MAX_WAITING, MAX_WAITING_OF_ONE = 4096, 256  # long texts of all clients, and of one, that wait for the thread
TEXTS = "long texts to tokenize"  # in an error

T = TypeVar("T")


class Prompts:
    """Tokenizes.  Short texts at once; long ones in one thread, so that they delay no stream; clients take turns.

    A tokenizer that may take any time for a text encodes all of them in a worker process.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: Template | None, engine_info: Callable[[], EngineInfo],
    ) -> None:
        """Args: engine_info: returns that of the engine attached last."""
        self.tokenizer = tokenizer
        self._template = chat_template
        self._engine_info = engine_info
        self._thread = ThreadPoolExecutor(1, "tokenize")
        self._turns = Turns(MAX_WAITING, MAX_WAITING_OF_ONE)
        slow = tokenizer.slow_folder
        self._limited = (LimitedTokenizer(slow, tokenizer.digest, Turns(MAX_WAITING, MAX_WAITING_OF_ONE))
                         if slow is not None else None)

    def close(self) -> None:
        """End the workers."""
        if self._limited is not None:
            self._limited.close()
        if self._template is not None:
            self._template.close()

    async def of_completion(self, prompt: Prompt, max_prompts: int, holder: str) -> list[list[int]]:
        """Token ids of each prompt; a list of ids is one prompt.

        Args:
            holder: the client; clients take turns at the thread.

        Raises:
            ApiError: a prompt is empty, mixed, too long or not in the vocabulary, or too many long texts wait.
        """
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not prompts:
            raise bad_request("prompt: must not be empty", "prompt")
        if len(prompts) > max_prompts:
            raise bad_request(f"prompt: at most {max_prompts} prompts in one request", "prompt")
        ids = []
        for one in prompts:
            ids.append(await self._ids(one, holder))
            await asyncio.sleep(0)  # a thousand short texts would delay every stream
        return ids

    async def _ids(self, prompt: object, holder: str) -> list[int]:
        if isinstance(prompt, str):
            ids = await self._encode(holder, prompt)
        else:
            ids = self._given(prompt)
        self.check(ids, "prompt")
        return ids

    def _given(self, prompt: object) -> list[int]:
        if isinstance(prompt, list):
            self._check_length(prompt, "prompt")
            if all(issubclass(kind, int) for kind in set(map(type, prompt))):
                return prompt
        raise bad_request("prompt: must be a string, token ids, or a list of either", "prompt")

    async def of_chat(self, request: ChatRequest | TokenizeRequest, holder: str,
                      variables: dict[str, Any]) -> list[int]:
        """Token ids of the rendered messages.

        Args:
            holder: the client; clients take turns at the template and the thread.
            variables: of the template.

        Raises:
            ApiError: there is no template, it refuses the messages, or they are too long.
        """
        template, messages = self._template, request.messages or []
        if template is None:
            raise bad_request("the model has no chat template; start the server with --chat-template", "messages")
        _check_messages(messages)
        variables = variables | {"add_generation_prompt": request.add_generation_prompt is not False}
        try:
            text = await template.render(holder, messages, variables)
        except ChatTemplateError as error:
            raise from_text(error, "messages") from error
        ids = await self._encode(holder, text, "messages", add_special_tokens=False)
        self.check(ids, "messages")
        return ids

    async def plain(self, text: str, holder: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of any text; only its length is checked."""
        return await self._encode(holder, text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: list[int], holder: str) -> str:
        """The text of token ids.  Raises ApiError for ids outside the vocabulary."""
        self._check_vocabulary(token_ids, "tokens")
        try:
            return await self._aside(
                holder, len(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens=False))
        except QueueFull as error:
            raise from_queue_full(error, TEXTS) from error

    @property
    def _longest(self) -> int:
        return self._engine_info().limits.max_model_len

    async def _encode(self, holder: str, text: str, param: str = "prompt", *,
                      add_special_tokens: bool = True) -> list[int]:
        try:
            if self._limited is None:
                return await self._aside(holder, len(text), lambda: self.tokenizer.encode(
                    text, add_special_tokens=add_special_tokens, max_tokens=self._longest))
            self.tokenizer.check_length(text, self._longest)
            return await self._limited.encode(holder, text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise from_text(error, param) from error
        except QueueFull as error:
            raise from_queue_full(error, TEXTS) from error

    async def _aside(self, holder: str, size: int, work: Callable[[], T]) -> T:
        """Do the work on a text of so many characters or tokens."""
        if size <= SHORT:
            return work()
        async with self._turns.turn(holder):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for a prompt that leaves no token for output."""
        if not ids:
            raise bad_request(f"{param}: the prompt has no tokens", param)
        self._check_length(ids, param)
        self._check_vocabulary(ids, param)

    def _check_length(self, ids: Sequence[int], param: str) -> None:
        if len(ids) >= self._longest:
            raise too_long(f"this model's maximum context length is {self._longest} tokens, output included; "
                           f"the prompt has {len(ids)}", param)

    def _check_vocabulary(self, ids: Sequence[int], param: str) -> None:
        vocab_size = self._engine_info().vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise bad_request(f"{param}: token ids must be between 0 and {vocab_size - 1}", param)

    def max_tokens(self, asked: int | None, longest_prompt: int, default: int | None, param: str = "max_tokens") -> int:
        """The most tokens to generate: the value of the field `param`, else `default` as far as it fits.

        Raises:
            ApiError: the value can never fit the model's context, or the whole cache.
        """
        limits = self._engine_info().limits
        if asked is None:
            left = min(self._longest, limits.cache_tokens + 1) - longest_prompt  # the last token needs no cache place
            asked = max(1, left if default is None else min(default, left))
        if longest_prompt + asked > self._longest:
            raise too_long(
                f"this model's maximum context length is {self._longest} tokens; you asked for "
                f"{longest_prompt + asked} ({longest_prompt} in the prompt, {asked} in the output)", param)
        if objection := limits.objection(longest_prompt, asked):
            raise too_long(objection, param)
        return asked


def _check_messages(messages: list[dict[str, Any]]) -> None:
    """Raises ApiError for messages of the wrong shape."""
    if not messages or len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages: must hold 1 to {MAX_MESSAGES} messages", "messages")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(where: str, message: dict[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise bad_request(f"{where}.role: must be a string", "messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise bad_request(f"{where}.content: must be a string or a list of parts", "messages")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise bad_request(f"{where}.content: only parts of type text are supported", "messages")
