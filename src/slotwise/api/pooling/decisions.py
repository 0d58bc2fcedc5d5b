"""`/v1/systemone`: typed questions about a state, each answered with the probabilities of its options.

    state, question, options with labels ─► the chat template ─► P(label) as the first of the reply, of every label

Fields, prompts, labels and answers are those of vLLM 0.32; llama.cpp's server has the same route.  The questions of a
request begin with the state, which is computed once: the first question is computed alone, and the others find its
blocks in the prefix cache.  On a CPU the probabilities have the same bits in any company.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from slotwise.api.generate.choice import Choice
from slotwise.api.generate.context import Api
from slotwise.api.generate.generate import Job, ValidatedRequest, check, respond, usage_of
from slotwise.api.generate.prompts import Encoding, Rendered
from slotwise.api.generate.shapes import DECISION
from slotwise.api.http.api_errors import ApiError, bad_request, renamed
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_ignored, warn_of_unknown_fields
from slotwise.api.pooling.label_reads import UNTHINKING, LabelReads, LabelTokens, Reading, rendered_question
from slotwise.api.pooling.pooled_requests import PooledFields, reading, validated
from slotwise.api.protocol.decoding import decode
from slotwise.api.protocol.protocol import SWITCHES
from slotwise.api.protocol.unsupported import refuse
from slotwise.text.conversation import RESERVED_VARIABLES

CHOICE, NOUL, SCORE = "choice", "noul", "score"
MAX_QUESTIONS = 64
YES_NO = ("yes", "no")
LETTERS, DIGITS = tuple(string.ascii_uppercase), tuple(string.digits)
ENDINGS = {CHOICE: "Answer with the letter of one option only.", NOUL: "Answer with yes or no only.",
           SCORE: "Answer with the number of one level only."}
BARE_END = "\nAnswer:"  # of a prompt for a model without a chat template


class QuestionFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A question."""

    type: Literal["choice", "noul", "score"]
    instructions: Any = None
    criteria: Any = None


Questions = Annotated[dict[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], QuestionFields],
                      msgspec.Meta(min_length=1, max_length=MAX_QUESTIONS)]


class DecisionRequest(PooledFields, kw_only=True):
    state: str | dict[str, Any] | list[Any]  # what is asked about: a text, or JSON, which is read as text
    questions: Questions  # by id, in the order of the answers: `type`, `instructions`, and `criteria`, its options
    instructions: str | None = None  # a system message before the state
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the template
    files: Any = None
    images: Any = None
    audio: Any = None
    videos: Any = None
    decision_template: Any = None
    seed: Any = None


class Question(NamedTuple):
    """A question as the model reads it, and what its answer is made of."""

    name: str
    kind: str
    text: str
    options: tuple[str, ...]  # names of options, or of levels
    labels: tuple[str, ...]  # of each option, the reply that chooses it

    def answer(self, reading: Reading) -> dict[str, Any]:
        """The answer from the probabilities of `labels`."""
        probabilities = reading.shares
        likeliest = max(range(len(probabilities)), key=probabilities.__getitem__)
        told: dict[str, Any] = {"type": self.kind}
        match self.kind:
            case "choice":
                told |= {"choice": self.options[likeliest],
                         "probabilities": dict(zip(self.options, probabilities, strict=True))}
            case "noul":
                told |= {"noul": probabilities[0], "probabilities": dict(zip(YES_NO, probabilities, strict=True))}
            case _:
                told |= {"score": sum(level * share for level, share in enumerate(probabilities)),
                         "legend": {str(level): name for level, name in enumerate(self.options)},
                         "probabilities": {str(level): share for level, share in enumerate(probabilities)}}
        return told | {"confidence": probabilities[likeliest] * min(1.0, reading.mass)}


@about(body=DecisionRequest)
async def systemone(api: Api, exchange: HttpExchange) -> None:
    """Answers to typed questions about a state: the probability of every option."""
    await respond(api, exchange, DECISION, _decision)


async def _decision(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    asked = decode(DecisionRequest, body)
    warn_of_unknown_fields(exchange, DecisionRequest, body)
    refuse(asked)
    request = asked.as_generate()
    slo = check(api, exchange, request)
    questions = [_question(name, fields) for name, fields in asked.questions.items()]
    variables = await _variables(api, exchange, asked)
    state = text_of(asked.state)
    api.limits.check_capacity(slo)
    tokens, read = LabelTokens(api, exchange.holder), []
    with api.limits.admission_control.entering(slo):
        for question in questions:
            rendered = await _rendered(api, exchange, f"{state}\n\n{question.text}", asked.instructions, variables)
            labels = list(question.labels)
            if not api.text.prompts.has_template:
                labels = [f" {label}" for label in labels]
            read.append((rendered.ids, await tokens.of(rendered, labels, f"questions.{question.name}")))
    reads = LabelReads(read)
    return validated(api, request, slo, reads.prompts, reads.pooling,
                     partial(_respond, questions=questions, reads=reads), "state", width=reads.width,
                     shares_prefix=True)


def text_of(value: Any) -> str:
    """A text, or JSON as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _question(name: str, fields: QuestionFields) -> Question:
    """Raises ApiError for criteria of another type of question."""
    where = f"questions.{name:.60}"
    lines = [f"Question: {text_of(fields.instructions)}"] if fields.instructions not in (None, "") else []
    options: dict[str, Any]
    labels: tuple[str, ...]
    match fields.type:
        case "choice":
            options = _options(fields.criteria, where)
            labels = LETTERS
            lines += [f"{label}: {option}" + (f" - {text_of(told)}" if told else "")
                      for label, (option, told) in zip(LETTERS, options.items(), strict=False)]
        case "noul":
            criteria = {} if fields.criteria is None else fields.criteria
            if not isinstance(criteria, dict) or not criteria.keys() <= {"true", "false"}:
                raise bad_request(f"{where}.criteria: must be null, or an object with true and false", "questions")
            options = {"yes": criteria.get("true"), "no": criteria.get("false")}
            labels = YES_NO
            lines += [f"{label}: {text_of(told)}" if told else label for label, told in options.items()]
        case _:
            levels = fields.criteria
            if not isinstance(levels, list) or not 2 <= len(levels) <= len(DIGITS):
                raise bad_request(f"{where}.criteria: must be a list of 2 to {len(DIGITS)} levels, the lowest first",
                                  "questions")
            names = [text_of(level) for level in levels]
            if len(options := dict.fromkeys(names)) < len(names):
                raise bad_request(f"{where}.criteria: two levels have the same name", "questions")
            labels = DIGITS
            lines += [f"{label}: {name}" for label, name in zip(DIGITS, names, strict=False)]
    return Question(name, fields.type, "\n".join([*lines, ENDINGS[fields.type]]), tuple(options),
                    labels[: len(options)])


def _options(criteria: Any, where: str) -> dict[str, Any]:
    if not isinstance(criteria, dict) or not 1 <= len(criteria) <= len(LETTERS):
        raise bad_request(f"{where}.criteria: must be an object of 1 to {len(LETTERS)} options, each with a "
                          "description or null", "questions")
    return criteria


async def _variables(api: Api, exchange: HttpExchange, asked: DecisionRequest) -> dict[str, Any]:
    """The variables of the template.  Raises ApiError for one that would begin the reply with reasoning."""
    given = asked.chat_template_kwargs or {}
    if not given.keys().isdisjoint(RESERVED_VARIABLES):
        raise bad_request("chat_template_kwargs: names a variable that the request sets", "chat_template_kwargs")
    if any(given.get(name) for name in SWITCHES):
        raise bad_request("chat_template_kwargs: an answer is read from the first of the reply, so the model cannot "
                          "think before it", "chat_template_kwargs")
    if given:
        known = await api.text.prompts.template_variables(None, exchange.holder)
        warn_of_ignored(exchange, [f"chat_template_kwargs.{name}" for name in given if name not in known])
    return UNTHINKING | given


async def _rendered(api: Api, exchange: HttpExchange, text: str, instructions: str | None,
                    variables: Mapping[str, Any]) -> Rendered:
    """The prompt of a question; a model without a chat template continues plain text."""
    prompts = api.text.prompts
    if not prompts.has_template:
        whole = "\n\n".join(filter(None, (instructions, text))) + BARE_END
        (ids,) = await prompts.of_completion(whole, 1, exchange.holder, Encoding(param="state"))
        return Rendered(whole, ids)
    system = [{"role": "system", "content": instructions}] if instructions else []
    try:
        return await rendered_question(api, exchange, [*system, {"role": "user", "content": text}], variables)
    except ApiError as error:
        raise renamed(error, {"messages": "state"}) from error


async def _respond(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice], questions: Sequence[Question],
                   reads: LabelReads) -> None:
    async with reading(api, exchange, choices, reads.width):
        readings = reads.readings(choices)
        answers = {one.name: one.answer(found) for one, found in zip(questions, readings, strict=True)}
        diagnostics = {one.name: {"label_mass": min(1.0, found.mass), "argmax_is_label": found.is_likeliest}
                       for one, found in zip(questions, readings, strict=True)}
        used = usage_of(job, choices)
        await exchange.respond_json({
            "id": job.heading.response_id, "object": "structured_decision", "created": job.heading.created,
            "model": job.heading.model, "answers": answers, "diagnostics": diagnostics,
            "usage": {"input_tokens": used["prompt_tokens"], "output_tokens": 0,
                      "total_tokens": used["total_tokens"],
                      "input_tokens_details": used["prompt_tokens_details"]}})
