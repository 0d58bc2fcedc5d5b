"""A request that is ready to start, and what whole responses and streams share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from slotwise.core.params import PoolingParams, SamplingParams
from slotwise.core.request import KVTransfer
from slotwise.core.slo import SLO
from slotwise.server.choice import Choice
from slotwise.server.context import Api
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsWriter, TokenNames, TokenTexts
from slotwise.server.parsers.output_format import Parsing
from slotwise.server.protocol import Generate
from slotwise.server.request_log import RequestLog, seconds_since
from slotwise.server.served_models import ServedAdapter
from slotwise.server.shapes import Heading, Shape, drafted, usage
from slotwise.text.detokenizer import TextOffsets, detokenizer


class Repeated(NamedTuple):
    """What a response repeats of its prompts."""

    echoes: tuple[str, ...] = ()  # the text before the output of each prompt; empty: there is no echo
    offsets: tuple[list[int], ...] = ()  # where the tokens of each prompt begin in it, with log-probabilities
    prompt_text: str | None = None  # the conversation as rendered; None: it is not returned


class Job(NamedTuple):
    """A request that is ready to start."""

    request: Generate
    prompts: list[list[int]]
    params: SamplingParams
    heading: Heading
    slo: SLO
    salt: str
    received_ns: int  # monotonic: its first bytes were read
    read_ns: int  # likewise: its body was read whole
    traceparent: str  # W3C's header; empty when the caller is not traced
    repeated: Repeated = Repeated()
    is_silent: bool = False  # no output is wanted: `max_tokens` is 0
    pooling: PoolingParams | None = None  # vectors are wanted, and no tokens
    parsing: Parsing | None = None  # how outputs are parsed; None: they are text
    prediction: tuple[int, ...] = ()  # tokens that its outputs are expected to have
    adapter: ServedAdapter | None = None  # None: the base model's own outputs
    kv: KVTransfer | None = None  # how its prompt travels between engines; None: it does not

    @property
    def shape(self) -> Shape:
        return self.heading.shape

    @property
    def most_tokens(self) -> int:
        """The most tokens it may need, prompts and outputs."""
        return sum(map(len, self.prompts)) + len(self.prompts) * self.params.n * (self.params.max_tokens or 0)

    def echo(self, index: int) -> str:
        """The text before the output of choice `index`."""
        return self.repeated.echoes[self.place(index)] if self.repeated.echoes else ""

    def place(self, index: int) -> int:
        """Which of the prompts choice `index` continues."""
        return index // self.params.n


def names_of(api: Api, job: Job) -> TokenTexts:
    """What tokens are called beside their log-probabilities."""
    return TokenNames() if job.request.return_tokens_as_token_ids else api.text.prompts.tokenizer


def writer_of(api: Api, job: Job, index: int) -> LogprobsWriter | None:
    """Writes the log-probabilities of choice `index`; None where none are wanted."""
    if job.params.logprobs is None:
        return None
    names = names_of(api, job)
    if not job.shape.prompts_in_choices:
        return LogprobsWriter(ChatLogprobs(names), api.text.formatting)
    text = detokenizer(api.text.prompts.tokenizer, job.prompts[job.place(index)],
                       shows_special=job.request.skip_special_tokens is False)
    return LogprobsWriter(CompletionLogprobs(names, TextOffsets(text, len(job.echo(index))).of), api.text.formatting)


def usage_of(job: Job, choices: list[Choice]) -> dict[str, Any]:
    """The token counts of a response."""
    cached = sum(choice.num_cached for choice in choices[:: job.params.n])
    counts = usage(sum(map(len, job.prompts)), sum(choice.num_tokens for choice in choices), cached)
    return counts | (drafted([choice.drafted for choice in choices]) if job.request.prediction is not None else {})


async def explained(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> dict[str, Any]:
    """Slotwise's own fields of the response, where the request has `explain`."""
    if not job.request.explain:
        return {}
    ids = [choice.generation.request_id for choice in choices]
    return {"slotwise": await api.observers.explainer.of_response(exchange.holder, ids)}


def log_fields(
    request_log: RequestLog, job: Job, choices: Sequence[Choice], exchange: HttpExchange,
) -> dict[str, Any]:
    """What the log line of an exchange says about its generations, as far as they have come."""
    ends = Counter(choice.generation.end_reason or "unfinished" for choice in choices)
    first = min([at for choice in choices if (at := choice.generation.first_token_ns)], default=0)
    fields: dict[str, Any] = {
        "id": job.heading.response_id, "stream": bool(job.request.stream),
        "prompt_tokens": sum(map(len, job.prompts)),
        "cached_tokens": sum(choice.num_cached for choice in choices[:: job.params.n]),
        "output_tokens": sum(choice.num_tokens + choice.generation.num_unread for choice in choices),
        "finish_reasons": dict(ends), "read_s": seconds_since(exchange, job.read_ns),
        "first_token_s": seconds_since(exchange, first) if first else None}
    if job.adapter is not None:
        fields["adapter"] = job.adapter.name
    if texts := request_log.texts(job.prompts):
        fields["prompts"] = texts
    return fields
