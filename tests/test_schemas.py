"""Every output under a schema validates, or begins one that does: a public suite, random schemas, pydantic models.

With drafts the outputs are the same: masks behind drafts are those of a step without them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pydantic
import pytest

from slotwise import LLM, RequestOutput, SamplingParams, StructuredOutputsParams, grammar_compiler
from slotwise.core.interfaces import DraftRow, Due, Proposal
from slotwise.core.record import Proposing
from slotwise.core.request import Request
from slotwise.core.step_time import Work
from slotwise.text.structured_output import json_schema

SUITE = json.loads(Path(__file__).with_name("schemas").joinpath("json_schema_test_suite.json").read_text())["schemas"]
PROMPT = "def to_json(self):\n    return "

pytestmark = pytest.mark.slow


class Level(Enum):
    LOW, HIGH = "low", "high"


class Point(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    x: int = pydantic.Field(ge=-9, le=9)
    y: float | None = None


class Shape(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["circle", "square"]
    points: list[Point] = pydantic.Field(max_length=3)
    level: Level


class Tree(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=6, pattern="^[a-z]+$")
    children: list[Tree] = []


TYPES: list[Any] = [
    bool, int, str, float, None, list[int], dict[str, int], tuple[int, bool], Literal[1, "a", None], Level,
    Point, Shape, Tree, Point | Shape, list[Tree], str | int, dict[str, Point], tuple[Point, ...], list[list[bool]],
    pydantic.constr(min_length=2, max_length=4), pydantic.conint(ge=10, le=99, multiple_of=3),
    pydantic.conlist(bool, min_length=2, max_length=5), pydantic.AwareDatetime, Level | None, list[Level]]


def pydantic_schemas() -> list[dict[str, Any]]:
    """Each type by itself, and as the field of a model."""
    models = [pydantic.create_model(f"Holder{place}", value=(kind, ...), note=(bool, False))
              for place, kind in enumerate(TYPES)]
    return [pydantic.TypeAdapter(kind).json_schema() for kind in (*TYPES, *models)]


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum"]
    if depth < 3:
        kinds += ["object", "array", "anyOf"] * 2
    kind = draw.choice(kinds)
    if kind == "enum":
        return {"enum": draw.sample(["a", "bc", 1, 2.5, True, None, [], {}, "é\n"], draw.randint(1, 4))}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    schema: dict[str, Any] = {"type": kind}
    if kind == "string" and draw.random() < 0.6:
        schema |= draw.choice([{"maxLength": 5}, {"minLength": 2, "maxLength": 3}, {"pattern": "^[a-z]{1,3}\\d*$"},
                               {"format": "date"}, {"format": "uuid"}])
    elif kind in ("integer", "number") and draw.random() < 0.6:
        schema |= draw.choice([{"minimum": 3, "maximum": 12}, {"exclusiveMinimum": -2}, {"maximum": 1000}])
    elif kind == "array":
        schema["items"] = random_schema(draw, depth + 1)
        schema |= draw.choice([{}, {"maxItems": 2}, {"minItems": 1, "maxItems": 3}])
    elif kind == "object":
        names = draw.sample(["a", "key", "the name", "é", "$x", ""], draw.randint(0, 4))
        schema["properties"] = {name: random_schema(draw, depth + 1) for name in names}
        schema["required"] = [name for name in names if draw.random() < 0.5]
        schema["additionalProperties"] = draw.random() < 0.2
    return schema


def generated(llm: LLM, schemas: list[Any], max_tokens: int) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=1, seed=place, max_tokens=max_tokens,
                       structured_outputs=StructuredOutputsParams(json=json.dumps(schema)))
        for place, schema in enumerate(schemas)]
    return llm.generate([PROMPT] * len(schemas), params, use_tqdm=False)


def check(schema: Any, output: RequestOutput, end_ids: tuple[int, ...]) -> bool:
    """Whether the output has ended, as opposed to the beginning of one."""
    one = output.outputs[0]
    if one.finish_reason == "stop":
        if "\\p{" not in json.dumps(schema):  # Python's regular expressions have no classes of Unicode
            validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            validator(schema).validate(json.loads(one.text))
        return True
    assert one.finish_reason == "length" and not set(one.token_ids) & set(end_ids)
    tokens = [bytes([byte]) for byte in range(256)]
    vocabulary = grammar_compiler.tokenizer_of([*tokens, b"<end>"], [], [256], 257, lambda text: list(text.encode()))
    grammar = json_schema(schema, "json")
    matcher, objection = grammar_compiler.compiled(vocabulary, grammar.kind, grammar.text)
    assert not objection
    data = one.text.encode().removesuffix("\ufffd".encode())  # of a character that is not complete
    assert matcher.try_consume_tokens(list(data)) == len(data), one.text
    return False


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config={"method": "none"})


def test_outputs_validate_or_begin_one_that_does(llm: LLM) -> None:
    draw = random.Random(5)
    schemas = [*SUITE, *[random_schema(draw) for _ in range(60)], *pydantic_schemas()]
    outputs = generated(llm, schemas, 40)
    ended = [check(schema, output, llm.info.eos_token_ids) for schema, output in zip(schemas, outputs, strict=True)]
    assert len(ended) > 460 and sum(ended) > len(ended) // 2


LONG_KEYS = {"type": "array", "minItems": 4, "items": {
    "type": "object", "additionalProperties": False, "required": ["description_of_the_item", "is_deprecated_function"],
    "properties": {"description_of_the_item": {"type": "string", "maxLength": 6},
                   "is_deprecated_function": {"type": "boolean"}}}}


def test_forced_tokens_are_drafts_and_change_no_output(llm: LLM) -> None:
    another = LLM(dtype="float32", max_num_seqs=4, speculative_config={"method": "prediction"})
    engine: Any = another._engine
    step, num_accepted = engine.step, 0

    def counted() -> Any:
        nonlocal num_accepted
        record = step()
        for drafts, tokens in zip(record.plan.drafts, record.tokens, strict=False):
            num_accepted += max(0, len(tokens) - 1) if drafts else 0
        return record

    engine.step = counted
    for schema in (LONG_KEYS, {"type": "object", "required": ["a_long_name_of_a_key"], "properties": {
            "a_long_name_of_a_key": {"const": "a long constant that is forced"}}}):
        plain, drafted = (generated(one, [schema], 100)[0].outputs[0] for one in (llm, another))
        assert plain.token_ids == drafted.token_ids and plain.finish_reason == drafted.finish_reason
    assert num_accepted > 10


class Oracle:
    """Proposes what is known to follow, with a wrong token now and then: one that may break the grammar."""

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None:
        self._outputs = outputs
        self._draw = random.Random(3)
        self.num_drafts = 0

    def due(self, requests: Sequence[Request]) -> Due:
        return Due(range(len(requests)), "")

    def propose(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> Proposal:
        drafts = []
        for request, limit in rows:
            count = min(limit, most, self._draw.randint(0, 5))
            known = list(self._outputs[request.spec.seed][request.num_output :][:count])
            if known and self._draw.random() < 0.5:
                known[self._draw.randrange(len(known))] = self._draw.randrange(4096)
            most -= len(known)
            drafts.append(tuple(known))
        return Proposal(drafts, "")

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return 0.0

    def waits(self, request: Request) -> bool:
        return False

    def committed(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], proposing: Proposing | None = None,
    ) -> None:
        self.num_drafts += sum(map(len, drafts))

    def finished(self, request: Request) -> None: ...


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_drafts_change_no_output(llm: LLM, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schemas = [*pydantic_schemas()[8:20], *SUITE[:20]]
    plain = generated(llm, schemas, 32)
    oracle = Oracle([one.outputs[0].token_ids for one in plain])
    monkeypatch.setattr("slotwise.compose.engine_builder.proposer_of", lambda *arguments: oracle)
    drafted = generated(LLM(dtype="float32", device=device, max_num_seqs=8, max_stall_ms=0), schemas, 32)
    assert [one.outputs[0].token_ids for one in plain] == [one.outputs[0].token_ids for one in drafted]
    assert oracle.num_drafts > 20


@pytest.mark.parametrize("settings", [
    {"device": "reference", "overlap": 1}, {"overlap": 1, "block_size": 16, "kv_cache_memory": 400_000}])
def test_steps_in_flight_and_preemptions_change_no_output(llm: LLM, settings: dict[str, Any]) -> None:
    schemas = [*pydantic_schemas()[8:24], *SUITE[20:30]]
    plain = generated(llm, schemas, 48)
    another = LLM(dtype="float32", max_num_seqs=16, speculative_config={"method": "none"}, disable_log_stats=False,
                  **settings)
    assert [one.outputs[0].token_ids for one in plain] == [
        one.outputs[0].token_ids for one in generated(another, schemas, 48)]
    if "kv_cache_memory" in settings:
        assert any(metric.name.endswith("num_preemptions") and metric.value > 0 for metric in another.get_metrics())
