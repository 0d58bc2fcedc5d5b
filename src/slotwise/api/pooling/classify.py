"""`/classify`: the probabilities of a checkpoint's labels for each text, in vLLM's form."""

from __future__ import annotations

from functools import partial
from typing import Any

from slotwise.api.generate.choice import Choice
from slotwise.api.generate.context import Api
from slotwise.api.generate.generate import Job, ValidatedRequest, respond
from slotwise.api.generate.shapes import CLASSIFICATION
from slotwise.api.http.api_errors import bad_request, from_params
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.bodies import warn_of_unknown_fields
from slotwise.api.pooling.embeddings import embedded
from slotwise.api.pooling.pooled_requests import TruncatedFields, heading_of, numbers_of, reading
from slotwise.api.protocol.decoding import decode
from slotwise.api.protocol.protocol import Prompt
from slotwise.api.protocol.unsupported import refuse
from slotwise.core.params import InvalidParams


class ClassifyRequest(TruncatedFields, kw_only=True):
    input: Prompt  # a text or its token ids; a list: several
    use_activation: bool | None = None  # false: the numbers that the head computes, before softmax or sigmoid
    add_special_tokens: bool | None = None  # by default the tokenizer's are added
    messages: Any = None


@about(body=ClassifyRequest)
async def classify(api: Api, exchange: HttpExchange) -> None:
    """Probabilities of the labels of a classifying model, for one text or several."""
    await respond(api, exchange, CLASSIFICATION, _classification)


async def _classification(api: Api, exchange: HttpExchange, body: bytes) -> ValidatedRequest:
    asked = decode(ClassifyRequest, body)
    warn_of_unknown_fields(exchange, ClassifyRequest, body)
    refuse(asked)
    defaults = api.settings.pooling_defaults
    if defaults.label_objection:
        raise bad_request(f"{defaults.label_objection}; use /v1/systemone for answers from a model that generates, or "
                          "serve a checkpoint of a ForSequenceClassification class", "model", "classes_not_supported")
    try:
        pooling = defaults.classifying(is_activated=asked.use_activation)
    except InvalidParams as error:
        raise from_params(error) from error
    return await embedded(api, exchange, asked, asked.input, pooling, partial(_respond, labels=defaults.labels),
                          width=len(defaults.labels))


async def _respond(api: Api, exchange: HttpExchange, job: Job, choices: list[Choice], labels: tuple[str, ...]) -> None:
    async with reading(api, exchange, choices, len(labels)):
        data: list[dict[str, Any]] = []
        for choice in choices:
            numbers = numbers_of(choice.generation.pooled).tolist()
            likeliest = max(range(len(numbers)), key=numbers.__getitem__)
            data.append({"index": choice.index, "label": labels[likeliest], "probs": numbers,
                         "num_classes": len(numbers)})
        await exchange.respond_json(heading_of(job, choices, "list") | {"data": data})
