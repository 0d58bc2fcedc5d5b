"""A request's greedy tokens: the same alone and in any company, chunked or not, cached or not, with drafts or not."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints
from support.toy import Proposing

from slotwise import LLM
from slotwise.compose.engine_builder import Loaded, load
from slotwise.compute.kernels.cpu.products import onednn, paths
from slotwise.core.params import SamplingSpec
from slotwise.core.request import Request, RequestSpec
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.messages import Add

PROMPTS = 64
SHAPE_135M = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 3,  # of 30 alike
              "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
Tokens = tuple[int, ...]


class Knowing(Proposing):
    """Proposes what requests are about to be given, with a wrong token now and then."""

    def __init__(self, answers: Sequence[Tokens], draw: random.Random) -> None:
        self._answers = answers
        self._draw = draw

    def guess(self, request: Request, most: int) -> list[int]:
        to_come = self._answers[int(request.request_id)][request.num_output :][: min(most, self._draw.randint(0, 5))]
        return [token ^ 1 if self._draw.random() < 0.15 else token for token in to_come]


class Model:
    """A model, its prompts, and what each is answered alone."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        self._config = {"model": str(folder), "device": "cpu", "dtype": "bfloat16", "batch_invariant": True,
                        "max_model_len": 256, "block_size": 64, "kv_cache_memory": 1 << 28}
        self._loaded: Loaded = load(EngineConfig.of(**self._config))
        self._max_tokens = max_tokens
        draw = random.Random(2)
        beginning = checkpoints.prompts([130])[0]
        self.prompts = [  # some share their beginning
            beginning[: draw.choice([0, 0, 64, 128, 130])] + own
            for own in checkpoints.prompts([draw.randint(1, 40) for _ in range(PROMPTS)], seed=5)]
        self.alone: list[Tokens] = []
        alone = self.answers(range(PROMPTS), {"max_num_seqs": 1, "enable_prefix_caching": False})
        self.alone = [alone[index] for index in range(PROMPTS)]

    def answers(self, company: Sequence[int], differing: dict[str, object], *, seed: int | None = None,
                together: int = PROMPTS) -> dict[int, Tokens]:
        """Answers to the prompts of `company`, of which `together` arrive in each step.

        Args:
            seed: of drafts; None: no drafts.
        """
        engine, info = self._loaded.engine(EngineConfig.of(**self._config | differing))
        assert info.batch_invariant
        if seed is not None:
            engine._scheduler._drafting.proposer = Knowing(self.alone, random.Random(seed))
        params = SamplingSpec(temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True)
        outputs: dict[int, Tokens] = dict.fromkeys(company, ())
        waiting = deque(company)
        while waiting or engine.has_work:
            for _ in range(min(together, len(waiting))):
                index = waiting.popleft()
                engine.handle(Add(str(index), RequestSpec(self.prompts[index], params)))
            record = engine.step()
            assert not any(end.message for end in record.ended), record.ended
            for name, tokens in zip(record.plan.request_ids, record.tokens, strict=True):
                outputs[int(name)] += tuple(tokens)
        return outputs

    def check(self, seed: int) -> None:
        """All prompts in a random company, in few or many slots, in steps of any size, give what each gives alone."""
        draw = random.Random(seed)
        differing = {"max_num_seqs": draw.choice([3, 16, 64]), "max_num_batched_tokens": draw.choice([70, 128, 512]),
                     "enable_prefix_caching": draw.random() < 0.7, "max_stall_ms": 0}
        company = draw.sample(range(PROMPTS), PROMPTS)
        drafts = draw.choice([None, seed])
        outputs = self.answers(company, differing, seed=drafts, together=draw.choice([1, 5, PROMPTS]))
        for index, tokens in outputs.items():
            assert tokens == self.alone[index], (index, differing, drafts)


@pytest.fixture(scope="module", params=["llama3", "qwen3", "gemma2"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(checkpoints.make(request.param, tmp_path_factory.mktemp("tiny"), dtype="bfloat16"), 12)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_companies(tiny: Model, seed: int) -> None:
    tiny.check(seed)


@pytest.mark.slow
def test_random_companies_at_the_shape_of_135m(tmp_path: Path) -> None:
    model = Model(checkpoints.make("smollm2", tmp_path, dtype="bfloat16", **SHAPE_135M), 6)
    for seed in range(2):
        model.check(seed)


def test_where_it_does_not_hold_there_is_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(checkpoints.make("llama3", tmp_path, dtype="bfloat16", tokenizer=True))
    with pytest.raises(ConfigError, match="batch_invariant cannot be kept: on device reference torch's products"):
        load(EngineConfig.of(model=folder, device="reference", batch_invariant=True))
    if not onednn.obstacle():
        monkeypatch.setenv(paths.VARIABLE, "onednn")
        with pytest.raises(ConfigError, match="batch_invariant cannot be kept: products by oneDNN"):
            load(EngineConfig.of(model=folder, device="cpu", batch_invariant=True))
        assert not LLM(folder, dtype="bfloat16", device="cpu", kv_cache_memory=1 << 22).info.batch_invariant
        load(EngineConfig.of(model=folder, device="cpu", dtype="float32", batch_invariant=True))


def test_it_holds_by_default(tmp_path: Path) -> None:
    folder = str(checkpoints.make("llama3", tmp_path, dtype="bfloat16", tokenizer=True))
    assert LLM(folder, device="cpu", batch_invariant=True, kv_cache_memory=1 << 22).info.batch_invariant
    for dtype in ("bfloat16", "float32"):
        config = EngineConfig.of(model=folder, dtype=dtype, device="cpu", kv_cache_memory=1 << 22)
        assert load(config).engine(config)[1].batch_invariant
