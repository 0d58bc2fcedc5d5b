"""Masks on logits, on both paths, and the matchers behind them: rollbacks, drafts, rows that cannot go on."""

from __future__ import annotations

import json
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from slotwise import grammar_compiler
from slotwise.compute.kernels.reference import FAILED, allowed_only, draw
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.compute.runner.sampling.cpu_sampler import Sampler
from slotwise.compute.runner.sampling.gpu_sampler import DeviceSampler
from slotwise.compute.runner.sampling.grammar_masks import MAX_FORCED, Grammars, Masks, RowMasks
from slotwise.core.params import JSON_SCHEMA, LARK, REGEX, Grammar, SamplingSpec
from slotwise.core.record import NewRequest, RowKind, StepPlan
from slotwise.core.request import RequestSpec

VOCAB = 299  # no multiple of 32
EOS = 257
PROMPT = (1, 2, 3)


def tokenizer() -> Any:
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"<end>"]
    return grammar_compiler.tokenizer_of(tokens, [], [EOS], VOCAB, lambda text: list(text.encode()))


def joined(masks: Masks, compiler: Grammars, pattern: str, outputs: tuple[int, ...] = (), slot: int = 0) -> NewRequest:
    grammar = Grammar(REGEX, pattern)
    compiler.compile("r", grammar)
    while not compiler.has_compiled:
        pass
    assert [one.objection for one in compiler.pop_compiled()] == [""]
    params = SamplingSpec(temperature=0, grammar=grammar)
    join = NewRequest("r", slot, RequestSpec(PROMPT, params, 1), (), outputs)
    masks.join(join)
    return join


def plan(num_outputs: int, drafts: tuple[int, ...] = (), slot: int = 0) -> StepPlan:
    """A step that draws the token behind `num_outputs` outputs, and behind each draft."""
    count, start = 1 + len(drafts), len(PROMPT) + num_outputs - 1
    return StepPlan(0, 0.0, (), (), (), (), ("r",), (slot,), (start,), (count,), (drafts,) if drafts else (), (count,),
                    (RowKind.DECODE,), (), (), (), (), None)


def allowed(masks: Masks, step: StepPlan) -> list[str]:
    """For each position the tokens that are allowed, "$" for the end."""
    masks.prepare_draws(step, lambda plan: plan.num_logits, lambda: ())
    found = []
    for index in range(step.counts[0]):
        selected = masks.select(step.slots, [step.starts[0] + 1 + index])
        assert selected is not None
        ids = np.flatnonzero(np.unpackbits(selected.bits[0].view(np.uint8), bitorder="little"))
        found.append("".join("$" if token == EOS else "ab " if token == 256 else chr(token) for token in ids))
    return found


@pytest.mark.parametrize("text", ["ab" * 20, "ab" * 1000, "é" * 1000])
def test_of_a_long_text_that_is_forced_only_its_beginning_is_read(text: str) -> None:
    """All tokens of 80,000 bytes would take 60 ms at every step, and stand in the event log."""
    compiler = Grammars(tokenizer())
    masks = Masks(compiler, VOCAB, forces=True)
    join = joined(masks, compiler, "x|y" + text, ())
    read: list[int] = []
    compiler.tokens_of = lambda begin: read.append(len(begin)) or Grammars.tokens_of(compiler, begin)  # type: ignore
    assert join.request_id == "r"
    masks.record(plan(0), [(ord("y"),)])
    (found,) = masks.forced(plan(0), [(ord("y"),)])
    written = Grammars.tokens_of(compiler, text.encode())
    assert found == tuple(written[: len(found)]) and len(found) == min(MAX_FORCED - 1, len(text.encode()))
    assert all(one <= MAX_FORCED for one in read)


def test_positions_behind_drafts_and_rollbacks() -> None:
    compiler = Grammars(tokenizer())
    masks = Masks(compiler, VOCAB)
    joined(masks, compiler, "a(b|c)d?")
    assert allowed(masks, plan(0)) == ["aab "]
    assert allowed(masks, plan(0, tuple(b"acd"))) == ["aab ", "bc", "d$", "$"]
    assert allowed(masks, plan(0, tuple(b"axd"))) == ["aab ", "bc", "$", "$"], "never drawn, behind a wrong draft"
    masks.record(plan(0), [(256,)])
    assert allowed(masks, plan(1, (ord("d"), EOS))) == ["d$", "$", "$"]
    masks.record(plan(1), [(EOS,)])
    assert allowed(masks, plan(2)) == ["$"], "a row in flight behind the end"
    assert allowed(masks, plan(1)) == ["d$"], "the step has failed, and is run again"
    masks.record(plan(0), [(ord("a"),)])
    assert allowed(masks, plan(1)) == ["bc"], "so has the one before"
    masks.leave(0)
    assert masks.select((0,), (9,)) is None and not masks.are_in(plan(0))
    joined(masks, compiler, "a(b|c)d?", tuple(b"ac"), slot=3)
    assert allowed(masks, plan(2, slot=3)) == ["d$"], "resumed after a preemption, in another slot"


def test_a_row_that_cannot_go_on_fails_alone() -> None:
    compiler = Grammars(tokenizer())
    masks = Masks(compiler, VOCAB)
    joined(masks, compiler, "a+")
    masks.record(plan(0), [(ord("x"),)])  # no sampler gives such a token
    assert allowed(masks, plan(1)) == [""] and masks.objection(0).startswith("structured_outputs: ")
    sampler = Sampler(4, VOCAB, masks=masks)
    for slot, params in ((0, SamplingSpec(temperature=0)), (1, SamplingSpec(temperature=0))):
        sampler.join(NewRequest(str(slot), slot, RequestSpec(PROMPT, params, 1), ()))
    drawn = sampler.sample(torch.randn(2, VOCAB), [0, 1], [len(PROMPT) + 1, len(PROMPT)])
    assert drawn.tokens[0] == FAILED and drawn.tokens[1] != FAILED and drawn.failed == (0,)


def test_the_cache_holds_what_requests_hold_and_a_few_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotwise.compute.runner.sampling.grammar_masks.MAX_CACHED", 2)
    compiler = Grammars(tokenizer())
    masks = Masks(compiler, VOCAB)
    for pattern in ("a", "b", "c", "d", "a"):
        joined(masks, compiler, pattern)
        assert not compiler.is_compiling
        compiler.release("r")
    compiler.compile("x", Grammar(REGEX, "(", "guided_regex"))
    while not (found := compiler.pop_compiled()):
        pass
    assert found[0].request_id == "x" and found[0].objection.startswith("guided_regex: at 1")
    Grammars(None).compile("y", Grammar(REGEX, "a"))


def test_a_grammar_that_cannot_be_used_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def objects(_: Any, kind: str, text: str) -> tuple[Any, str]:
        compiled.append(text)
        return None, f"{kind} is too large"

    monkeypatch.setattr(grammar_compiler, "compiled", objects)
    compiler = Grammars(tokenizer())
    for name in ("r", "s"):
        compiler.compile(name, Grammar(REGEX, "a", f"field_{name}"))
        while not compiler.has_compiled:
            pass
        assert [tuple(one) for one in compiler.pop_compiled()] == [(name, f"field_{name}: regex is too large")]
        assert not compiler.is_compiling
        compiler.release(name)
    assert compiled == ["a"]


def test_a_grammar_is_skipped_when_its_requests_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, compiled = Event(), Event(), []

    def waits(_: Any, __: str, text: str) -> tuple[Any, str]:
        compiled.append(text)
        begun.set()
        assert goes_on.wait(120)
        return object(), ""

    monkeypatch.setattr(grammar_compiler, "compiled", waits)
    compiler = Grammars(tokenizer())
    for name in "abc":
        compiler.compile(name, Grammar(REGEX, name))
    assert begun.wait(120), "the first is under way"
    compiler.release("b")
    compiler.release("c")
    goes_on.set()
    while compiler._done.qsize() < 3:
        pass
    compiler.compile("again", Grammar(REGEX, "c"))  # it was skipped, which no request has learned yet
    found = compiler.pop_compiled()
    while compiler.is_compiling:
        found += compiler.pop_compiled()
    assert [tuple(one) for one in found] == [("a", ""), ("again", "")]
    assert compiled == ["a", "c"]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_masked_rows_of_both_paths(kind: torch.dtype) -> None:
    random = np.random.default_rng(2)
    logits = torch.randn(6, VOCAB).to(kind)
    bits = random.integers(-(2**31), 2**31, (4, -(-VOCAB // 32)), dtype=np.int64).astype(np.int32)
    bits[0] = 0
    bits[1, 1:] = 0  # few tokens
    rows = np.array([0, 2, 3, 5])
    full = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(bool)
    expected = logits.float().clone()
    for row, mask in zip(rows, full, strict=True):
        expected[row, torch.from_numpy(~mask)] = -torch.inf
    copy = logits.clone()
    assert torch.equal(allowed_only(logits, torch.from_numpy(rows), torch.from_numpy(bits)).float(), expected)
    assert torch.equal(logits, copy)
    best = [FAILED if row == 0 else int(expected[row].argmax()) for row in range(6)]

    class Fixed(Masks):
        def select(self, slots: Any, positions: Any) -> RowMasks:
            return RowMasks(rows, bits)

    masks = Fixed(Grammars(None), VOCAB)
    slots = SlotTable(6, 16, 4, 0)
    samplers: list[Any] = [
        Sampler(6, VOCAB, masks=masks), DeviceSampler(slots, VOCAB, draw, torch.device("cpu"), masks)]
    for sampler in samplers:
        for temperature in (0.0, 1.0):
            for slot in range(6):
                params = SamplingSpec(temperature=temperature, logprobs=2 if slot == 2 else None)
                sampler.join(NewRequest(str(slot), slot, RequestSpec(PROMPT, params, 7), ()))
            drawn = sampler.sample(logits, range(6), [len(PROMPT)] * 6).read()
            assert drawn.failed == (0,)
            assert temperature > 0 or drawn.tokens == best
            assert all(bool(mask[drawn.tokens[row]]) for row, mask in zip(rows[1:], full[1:], strict=True))
            entry = drawn.logprobs[2]
            scores = expected[2].log_softmax(-1)
            assert entry is not None and abs(entry.logprob - float(scores[drawn.tokens[2]])) < 1e-3


def test_values_that_are_not_finite_count_only_where_they_are_allowed() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 40], logits[0, 298] = torch.nan, 5.0
    for forbidden, token in ((40, 298), (298, FAILED)):
        bits = np.full((1, -(-VOCAB // 32)), -1, np.int32)
        bits[0, forbidden // 32] &= ~np.int32(1 << forbidden % 32)
        masks: Any = type("Fixed", (), {"select": lambda *given, bits=bits: RowMasks(np.array([0]), bits)})()
        sampler = Sampler(1, VOCAB, masks=masks)
        sampler.join(NewRequest("0", 0, RequestSpec(PROMPT, SamplingSpec(temperature=0), 7), ()))
        assert sampler.sample(logits, [0], [len(PROMPT)]).tokens == [token]


def test_an_ambiguous_grammar_is_stopped_while_its_masks_are_cheap() -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), *(b" a" * count for count in range(2, 12)), b"<end>"]
    vocabulary = grammar_compiler.tokenizer_of(tokens, [], [len(tokens) - 1], VOCAB, lambda text: list(text.encode()))
    matcher, objection = grammar_compiler.compiled(vocabulary, LARK, "start: s\ns: s s | s s s | /[a-z ]/ |\n")
    assert objection == ""
    for _ in range(50):  # further on a mask takes as long as a hundred steps
        matcher.compute_bitmask()
        if matcher.is_error():
            break
        matcher.consume_token(ord("a"))
    assert matcher.is_error() and "Too many items" in grammar_compiler.message_of(matcher)


@pytest.mark.parametrize(("kind", "text", "outputs", "says"), [
    (JSON_SCHEMA, json.dumps({
        "type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/k"}}},
        "$defs": {"k": {"type": "object", "patternProperties": {"^k$": {}}, "required": ["k"],
                        "additionalProperties": False}}, "x-guidance": {"whitespace_flexible": False}}),
     b'{"a":[{"k":1},{"k":[2],', "at #/$defs/k, which has type, patternProperties, required, additionalProperties"),
    (LARK, 'start: "a" x\nx: x "b"\n', b"a", "after 'a' no token follows in the grammar")])
def test_what_dies_later_says_what_in_the_grammar_did_it(kind: str, text: str, outputs: bytes, says: str) -> None:
    """What the check before the engine does not find: it compiles here, and leads to where nothing may follow."""
    compiler = Grammars(tokenizer())
    masks, grammar = Masks(compiler, VOCAB), Grammar(kind, text, "response_format")
    compiler.compile("r", grammar)
    while not compiler.has_compiled:
        pass
    assert [one.objection for one in compiler.pop_compiled()] == [""]
    masks.join(NewRequest("r", 0, RequestSpec(PROMPT, SamplingSpec(temperature=0, grammar=grammar), 1), ()))
    for number, byte in enumerate(outputs):
        assert allowed(masks, plan(number)) != [""] and not masks.objection(0)
        masks.record(plan(number), [(byte,)])
    assert allowed(masks, plan(len(outputs))) == [""]
    objection = masks.objection(0)
    assert objection.startswith("response_format: after ") and says in objection, objection
