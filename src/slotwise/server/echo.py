"""Log-probabilities of prompts before those of outputs, where a completion has `echo` and `logprobs`.

They are the engine's prompt log-probabilities, which the first choice of each prompt receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from slotwise.server.choice import Choice, Delta
from slotwise.server.context import Api
from slotwise.server.job import Job, names_of
from slotwise.server.logprobs import CompletionLogprobs, LogprobsWriter


async def put_prompts(api: Api, job: Job, choices: Sequence[Choice], writers: Sequence[LogprobsWriter | None]) -> None:
    """Place the entries of each prompt before those of its choices, which have ended."""
    names, num_choices = names_of(api, job), job.params.n
    for number, prompt in enumerate(job.prompts):
        first = number * num_choices
        formatted = CompletionLogprobs(names, partial(_next, iter(job.repeated.offsets[number])))
        entries = choices[first].generation.prompt_logprobs
        of_prompt = LogprobsWriter(formatted, api.text.formatting)
        of_prompt.put(formatted.of_first(prompt[0]))
        await of_prompt.add(Delta("", prompt[1 : 1 + len(entries)], entries, None))
        lists = of_prompt.pop_lists()
        for writer in writers[first : first + num_choices]:
            if writer is not None:
                writer.put_first(lists)
        if job.request.prompt_logprobs is None:
            entries.clear()  # JSON takes half of the memory


def _next(offsets: Iterator[int], tokens: Sequence[int]) -> list[int]:
    return list(islice(offsets, len(tokens)))
