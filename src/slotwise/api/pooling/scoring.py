"""`/rerank` and `/score`: how well texts fit a query, as the model can tell.

    head with one label      the label's number for the pair, as cross-encoders compute it: [CLS] query [SEP] text [SEP]
    embedding model          the cosine of both vectors
    any other that chats     P(yes) / (P(yes) + P(no)) as the answer to a question about the pair (Qwen3-Reranker's)

Bodies and responses are those of Jina, Cohere and vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import mul
from typing import Annotated, Any, NamedTuple

import msgspec

from slotwise.api.generate.choice import Choice
from slotwise.api.generate.context import Api
from slotwise.api.generate.generate import Job, ValidatedRequest, check, check_truncation, respond
from slotwise.api.generate.prompts import Encoding, Rendered
from slotwise.api.generate.shapes import RERANK, SCORE
from slotwise.api.http.api_errors import ApiError, ContextExceeded, bad_request, from_params, renamed
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_unknown_fields
from slotwise.api.pooling.embeddings import DOCUMENT, QUERY, pooling_of, prompted, width_of
from slotwise.api.pooling.label_reads import UNTHINKING, LabelReads, LabelTokens, rendered_question
from slotwise.api.pooling.pooled_requests import (
    TruncatedFields,
    cohere_meta,
    heading_of,
    numbers_of,
    reading,
    validated,
)
from slotwise.api.protocol.decoding import MAX_PROMPTS, decode
from slotwise.api.protocol.protocol import Generate, Length
from slotwise.api.protocol.unsupported import refuse
from slotwise.core.params import InvalidParams, PoolingSpec
from slotwise.core.scheduler_limits import SLO
from slotwise.text.conversation import Message

SEARCH_UNIT = 100  # documents, as Cohere counts them
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"  # Qwen3-Reranker's
JUDGE = ("Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
         'the answer can only be "yes" or "no".')
YES_NO = ("yes", "no")
SEAMS = 2  # tokens that a document may have more within its prompt than alone
CUT = "\N{REPLACEMENT CHARACTER}"  # each is a part of a character that was cut between its tokens
Names = Annotated[list[str], msgspec.Meta(max_length=8)]


class TextPart(msgspec.Struct):
    type: str
    text: str = ""


class TextObject(msgspec.Struct):
    """A text as an object: `text`, or parts of type `text`; other fields are not read."""

    text: str | None = None
    content: str | list[TextPart] | None = None

    def read(self, param: str) -> str:
        """The text.  Raises ApiError for other media."""
        if isinstance(self.content, list):
            if other := [part.type for part in self.content if part.type != "text"]:
                raise bad_request(f"{param}: parts of type {other[0]!r:.40} are not supported; send texts", param,
                                  "unsupported_content")
            return "\n".join([part.text for part in self.content])
        found = self.text if self.content is None else self.content
        if found is None:
            raise bad_request(f"{param}: an object needs text, or content", param)
        return found


Text = str | TextObject
Texts = Text | Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]


class ScoringFields(TruncatedFields, kw_only=True):
    """The fields of both routes."""

    use_activation: bool | None = None  # false: the number of a head with one label, as it is
    instruction: str | None = None  # of models that answer yes or no: what the query is for


class RerankRequest(ScoringFields, kw_only=True):
    query: Text  # what the documents are ranked for
    documents: Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]  # texts, or objects with one
    top_n: Length | None = None  # results that are returned, the best ones; by default all
    return_documents: bool | None = None  # results contain the texts; by default they do, but not in /v2/rerank
    max_tokens_per_doc: Length | None = None  # a document's tokens that are kept; by default as many as fit
    rank_fields: Names | None = None  # nothing but `text`
    max_chunks_per_doc: Any = None


class ScoreRequest(ScoringFields, kw_only=True):
    text_1: Texts | None = None  # one text for all of the other field, or one for each
    text_2: Texts | None = None  # a text or several
    queries: Texts | None = None  # vLLM's newer name of `text_1`
    documents: Texts | None = None  # vLLM's newer name of `text_2`, next to `queries`
    items: Texts | None = None  # the same
    data_1: Texts | None = None  # vLLM's older name of `text_1`
    data_2: Texts | None = None  # vLLM's older name of `text_2`

    def sides(self) -> tuple[str, str]:
        """The two fields that the texts are in.  Raises ApiError: they are not exactly two that belong together."""
        given = [name for name in ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2")
                 if getattr(self, name) is not None]
        for pair in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            if given == list(pair):
                return pair
        missing = next((name for name in ("text_1", "text_2") if name not in given), "text_1")
        raise bad_request("give text_1 and text_2, or queries and documents", missing)


class Pairs(NamedTuple):
    """Texts in pairs, each with the index of its place in both lists."""

    queries: Sequence[str]
    documents: Sequence[str]
    query_param: str  # the request's fields, for errors
    param: str

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of each pair, the indices of its query and its document."""
        one = len(self.queries) == 1
        return [(0 if one else index, index) for index in range(len(self.documents))]


Send = Callable[[HttpExchange, Job, list[Choice], list[float]], Awaitable[None]]
"""Sends the response with the score of each pair."""
Scores = Callable[[Sequence[Choice]], Iterable[float]]
"""The score of each pair from the vectors, one after the other."""


class _Prepared(NamedTuple):
    """A request whose fields are checked, and whose texts are not yet tokenized."""

    request: Generate
    slo: SLO
    pairs: Pairs
    cut: _Cut
    has_roles: bool  # the texts are queries and documents, each with its own prompt of an embedding checkpoint
    send: Send

    def validated(self, api: Api, prompts: list[list[int]], pooling: PoolingSpec, width: int, scores: Scores, *,
                  shares_prefix: bool = False) -> ValidatedRequest:
        """The request with its prompts.  Args: width: numbers of each vector; scores: of the vectors."""

        async def render(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice]) -> None:
            async with reading(api, exchange, choices, width):
                found: list[float] = []
                for one in scores(choices):
                    found.append(one)
                    await asyncio.sleep(0)  # a thousand pairs of long vectors would delay every stream
                await self.send(exchange, job, choices, found)

        return validated(api, self.request, self.slo, prompts, pooling, render, self.pairs.param, width=width,
                         shares_prefix=shares_prefix)


@about(body=RerankRequest)
async def rerank(api: Api, exchange: HttpExchange) -> None:
    """Documents by how well they fit a query, the best one first, in Jina's and Cohere's form."""
    await respond(api, exchange, RERANK, _rerank)


@about(body=ScoreRequest)
async def score(api: Api, exchange: HttpExchange) -> None:
    """Scores of pairs of texts, in vLLM's form."""
    await respond(api, exchange, SCORE, _score)


async def _rerank(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    asked = decode(RerankRequest, body)
    warn_of_unknown_fields(exchange, RerankRequest, body)
    refuse(asked)
    if asked.rank_fields not in (None, [], ["text"]):
        raise bad_request("rank_fields: only the field text is ranked; send documents as texts", "rank_fields",
                          "unsupported_parameter")
    documents = [_text(one, "documents") for one in asked.documents]
    pairs = Pairs([_text(asked.query, "query")], documents, "query", "documents")
    returns = asked.return_documents
    shown = documents if (exchange.scope["path"] != "/v2/rerank" if returns is None else returns) else None
    send = partial(_respond_ranked, top_n=asked.top_n or len(documents), documents=shown)
    if asked.truncate_prompt_tokens is None:
        asked.truncate_prompt_tokens = -1
    return await _scored(api, exchange, asked, pairs, send, asked.max_tokens_per_doc, has_roles=True)


async def _score(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    asked = decode(ScoreRequest, body)
    warn_of_unknown_fields(exchange, ScoreRequest, body)
    refuse(asked)
    first, second = asked.sides()
    queries, documents = _texts(getattr(asked, first), first), _texts(getattr(asked, second), second)
    if len(queries) not in (1, len(documents)):
        raise bad_request(f"{first}: {len(queries)} texts for {len(documents)} in {second}; send one text, or as many",
                          first)
    pairs = Pairs(queries, documents, first, second)
    return await _scored(api, exchange, asked, pairs, _respond_scores, has_roles=first == "queries")


def _texts(given: Texts, param: str) -> list[str]:
    return [_text(one, param) for one in (given if isinstance(given, list) else [given])]


def _text(given: Text, param: str) -> str:
    return given if isinstance(given, str) else given.read(param)


async def _scored(api: Api, exchange: HttpExchange, asked: ScoringFields, pairs: Pairs, send: Send,
                  most: int | None = None, *, has_roles: bool) -> ValidatedRequest:
    """A request for the scores of pairs, by what the model can do.

    Args:
        most: a document's tokens that are kept; None: as many as fit.
        has_roles: the texts are queries and documents.

    Raises:
        ApiError: the model can compare no texts, or a field or a text is wrong.
    """
    request, labels = asked.as_generate(), api.settings.pooling_defaults.labels
    slo = check(api, exchange, request, generates=False)
    api.limits.check_capacity(slo)
    if len(pairs.documents) + len(pairs.queries) > api.settings.max_choices:
        raise bad_request(f"{pairs.param}: at most {api.settings.max_choices} texts in one request", pairs.param)
    prepared = _Prepared(request, slo, pairs, _cut_of(api, asked, most), has_roles, send)
    if len(labels) > 1:
        raise bad_request(f"this model tells {len(labels)} labels apart and compares no texts; use /classify, or serve "
                          "an embedding model or a reranker", "model", "scores_not_supported")
    if asked.use_activation is not None and not labels:
        raise bad_request("use_activation: the model has no head with one label", "use_activation",
                          "unsupported_parameter")
    answers = not labels and _answers(api)
    if asked.instruction is not None and not answers:
        raise bad_request("instruction: only a model that answers yes or no is told what a query is for", "instruction",
                          "unsupported_parameter")
    if labels:
        return await _by_head(api, exchange, prepared, asked.use_activation)
    if answers:
        return await _by_answers(api, exchange, prepared, asked.instruction or INSTRUCTION)
    return await _by_vectors(api, exchange, prepared)


def _answers(api: Api) -> bool:
    """Whether the model is asked about each pair: it chats, and its checkpoint does not say that it makes vectors."""
    return (not api.settings.pooling_defaults.is_declared and not api.engine.client.info.generation_objection
            and api.text.prompts.has_template)


class _Cut(NamedTuple):
    """How many tokens of texts are kept."""

    longest: int  # tokens of a prompt
    is_cut: bool  # a document is cut where its prompt would have more; else it is refused
    most: int | None  # tokens of a document; None: as many as fit
    keeps_last: bool

    def encoding(self, param: str, *, is_document: bool, add_special_tokens: bool) -> Encoding:
        """How a text by itself becomes tokens."""
        most = self.most if is_document else None
        if most is None and self.is_cut:
            most = self.longest
        return Encoding(add_special_tokens, most, self.keeps_last, param)

    def document(self, ids: list[int], num_others: int, pairs: Pairs) -> list[int]:
        """What is kept of a document's tokens.

        Args:
            num_others: tokens of its prompt that are not the document's.

        Raises:
            ApiError: the others leave no place for it, or it is too long and is not to be cut.
        """
        places = self.longest - num_others
        if len(ids) > places and (places < 1 or not self.is_cut):
            raise ContextExceeded(self.longest, num_others + len(ids), 0,
                                  pairs.query_param if places < 1 else pairs.param)
        return Encoding(most=places, keeps_last=self.keeps_last).kept(ids)


def _cut_of(api: Api, asked: ScoringFields, most: int | None) -> _Cut:
    """Raises ApiError for a number of tokens out of range.  Args: most: tokens of a document; None: as many as fit."""
    longest, whole = api.text.prompts.longest, asked.truncate_prompt_tokens
    check_truncation(whole, longest)
    return _Cut(longest if whole is None or whole == -1 else whole, whole is not None, most,
                asked.truncation_side == "left")


async def _by_head(api: Api, exchange: HttpExchange, prepared: _Prepared,
                   is_activated: bool | None) -> ValidatedRequest:
    """Pairs for a head with one label."""
    pairs, cut = prepared.pairs, prepared.cut
    try:
        pooling = api.settings.pooling_defaults.classifying(is_activated=is_activated)
    except InvalidParams as error:
        raise from_params(error) from error
    marks = api.text.prompts.tokenizer.pair_marks
    with api.limits.admission_control.entering(prepared.slo):
        queries = await api.text.prompts.of_texts(pairs.queries, exchange.holder, cut.encoding(
            pairs.query_param, is_document=False, add_special_tokens=False))
        documents = await api.text.prompts.of_texts(pairs.documents, exchange.holder, cut.encoding(
            pairs.param, is_document=True, add_special_tokens=False))
    prompts = [marks.pair(queries[of], cut.document(documents[at], len(queries[of]) + marks.num_tokens, pairs))
               for of, at in pairs.places]
    return prepared.validated(api, prompts, pooling, 1, lambda choices: [
        numbers_of(choice.generation.pooled)[0] for choice in choices])


async def _by_vectors(api: Api, exchange: HttpExchange, prepared: _Prepared) -> ValidatedRequest:
    """Queries and documents for an embedding model: each text once."""
    pairs, cut, pooling = prepared.pairs, prepared.cut, pooling_of(api, normalize=True)
    prompts: list[list[int]] = []
    with api.limits.admission_control.entering(prepared.slo):
        for texts, role, param in ((pairs.queries, QUERY, pairs.query_param),
                                   (pairs.documents, DOCUMENT, pairs.param)):
            whole = prompted(api, list(texts), role if prepared.has_roles else None, param)
            encoding = cut.encoding(param, is_document=role == DOCUMENT, add_special_tokens=True)
            prompts += await api.text.prompts.of_completion(
                whole, api.settings.max_choices, exchange.holder, encoding)
    return prepared.validated(api, prompts, pooling, width_of(api, pooling), partial(_cosines, pairs=pairs))


def _cosines(choices: Sequence[Choice], pairs: Pairs) -> Iterator[float]:
    """Of each pair, the product of both vectors, which have length 1."""
    vectors = [numbers_of(choice.generation.pooled) for choice in choices]
    documents = vectors[len(pairs.queries) :]
    return (sum(map(mul, vectors[of], documents[at])) for of, at in pairs.places)


def judged(instruction: str, query: str, document: str) -> list[Message]:
    """The question about a pair, as Qwen3-Reranker was trained with it."""
    return [{"role": "system", "content": JUDGE}, {
        "role": "user", "content": f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"}]


async def _by_answers(api: Api, exchange: HttpExchange, prepared: _Prepared, instruction: str) -> ValidatedRequest:
    """Pairs as questions, answered by yes or no."""
    pairs, cut, prompts = prepared.pairs, prepared.cut, api.text.prompts
    tokens, questions = LabelTokens(api, exchange.holder), []

    async def rendered(query: str, document: str, param: str) -> Rendered:
        try:
            return await rendered_question(api, exchange, judged(instruction, query, document), UNTHINKING)
        except ApiError as error:
            raise renamed(error, {"messages": param}) from error

    async def text_of(kept: list[int]) -> str:
        text = await prompts.decode(kept, exchange.holder)
        return text.lstrip(CUT) if cut.keeps_last else text.rstrip(CUT)

    with api.limits.admission_control.entering(prepared.slo):
        documents = await prompts.of_texts(pairs.documents, exchange.holder, cut.encoding(
            pairs.param, is_document=True, add_special_tokens=False))
        alone = [await rendered(query, "", pairs.query_param) for query in pairs.queries]
        labels = await tokens.of(alone[0], YES_NO, pairs.param)
        more = SEAMS + max(map(len, labels)) - 1  # a label's last token is read behind the others
        for of, at in pairs.places:
            kept = cut.document(documents[at], len(alone[of].ids) + more, pairs)
            is_whole = len(kept) == len(documents[at]) and cut.most is None
            text = pairs.documents[at] if is_whole else await text_of(kept)
            prompt = await rendered(pairs.queries[of], text, pairs.param)
            questions.append((prompt.ids, await tokens.of(prompt, YES_NO, pairs.param)))
    reads = LabelReads(questions)
    return prepared.validated(api, reads.prompts, reads.pooling, reads.width, lambda choices: [
        reading.shares[0] for reading in reads.readings(choices)], shares_prefix=True)


# -- responses ---------------------------------------------------------------------------------------------------------


async def _respond_ranked(exchange: HttpExchange, job: Job, choices: list[Choice], scores: list[float], top_n: int,
                          documents: Sequence[str] | None) -> None:
    """The best documents; those of equal scores in their order.  Args: documents: None: they are not returned."""
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    results = [{"index": index, "relevance_score": scores[index]}
               | ({"document": {"text": documents[index]}} if documents is not None else {}) for index in ranked]
    await exchange.respond_json(heading_of(job, choices, "list") | {
        "results": results, "meta": cohere_meta(job, choices, search_units=-(-len(scores) // SEARCH_UNIT))})


async def _respond_scores(exchange: HttpExchange, job: Job, choices: list[Choice], scores: list[float]) -> None:
    await exchange.respond_json(heading_of(job, choices, "list") | {
        "data": [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]})
