"""Log-probabilities in OpenAI's two shapes.  One object serves one choice.

A token has up to 21 entries, and formatting one takes a microsecond or two: `LogprobsWriter` formats long chunks in
slices, one per pass of the event loop for all choices together, and keeps JSON, which is smaller than Python's objects.

Those of a prompt are a list as long as the prompt, as vLLM has them: null for the first token, then an object for each,
from token ids to `logprob`, `rank` and `decoded_token`.  Those of a completion are in each of its choices, those of a
chat in the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from itertools import count
from math import isfinite
from typing import Any, Protocol

import msgspec

from slotwise.api.generate.choice import Choice, Delta
from slotwise.api.generate.shapes import Shape, add_field
from slotwise.api.http.api_errors import ApiError, bad_request
from slotwise.core.params import SamplingSpec
from slotwise.core.record import TokenLogprobs
from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no infinity; vLLM writes this for an impossible token
MAX_ENTRIES = 2_000_000  # of one request: about 150 MB of JSON
MAX_HELD = 2 * MAX_ENTRIES  # of the prompts of all requests: some 600 MB until their responses are read
SLICE = 512  # entries formatted in one pass of the event loop: about a millisecond
FEW = 2  # tokens formatted at once: what a stream has at each step

_to_json = msgspec.json.Encoder().encode


def check_entries(num_choices: int, params: SamplingSpec, num_prompt: int) -> None:
    """Raises ApiError for a response that might have more than MAX_ENTRIES log-probabilities.

    Args:
        num_prompt: tokens of all its prompts.
    """
    if params.prompt_logprobs is not None:
        per_token = params.prompt_logprobs + 1
        if (entries := num_prompt_entries(params, num_prompt)) > MAX_ENTRIES:
            raise bad_request(
                f"prompt_logprobs: {params.n} choices with {per_token} log-probabilities of each of {num_prompt} tokens"
                f" are {entries}, more than {MAX_ENTRIES}; send a shorter prompt, or set a smaller number or n",
                "prompt_logprobs")
    if params.logprobs is None:
        return
    per_token, max_tokens = params.logprobs + 1, params.max_tokens or 0
    if (entries := num_choices * max_tokens * per_token) > MAX_ENTRIES:
        raise bad_request(
            f"logprobs: {num_choices} choices of up to {max_tokens} tokens with {per_token} log-probabilities each are "
            f"{entries}, more than {MAX_ENTRIES}; set a smaller max_tokens, n or number of log-probabilities",
            "logprobs")


def num_prompt_entries(params: SamplingSpec, num_prompt: int) -> int:
    """The log-probabilities of prompts of `num_prompt` tokens in a response: every choice has them."""
    return 0 if params.prompt_logprobs is None else num_prompt * params.n * (params.prompt_logprobs + 1)


@contextmanager
def held(capacity: TenantCapacity, holder: str, num_entries: int) -> Iterator[None]:
    """Count log-probabilities while their response is computed, formatted and sent.

    Raises:
        ApiError: there are too many.
    """
    if num_entries and (objection := capacity.objection(holder, num_entries)):
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"prompt_logprobs: {objection}", code="logprobs_full",
                       retry_after=1)
    capacity.acquire(holder, num_entries)
    try:
        yield
    finally:
        capacity.release(holder, num_entries)


def most_tokens(num_choices: int, logprobs: int | None) -> int | None:
    """The largest `max_tokens` that `check_entries` accepts, 1 at least; None: any."""
    return None if logprobs is None else max(1, MAX_ENTRIES // (num_choices * (logprobs + 1)))


class TokenTexts(Protocol):
    """What tokens are called next to their log-probabilities: a tokenizer, or `TokenNames`."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class TokenNames:
    """Names of tokens by their ids, as vLLM writes them: a token need not be valid text."""

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


class LogprobFormat(Protocol):
    def of(self, delta: Delta) -> dict[str, Any]: ...


class CompletionLogprobs:
    """`/v1/completions`: parallel lists.

    Args:
        offsets: of the tokens that come, in the text as it is returned.
    """

    def __init__(self, names: TokenTexts, offsets: Callable[[Sequence[int]], list[int]]) -> None:
        self._names = names
        self._offsets = offsets

    def of(self, delta: Delta) -> dict[str, Any]:
        texts = [self._names.token_text(token) for token in delta.token_ids]
        return {
            "text_offset": self._offsets(delta.token_ids),
            "tokens": texts,
            "token_logprobs": [finite(entry.logprob) for entry in delta.logprobs],
            "top_logprobs": [self._top(text, entry) for text, entry in zip(texts, delta.logprobs, strict=False)],
        }

    def of_first(self, token: int) -> dict[str, Any]:
        """The entries of the first token of a prompt, which has no log-probability."""
        text = self._names.token_text(token)
        return {"text_offset": self._offsets((token,)), "tokens": [text], "token_logprobs": [None],
                "top_logprobs": [None]}

    def _top(self, sampled: str, entry: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens and the sampled one; of tokens with equal text, the most probable."""
        top: dict[str, float] = {}
        for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            top.setdefault(self._names.token_text(token), finite(logprob))
        top.setdefault(sampled, finite(entry.logprob))
        return top


class ChatLogprobs:
    """`/v1/chat/completions`: an object for each token, with its bytes."""

    def __init__(self, names: TokenTexts) -> None:
        self._names = names

    def of(self, delta: Delta) -> dict[str, Any]:
        content = []
        for token, entry in zip(delta.token_ids, delta.logprobs, strict=False):
            top = zip(entry.top_ids, entry.top_logprobs, strict=True)
            content.append(self._token(token, entry.logprob) | {"top_logprobs": [self._token(*one) for one in top]})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._names.token_bytes(token)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else LEAST


class LogprobsWriter:
    """One choice's log-probabilities as JSON.

    Args:
        turn: held while a long chunk is formatted, so that concurrent choices do not add up to one long pause.
    """

    def __init__(self, logprobs: LogprobFormat, turn: asyncio.Lock) -> None:
        self._format = logprobs
        self._turn = turn
        self._empty = logprobs.of(Delta("", (), (), None))
        self._lists: dict[str, list[bytes]] = {}

    async def add(self, delta: Delta) -> None:
        """Format the entries of a delta's tokens."""
        token_ids, entries = delta.token_ids, delta.logprobs
        if len(token_ids) <= FEW:
            self._add(delta)
            return
        size = max(1, SLICE // (1 + max((len(entry.top_ids) for entry in entries), default=0)))
        async with self._turn:
            for start in range(0, len(token_ids), size):
                end = start + size
                self._add(Delta("", token_ids[start:end], entries[start:end], None))
                await asyncio.sleep(0)

    def _add(self, delta: Delta) -> None:
        if delta.token_ids:
            self.put(self._format.of(delta))

    def put(self, values: dict[str, Any]) -> None:
        """Append entries that are formatted, but not yet JSON."""
        for name, value in values.items():
            if isinstance(value, list) and value:
                self._lists.setdefault(name, []).append(_to_json(value)[1:-1])

    def put_first(self, lists: dict[str, list[bytes]]) -> None:
        """Place what another writer has made before all entries."""
        self._lists = {name: [*lists.get(name, ()), *self._lists.get(name, ())] for name in lists | self._lists}

    def pop_lists(self) -> dict[str, list[bytes]]:
        """The entries added since the last call: for each list, parts of its JSON without brackets."""
        lists, self._lists = self._lists, {}
        return lists

    def pop(self) -> list[bytes]:
        """The JSON object of what was added since the last call, in parts."""
        lists = self.pop_lists()
        parts: list[bytes] = []
        for name, value in self._empty.items():
            parts.append((b"," if parts else b"{") + _to_json(name) + b":")
            if not isinstance(value, list):
                parts.append(_to_json(value))
                continue
            for i, items in enumerate(lists.get(name, ())):
                parts += (b"," if i else b"[", items)
            parts.append(b"]" if name in lists else b"[]")
        return [*parts, b"}"]


# -- log-probabilities of prompts --------------------------------------------------------------------------------------


class PromptFormat:
    """The log-probabilities of a prompt as JSON.

    Args:
        turn: held while a prompt is formatted, a slice in each pass of the event loop.
    """

    def __init__(self, tokenizer: Tokenizer, turn: asyncio.Lock) -> None:
        self._tokenizer = tokenizer
        self._turn = turn

    async def parts(self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]) -> list[bytes]:
        """The JSON in parts.

        Args:
            entries: of the tokens from the second on; fewer where the generation ended before its prompt was computed.
        """
        size = max(1, SLICE // (1 + max((len(entry.top_ids) for entry in entries), default=0)))
        parts = [b"[null"]
        async with self._turn:
            for start in range(0, len(entries), size):
                some = zip(prompt[start + 1 : start + 1 + size], entries[start : start + size], strict=False)
                parts.append(b"," + _to_json([self._by_token(token, entry) for token, entry in some])[1:-1])
                await asyncio.sleep(0)
        return [*parts, b",null" * (len(prompt) - 1 - len(entries)), b"]"]

    def _by_token(self, token: int, entry: TokenLogprobs) -> dict[int, dict[str, Any]]:
        """The prompt's own token first, then the most probable ones; rank 1 is the most probable."""
        ranked = [(token, entry.logprob, entry.rank), *zip(entry.top_ids, entry.top_logprobs, count(1), strict=False)]
        return {
            one: {"logprob": finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(one)}
            for one, logprob, rank in ranked}


async def with_prompts(
    shape: Shape, prompts: Sequence[Sequence[int]], choices: Sequence[Choice], answers: list[list[bytes]],
    prompt_format: PromptFormat,
) -> list[bytes]:
    """Adds the log-probabilities of `prompts` to the `answers` of their choices, or returns a field of the response.

    The first choice of each prompt has received them.
    """
    num_choices = len(choices) // len(prompts)  # of each prompt
    for number, prompt in enumerate(prompts):
        first = number * num_choices
        parts = await prompt_format.parts(prompt, choices[first].generation.prompt_logprobs)
        choices[first].generation.prompt_logprobs.clear()  # JSON takes half of the memory
        if not shape.prompts_in_choices:
            return [b',"prompt_logprobs":', *parts]
        for answer in answers[first : first + num_choices]:
            add_field(answer, b"prompt_logprobs", parts)
    return []
