"""Prompts of all forms to token ids, checked against the model's limits before the engine receives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from slotwise.api.generate.checkpoint_workers import LimitedTokenizer, Template
from slotwise.api.http.api_errors import ContextExceeded, bad_request, from_queue_full, from_text
from slotwise.api.http.turns import QueueFull, Turns
from slotwise.api.protocol.protocol import Prompt
from slotwise.core.params import MAX_BAD_WORD_TOKENS
from slotwise.engine.messages import EngineInfo
from slotwise.text.chat_source import ChatTemplateError
from slotwise.text.conversation import RESERVED_VARIABLES, InvalidMessages, Message, OpenEnd, check_messages, text_of
from slotwise.text.detokenizer import TextOffsets, detokenizer
from slotwise.text.token_cache import SEGMENT, Boundaries, TokenCache
from slotwise.text.tokenizer import NO_MARKS, SHORT, TextMarks, TextTooLong, Tokenizer, TokenizerError, spellings


class Conversation(NamedTuple):
    """Messages, and how they become a prompt."""

    messages: list[Message]
    variables: dict[str, Any]  # of the template
    template: str | None = None  # the request's own source; None: the server's
    continues: bool = False  # the last message is left open


def last_text(messages: Sequence[Message], role: str) -> str:
    """The text of the last message if it is of this role, else ""."""
    return _text(messages[-1]) if messages and messages[-1].get("role") == role else ""


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(map(text_of, content))


MAX_WAITING, MAX_WAITING_OF_ONE = 4096, 256  # long texts of all clients, and of one, that wait for the thread
MAX_SUFFIXES = 1 << 20  # characters of a request's suffix, which stands behind each of its prompts
TEXTS = "long texts to tokenize"  # in an error
SLICE = 4096  # tokens detokenized in one pass of the event loop: about a millisecond

T = TypeVar("T")


class Encoding(NamedTuple):
    """How a text, or a list of token ids, becomes a prompt."""

    add_special_tokens: bool = True  # the tokenizer adds its own to a text
    most: int | None = None  # tokens that are kept; None: all of them
    keeps_last: bool = True  # the last ones; else the first
    param: str = "prompt"  # the request's field, for errors

    def kept(self, ids: list[int], marks: TextMarks = NO_MARKS) -> list[int]:
        """What is kept of the tokens of a text with special tokens `marks`, or of tokens as they are."""
        return ids if self.most is None else marks.cut(ids, self.most, keeps_last=self.keeps_last)


WHOLE = Encoding()
RENDERED = Encoding(add_special_tokens=False)  # a template writes the special tokens itself


class Rendered(NamedTuple):
    """A conversation as the template wrote it, and its token ids."""

    text: str
    ids: list[int]


class Prompts:
    """Tokenizes.  Short texts at once; long ones in one thread, so that they delay no stream; clients take turns.

    A text that extends one that the client has sent before is encoded from there on (`text/token_cache.py`).
    A tokenizer that may take any time for a text encodes all of them, whole, in a worker process.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: Template | None, engine_info: Callable[[], EngineInfo],
    ) -> None:
        """Args: engine_info: returns that of the engine attached last."""
        self.tokenizer = tokenizer
        self._template = chat_template
        self._requested: Template | None = None  # a worker of its own for templates in requests
        self._boundaries = Boundaries(tokenizer.inner)
        self._known = TokenCache(self._boundaries)
        self._engine_info = engine_info
        self._thread = ThreadPoolExecutor(1, "tokenize")
        self._turns = Turns(MAX_WAITING, MAX_WAITING_OF_ONE)
        slow = tokenizer.slow_folder
        self._limited = (LimitedTokenizer(slow, tokenizer.digest, Turns(MAX_WAITING, MAX_WAITING_OF_ONE))
                         if slow is not None else None)

    def close(self) -> None:
        """End the workers."""
        for worker in (self._limited, self._template, self._requested):
            if worker is not None:
                worker.close()

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its output may have: as the model's context and the whole cache allow."""
        limits = self._engine_info().limits
        return min(limits.max_model_len, limits.cache_tokens + 1)  # the last token needs no place in the cache

    async def of_completion(self, prompt: Prompt, max_prompts: int, holder: str,
                            encoding: Encoding = WHOLE) -> list[list[int]]:
        """Token ids of each prompt; a list of ids is one prompt.

        Args:
            holder: the client; clients take turns at the thread.

        Raises:
            ApiError: a prompt is empty, mixed, too long or not in the vocabulary, or too many long texts wait.
        """
        prompts = _listed(prompt)
        if not prompts:
            raise bad_request(f"{encoding.param}: must not be empty", encoding.param)
        if len(prompts) > max_prompts:
            raise bad_request(f"{encoding.param}: at most {max_prompts} prompts in one request", encoding.param)
        ids = []
        for one in prompts:
            ids.append(await self._ids(one, holder, encoding))
            await asyncio.sleep(0)  # a thousand short texts would delay every stream
        return ids

    def with_gap(self, prompt: Prompt, suffix: str) -> Prompt:
        """The prompts whose outputs stand between each prompt and `suffix`.

        Raises:
            ApiError: the model has no tokens for it, or a prompt is not text, or they are too many for a long suffix.
        """
        marks, prompts = self.tokenizer.fill_marks, _listed(prompt)
        if marks is None:
            raise bad_request("suffix: the model has no tokens that mark a gap to fill", "suffix",
                              "unsupported_parameter")
        if not all(isinstance(one, str) for one in prompts):
            raise bad_request("suffix: needs prompts that are texts", "suffix")
        if len(prompts) * len(suffix) > MAX_SUFFIXES:
            raise bad_request(f"suffix: {MAX_SUFFIXES} characters at most behind all prompts", "suffix")
        return [marks.prompt(one, suffix) for one in prompts]

    async def _ids(self, prompt: object, holder: str, encoding: Encoding) -> list[int]:
        if isinstance(prompt, str):
            ids = await self._encode(holder, prompt, encoding.param, encoding)
        else:
            ids = self._given(prompt, encoding)
        self.check(ids, encoding.param)
        return ids

    def _given(self, prompt: object, encoding: Encoding) -> list[int]:
        if isinstance(prompt, list):
            prompt = encoding.kept(prompt)
            self._check_length(prompt, encoding.param)
            if all(issubclass(kind, int) for kind in set(map(type, prompt))):
                return prompt
        raise bad_request(f"{encoding.param}: must be a string, token ids, or a list of either", encoding.param)

    async def texts(self, prompt: Prompt, ids: Sequence[list[int]], holder: str, encoding: Encoding, *,
                    special: bool) -> list[str]:
        """The text of each prompt: as it was given, or the text of its tokens if these were given or are truncated.

        Args:
            ids: of each prompt, encoded as `encoding` says.
            special: special tokens have a text.
        """
        texts = []
        for one, kept in zip(_listed(prompt), ids, strict=True):
            is_given = isinstance(one, str) and encoding.most is None
            texts.append(one if is_given else await self._decoded(kept, holder, special=special))
            await asyncio.sleep(0)
        return texts

    async def offsets(self, prompt: Prompt, ids: Sequence[list[int]], holder: str, encoding: Encoding, *,
                      special: bool) -> list[list[int]]:
        """Where the tokens of each prompt begin in its text: see `texts`, and `TextOffsets`."""
        found = []
        for one, kept in zip(_listed(prompt), ids, strict=True):
            if isinstance(one, str) and encoding.most is None:
                found.append(await self._encoded(holder, one, encoding.param, encoding, wants_offsets=True))
                continue
            offsets, begun = list[int](), TextOffsets(detokenizer(self.tokenizer, shows_special=special))
            for start in range(0, len(kept), SLICE):
                offsets += begun.of(kept[start : start + SLICE])
                await asyncio.sleep(0)
            found.append(offsets)
        return found

    async def of_chat(self, conversation: Conversation, holder: str, encoding: Encoding = RENDERED) -> Rendered:
        """The rendered messages.

        Args:
            holder: the client; clients take turns at the template and the thread.

        Raises:
            ApiError: there is no template, it refuses the messages, or they are too long.
        """
        messages, source = conversation.messages, conversation.template
        template = self._template if source is None else self._of_requests()
        if template is None:
            raise bad_request("the model has no chat template; start the server with --chat-template", "messages")
        try:
            check_messages(messages)
            open_end = OpenEnd(messages) if conversation.continues else None
            text = await template.render(
                holder, messages if open_end is None else open_end.messages, conversation.variables, source,
                is_open=conversation.continues)
            text = text if open_end is None else open_end.cut(text)
        except ChatTemplateError as error:
            raise from_text(error, "messages" if source is None else "chat_template") from error
        except InvalidMessages as error:
            raise bad_request(str(error), error.param, error.code) from error
        ids = await self._encode(holder, text, "messages", encoding)
        self.check(ids, "messages")
        return Rendered(text, ids)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the model's own template that requests may set, with what the template says of them."""
        read = (self._template.known_variables if self._template is not None else None) or {}
        return {name: about for name, about in read.items() if name not in RESERVED_VARIABLES}

    async def template_variables(self, source: str | None, holder: str) -> Mapping[str, Any]:
        """What a template reads, by name: `source`, or the model's own, which may not exist.

        Raises:
            ApiError: it does not compile.
        """
        template = self._template if source is None else self._of_requests()
        try:
            return {} if template is None else await template.variables(holder, source)
        except ChatTemplateError as error:
            raise from_text(error, "messages" if source is None else "chat_template") from error

    def _of_requests(self) -> Template:
        """A template that has no source of its own: one that takes too long delays no rendering of the model's."""
        if self._requested is None:
            self._requested = Template("", self.tokenizer.special_tokens)
        return self._requested

    async def plain(self, text: str, holder: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of any text; only its length is checked."""
        return await self._encode(holder, text, "prompt", Encoding(add_special_tokens))

    async def of_texts(self, texts: Sequence[str], holder: str, encoding: Encoding) -> list[list[int]]:
        """Token ids of texts that become parts of prompts: their lengths are not checked, if they are to be cut."""
        ids = []
        for text in texts:
            ids.append(await self._encode(holder, text, encoding.param, encoding))
            await asyncio.sleep(0)
        return ids

    async def of_prediction(self, text: str, holder: str) -> tuple[int, ...]:
        """The token ids of a predicted output, as far as an output can have them."""
        ids = await self._encode(holder, text, "prediction", Encoding(False))
        vocab_size = self._engine_info().vocab_size
        return tuple([token for token in ids[: self.longest] if token < vocab_size])

    async def of_bad_words(self, words: Sequence[str], holder: str) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at the beginning of a text and after a space."""
        vocab_size, found = self._engine_info().vocab_size, dict[tuple[int, ...], None]()
        for text in spellings(words):
            ids = tuple(await self.plain(text, holder, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise bad_request(f"bad_words: each may have {MAX_BAD_WORD_TOKENS} tokens", "bad_words")
            if ids and max(ids) < vocab_size:  # else the model never generates it
                found[ids] = None
            await asyncio.sleep(0)
        return tuple(found)

    async def decode(self, token_ids: list[int], holder: str) -> str:
        """The text of token ids.  Raises ApiError for ids outside the vocabulary."""
        self._check_vocabulary(token_ids, "tokens")
        return await self._decoded(token_ids, holder, special=True)

    async def _decoded(self, token_ids: list[int], holder: str, *, special: bool) -> str:
        try:
            return await self._aside(
                holder, len(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens=not special))
        except QueueFull as error:
            raise from_queue_full(error, TEXTS) from error

    async def _encode(self, holder: str, text: str, param: str, encoding: Encoding) -> list[int]:
        ids = await self._encoded(holder, text, param, encoding)
        return encoding.kept(ids, self.tokenizer.marks) if encoding.add_special_tokens else encoding.kept(ids)

    async def _encoded(self, holder: str, text: str, param: str, encoding: Encoding, *,
                       wants_offsets: bool = False) -> list[int]:
        """The token ids of a text, or where its tokens begin."""
        special = encoding.add_special_tokens
        most = self.longest if encoding.most is None else None  # of a text that is truncated any length is encoded
        try:
            if self._limited is not None:
                self.tokenizer.check_length(text, most)
                return await self._limited.encode(holder, text, add_special_tokens=special, wants_offsets=wants_offsets)
            if wants_offsets:
                return await self._aside(holder, len(text), lambda: self.tokenizer.offsets(
                    text, add_special_tokens=special))
            if self._boundaries.exist and len(text) > 2 * SEGMENT:
                self.tokenizer.check_length(text, most)
                missing = self._known.missing(holder, text)
                parts = await self._aside(holder, sum(map(len, missing.segments)), lambda: [
                    self.tokenizer.encode(segment, add_special_tokens=False) for segment in missing.segments])
                ids = self._known.add(holder, missing, parts)
                return [*self._boundaries.before, *ids, *self._boundaries.after] if special else ids
            return await self._aside(holder, len(text), lambda: self.tokenizer.encode(
                text, add_special_tokens=special, max_tokens=most))
        except TextTooLong as error:
            raise self._beyond_context(error.least, 0, param, hint=f"It has at least so many: {error}.") from error
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
        """Raises ApiError for a prompt that exceeds the context by itself, or has ids that the model has not."""
        if not ids:
            raise bad_request(f"{param}: the prompt has no tokens", param)
        self._check_length(ids, param)
        self._check_vocabulary(ids, param)

    def _check_length(self, ids: Sequence[int], param: str) -> None:
        if len(ids) > self.longest:
            raise self._beyond_context(len(ids), 0, param)

    def _beyond_context(self, num_prompt: int, num_output: int, prompt: str, param: str = "",
                        hint: str = "") -> ContextExceeded:
        """See `ContextExceeded`."""
        if self.longest < (whole := self._engine_info().limits.max_model_len):
            cache = f"The cache holds no more of the model's {whole}: start with a larger --kv-cache-memory."
            hint = f"{hint} {cache}".strip()
        return ContextExceeded(self.longest, num_prompt, num_output, prompt, param, hint)

    def _check_vocabulary(self, ids: Sequence[int], param: str) -> None:
        vocab_size = self._engine_info().vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise bad_request(f"{param}: token ids must be between 0 and {vocab_size - 1}", param)

    def max_tokens(self, asked: int | None, longest_prompt: int, default: int | None, prompt: str = "prompt",
                   param: str = "max_tokens") -> int:
        """The most tokens to generate: the value of the field `param`, else `default` as far as it fits.

        Args:
            prompt: the field that holds the prompt.

        Raises:
            ApiError: the value can never fit the model's context, or the whole cache.
        """
        left = self.longest - longest_prompt
        if asked is None:
            asked = max(1, left if default is None else min(default, left))
        if asked > left:
            raise self._beyond_context(longest_prompt, asked, prompt, param if left > 0 else prompt)
        return asked


def _listed(prompt: Prompt) -> list[Any]:
    """The prompts of a request: a text, or a list that begins with a token id, is one."""
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
