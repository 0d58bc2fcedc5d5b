"""What answers a chat in the terminal: a model in this process, or a server with OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from slotwise.api.parsers.base_parser import Content, Part, Reasoning
from slotwise.api.parsers.parser_table import UNPARSED, OutputFormat, output_format
from slotwise.cli.remote import Server
from slotwise.errors import printable

if TYPE_CHECKING:
    from slotwise.offline.llm import LLM
    from slotwise.offline.sampling_params import SamplingParams

Message = Mapping[str, str]
SHORTEST = 0.02  # seconds in which tokens must have come for a rate
PROMPT_END = 64  # tokens in which a template says whether an answer begins within reasoning


@dataclass
class Usage:
    """What an answer took, as far as it is known; None: it is not."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt: found in the prefix cache
    output_tokens: int | None = None
    first_token: float | None = None  # seconds until it came
    rest: float = 0.0  # seconds in which the other tokens came
    finish_reason: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None where they came at once."""
        if self.output_tokens is None or self.rest < SHORTEST:
            return None
        return (self.output_tokens - 1) / self.rest


class ChatModel(Protocol):
    """Answers conversations, one at a time."""

    name: str
    where: str  # it runs, in a few words
    context: int  # tokens of a conversation; 0: not known
    may_be_interrupted: bool  # an exception from a signal may end `stream` anywhere

    def check(self) -> None:
        """Raises ValueError, ServerError where it cannot chat."""
        ...

    def stream(self, messages: Sequence[Message], usage: Usage) -> Generator[Sequence[Part]]:
        """Yields an answer's parts as they come, also () where nothing has come for a while.

        Args:
            usage: is filled meanwhile.

        Raises:
            ValueError, ServerError: the conversation cannot be answered, such as one that is too long.
        """
        ...


class LocalModel:
    """A model in this process."""

    may_be_interrupted = False  # the engine's step must come to its end

    def __init__(self, llm: LLM, params: SamplingParams, name: str) -> None:
        self._llm, self._params, self.name = llm, params, name
        info = llm.info
        self.context = info.limits.max_model_len
        weights = info.dtype if info.quantization == "none" else f"{info.quantization}, {info.dtype}"
        self.where = f"in this process, on the {info.device.upper()} ({weights})"

    def check(self) -> None:
        self._llm.template([{"role": "user", "content": "Hello"}])

    def stream(self, messages: Sequence[Message], usage: Usage) -> Generator[Sequence[Part]]:
        prompt = self._llm.template(messages)
        form = self._output_format()
        markers, params = form.markers(None), self._params
        if markers.spellings:
            params = replace(params, skip_special_tokens=False)
        parser = form.parser(None, form.has_begun(
            self._llm.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)))
        read, shown = 0, 0
        usage.prompt_tokens = len(prompt)
        with closing(self._llm.stream_outputs(prompt, params)) as outputs:
            for output in outputs:
                (completion,) = output.outputs
                metrics = output.metrics
                usage.cached_tokens, usage.output_tokens = output.num_cached_tokens, metrics.num_generation_tokens
                usage.finish_reason = completion.finish_reason or ""
                if metrics.first_token_ts:
                    usage.first_token = metrics.first_token_latency
                    usage.rest = metrics.last_token_ts - metrics.first_token_ts
                shown, read = read, len(completion.text)
                yield parser.feed(markers.of(completion.text[shown:]))
        yield parser.end()

    def _output_format(self) -> OutputFormat:
        """Returns how reasoning is told from the answer."""
        template = self._llm.get_tokenizer().chat_template or ""
        try:
            return output_format("", "", False, template, self._llm.tokenizer.special_by_text)
        except ValueError:  # a tokenizer without the special tokens that the template writes
            return UNPARSED


class RemoteModel:
    """A model of a server.

    Args:
        model: its name there; "" for the server's first.
        params: fields of each request.

    Raises:
        ServerError: the server cannot be reached, or lists no model.
    """

    may_be_interrupted = True

    def __init__(self, server: Server, model: str, params: Mapping[str, Any]) -> None:
        card: Mapping[str, Any] = {} if model else server.first_model()
        self._server, self._params = server, params
        self._model = model or str(card["id"])
        self.name, self.where = printable(self._model), f"at {server.url}"
        length = card.get("max_model_len")
        self.context = length if isinstance(length, int) and length > 0 else 0

    def check(self) -> None:
        """Nothing to check: a server says what it cannot do when it is asked."""

    def stream(self, messages: Sequence[Message], usage: Usage) -> Generator[Sequence[Part]]:
        began, first = time.monotonic(), 0.0
        body = {"model": self._model, "messages": list(messages), "stream_options": {"include_usage": True},
                **self._params}
        with closing(self._server.stream("/chat/completions", body)) as events:
            for event in events:
                now = time.monotonic()
                if parts := list(_parts(event, usage)):
                    first = first or now
                    usage.first_token, usage.rest = first - began, now - first
                _count(event, usage)
                yield parts


def _parts(event: Mapping[str, Any], usage: Usage) -> Iterator[Part]:
    """Yields the text in an event."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        for name, kind in (("reasoning_content", Reasoning), ("reasoning", Reasoning), ("content", Content)):
            if isinstance(text := delta.get(name), str) and text:
                yield kind(text)
        usage.finish_reason = choice.get("finish_reason") or usage.finish_reason


def _count(event: Mapping[str, Any], usage: Usage) -> None:
    """Takes the numbers of tokens over from an event that has them."""
    if isinstance(told := event.get("usage"), dict):
        details = told.get("prompt_tokens_details") or {}
        usage.prompt_tokens, usage.output_tokens = told.get("prompt_tokens"), told.get("completion_tokens")
        usage.cached_tokens = details.get("cached_tokens")
