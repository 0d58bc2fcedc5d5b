"""Log-probabilities of prompts before those of outputs, where a completion has `echo` and `logprobs`.

They are the engine's prompt log-probabilities, which the first choice of each prompt receives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slotwise.server.choice import Choice, Delta
from slotwise.server.context import Api
from slotwise.server.job import Job, names_of
from slotwise.server.logprobs import CompletionLogprobs, LogprobsWriter, TokenTexts

SLICE = 4096  # tokens named in one pass of the event loop: about a millisecond


async def offsets(api: Api, job: Job) -> list[int]:
    """Of each prompt, the characters that its tokens have in the lists of log-probabilities."""
    if not job.echoes_logprobs:
        return [0] * len(job.prompts)
    names = names_of(api, job)
    return [await _length(names, prompt) for prompt in job.prompts]


async def _length(names: TokenTexts, prompt: Sequence[int]) -> int:
    length = 0
    for start in range(0, len(prompt), SLICE):
        length += sum([len(names.token_text(token)) for token in prompt[start : start + SLICE]])
        await asyncio.sleep(0)
    return length


async def put_prompts(api: Api, job: Job, choices: Sequence[Choice], writers: Sequence[LogprobsWriter | None]) -> None:
    """Place the entries of each prompt before those of its choices, which have ended."""
    names, num_choices = names_of(api, job), job.params.n
    for number, prompt in enumerate(job.prompts):
        first = number * num_choices
        formatted = CompletionLogprobs(names)
        entries = choices[first].generation.prompt_logprobs
        of_prompt = LogprobsWriter(formatted, api.formatting)
        of_prompt.put(formatted.of_first(prompt[0]))
        await of_prompt.add(Delta("", prompt[1 : 1 + len(entries)], entries, None))
        lists = of_prompt.pop_lists()
        for writer in writers[first : first + num_choices]:
            if writer is not None:
                writer.put_first(lists)
        if job.request.prompt_logprobs is None:
            entries.clear()  # JSON takes half of the memory
