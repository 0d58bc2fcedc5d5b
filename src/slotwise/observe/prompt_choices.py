"""Finds the choices (`n`) of each prompt, which the engine runs as requests of their own.

The requests of a response arrive in the order of its prompts, those of other responses in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from slotwise.observe.event_log import RequestEntry


@dataclass(slots=True)
class _Prompt:
    response: tuple[int, str]
    num_arrived: int = 0
    num_ended: int = 0
    longest: int = 0  # tokens


class PromptChoices:
    """The prompts with several choices that have not all ended.  Memory is bounded by the unfinished requests."""

    def __init__(self) -> None:
        self._arriving: dict[tuple[int, str], _Prompt] = {}  # by response: the prompt whose next choice is to come
        self._prompts: dict[int, _Prompt] = {}  # by the number of a request

    def arrived(self, request: RequestEntry) -> None:
        """Notes a request, in order of arrival."""
        if request.spec.params.n == 1:
            return
        response = request.timing.received_ns, request.id.rpartition("-")[0]
        prompt = self._arriving.setdefault(response, _Prompt(response))
        prompt.num_arrived += 1
        if prompt.num_arrived == request.spec.params.n:
            del self._arriving[response]
        self._prompts[request.number] = prompt

    def ended(self, request: RequestEntry, num_output: int) -> int | None:
        """Notes the end of a request.  Returns the most tokens of a choice of its prompt if it was the last to end."""
        if request.spec.params.n == 1:
            return num_output
        if (prompt := self._prompts.pop(request.number, None)) is None:
            return None
        prompt.num_ended += 1
        prompt.longest = max(prompt.longest, num_output)
        if prompt.num_ended == request.spec.params.n:
            return prompt.longest
        if prompt.num_ended == prompt.num_arrived:  # the others were refused, and never come
            self._arriving.pop(prompt.response, None)
        return None
