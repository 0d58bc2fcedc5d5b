"""Log-probabilities of prompts in responses, as vLLM has them.

A list as long as the prompt: null for the first token, then an object for each, from token ids to `logprob`, `rank` and
`decoded_token`.  Those of a completion are in each of its choices, those of a chat in the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec

from slotwise.core.step import TokenLogprobs
from slotwise.server.choice import Choice
from slotwise.server.logprobs import SLICE, finite
from slotwise.server.shapes import Shape, add_field
from slotwise.text.tokenizer import Tokenizer

_to_json = msgspec.json.Encoder().encode


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
