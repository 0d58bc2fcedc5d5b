"""How probable given answers are: the log-probabilities of labels as the beginning of a reply.

A label is one token after most prompts.  One of several tokens is read token by token, each after those before it:

    labels `yes`, `no` of the tokens [y, es] and [no]

    prompt        ─► log P(y), log P(no)
    prompt, y     ─► log P(es)                 log P(yes) = log P(y) + log P(es)

So every read is a prompt whose answer is a vector of log-probabilities (`PoolingSpec`, the task `labels`), and all of
them are computed like other prompts.  They share what they begin with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import Any, NamedTuple

from slotwise.api.generate.choice import Choice
from slotwise.api.generate.context import Api
from slotwise.api.generate.prompts import RENDERED, Conversation, Rendered
from slotwise.api.http.api_errors import bad_request
from slotwise.api.http.http_exchange import HttpExchange
from slotwise.api.pooling.pooled_requests import numbers_of
from slotwise.core.params import LABELS, PoolingSpec
from slotwise.text.conversation import Message

ENDS = (8, 64)  # tokens at the end of a prompt after which labels are tokenized; if neither will do, the whole prompt
UNTHINKING = {"add_generation_prompt": True, "enable_thinking": False, "thinking": False}  # variables of templates
NEWLINE, NOT_TOKENIZED = "\n", "label_not_tokenized"

Label = tuple[int, ...]


class Reading(NamedTuple):
    """What a model thinks of the labels of one question."""

    logprobs: tuple[float, ...]  # of each label, among all replies
    is_likeliest: bool  # the most probable token begins a label

    @property
    def mass(self) -> float:
        """The probability that the reply begins with one of the labels."""
        return sum(map(exp, self.logprobs))

    @property
    def shares(self) -> list[float]:
        """The probability of each label among the labels."""
        most = max(self.logprobs)
        weights = [exp(logprob - most) for logprob in self.logprobs]
        return [weight / sum(weights) for weight in weights]


class LabelReads:
    """The reads of several questions, which are one request's prompts.

    Args:
        questions: of each, its prompt and its labels.
    """

    def __init__(self, questions: Sequence[tuple[list[int], Sequence[Label]]]) -> None:
        self.prompts: list[list[int]] = []
        self._questions: list[tuple[Sequence[Label], dict[Label, int]]] = []
        for prompt, labels in questions:
            begun = dict.fromkeys(label[:size] for label in labels for size in range(len(label)))
            self._questions.append((labels, {prefix: len(self.prompts) + at for at, prefix in enumerate(begun)}))
            self.prompts += [[*prompt, *prefix] for prefix in begun]
        tokens = dict.fromkeys(token for labels, _ in self._questions for label in labels for token in label)
        self._columns = {token: column for column, token in enumerate(tokens)}

    @property
    def pooling(self) -> PoolingSpec:
        """What is computed of each prompt."""
        return PoolingSpec(task=LABELS, label_ids=tuple(self._columns))

    @property
    def width(self) -> int:
        """Numbers of each vector: a log-probability for each token of a label, and that of the likeliest token."""
        return len(self._columns) + 1

    def readings(self, choices: Sequence[Choice]) -> list[Reading]:
        """What the vectors say of each question."""
        vectors = [numbers_of(choice.generation.pooled) for choice in choices]
        found = []
        for labels, reads in self._questions:
            logprobs = [sum(vectors[reads[label[:at]]][self._columns[token]] for at, token in enumerate(label))
                        for label in labels]
            first = vectors[reads[()]]
            begins = max(first[self._columns[label[0]]] for label in labels)
            found.append(Reading(tuple(logprobs), begins >= first[-1]))
        return found


async def rendered_question(api: Api, exchange: HttpExchange, messages: list[Message],
                            variables: Mapping[str, Any]) -> Rendered:
    """Messages as a prompt whose reply begins with the answer.

    Raises:
        ApiError: the model has no chat template, it refuses the messages, or they are too long.
    """
    prompts = api.text.prompts
    rendered = await prompts.of_chat(Conversation(messages, dict(variables)), exchange.holder)
    if not (start := api.text.output_format.answer_start(rendered.text)):
        return rendered
    text = rendered.text + start
    (ids,) = await prompts.of_texts([text], exchange.holder, RENDERED)
    prompts.check(ids, "messages")
    return Rendered(text, ids)


class LabelTokens:
    """The tokens of labels behind prompts, of one request, whose prompts mostly end alike."""

    def __init__(self, api: Api, holder: str) -> None:
        self._prompts = api.text.prompts
        self._holder = holder
        self._known: dict[tuple[tuple[int, ...], str], Label] = {}

    async def of(self, rendered: Rendered, labels: Sequence[str], param: str) -> list[Label]:
        """The tokens of each label as the beginning of the reply to a prompt.

        Where the tokenizer would merge a label with the prompt's end, its tokens are those at the beginning of a line.

        Args:
            rendered: the prompt, tokenized without special tokens that are not in its text.
            param: the request's field, for errors.

        Raises:
            ApiError: the tokenizer has no tokens for a label, or does not tell two labels apart.
        """
        key = tuple(rendered.ids[-ENDS[0] :])
        missing = [label for label in labels if (key, label) not in self._known]
        if missing:
            text, ids = await self._end(rendered)
            for label in missing:
                found = await self._behind(text, ids, label) or await self._behind(
                    NEWLINE, await self._encoded(NEWLINE), label)
                if not found:
                    raise bad_request(f"{param}: the model's tokenizer has no tokens for the label {label!r}", param,
                                      NOT_TOKENIZED)
                self._known[key, label] = found
        tokens = [self._known[key, label] for label in labels]
        if len(set(tokens)) < len(tokens):
            raise bad_request(f"{param}: the model's tokenizer does not tell the labels {', '.join(labels)} apart",
                              param, NOT_TOKENIZED)
        return tokens

    async def _behind(self, text: str, ids: list[int], label: str) -> Label:
        """The tokens that `label` adds to those of `text`; () if it changes them, too."""
        whole = await self._encoded(text + label)
        return tuple(whole[len(ids) :]) if whole[: len(ids)] == ids else ()

    async def _end(self, rendered: Rendered) -> tuple[str, list[int]]:
        """The end of a prompt that is tokenized alone as within it."""
        for size in ENDS:
            if size < len(rendered.ids):
                ids = rendered.ids[-size:]
                text = await self._prompts.decode(ids, self._holder)
                if await self._encoded(text) == ids:
                    return text, ids
        return rendered.text, rendered.ids

    async def _encoded(self, text: str) -> list[int]:
        return await self._prompts.plain(text, self._holder, add_special_tokens=False)
