"""Vectors and labels of models whose tokens attend to both sides, against transformers."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from support import checkpoints
from support.rank_threads import ranks_on_threads

from slotwise import LLM, PoolingParams, SamplingParams
from slotwise.compose.engine_builder import build_engine
from slotwise.compose.model_defaults import read_pooling
from slotwise.core.params import PoolingSpec, SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add, EngineInfo
from slotwise.errors import CheckpointError

LENGTHS = [1, 2, 40, 75, 23, 60, 100, 7]  # tokens; some are longer than every window, and than a step
# Of checkpoints: the family, the ending of its class, and fields beside those of `checkpoints`.
MODELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "gemma3": ("gemma3", "TextModel", {"use_bidirectional_attention": True}),
    "qwen3": ("qwen3", "Model", {"is_causal": False}),
    **{name: (name, "Model", {}) for name in checkpoints.COMPARED_ENCODERS},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return checkpoints.prompts(LENGTHS, seed=5)


def built(folder: Path, **settings: object) -> tuple[Engine, EngineInfo]:
    return build_engine(EngineConfig.of(**{
        "model": str(folder), "dtype": "float32", "block_size": 16, "kv_cache_memory": 16 << 20, "max_model_len": 128,
        "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings))


def engine(folder: Path, **settings: object) -> Engine:
    return built(folder, **settings)[0]


def vectors(
    subject: Engine, prompts: list[list[int]], spec: PoolingSpec, budget: int = 64,
) -> list[torch.Tensor]:
    """What the engine makes of prompts that arrive together, in steps of at most `budget` tokens or one prompt."""
    for number, prompt in enumerate(prompts):
        subject.handle(Add(number, RequestSpec(prompt, SamplingSpec(max_tokens=None), pooling=spec)))
    found: dict[int, torch.Tensor] = {}
    while subject.has_work:
        record = subject.step()
        assert not record.outcome.failure and not any(end.message for end in record.ended), record
        assert sum(record.plan.counts) <= budget or len(record.plan.counts) == 1
        for name, vector in zip(record.plan.request_ids, record.result.pooled, strict=False):
            found[name] = torch.tensor(array("f", vector))
    return [found[number] for number in range(len(prompts))]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, kind, fields = MODELS[request.param]
    return checkpoints.make(family, tmp_path_factory.mktemp(request.param) / "model", kind=kind, **fields)


@pytest.fixture(scope="module")
def exact(model: Path) -> Callable[[list[int]], torch.Tensor]:
    """The last hidden states of transformers, `[tokens, hidden]`."""
    theirs = checkpoints.reference_model(model, "float32", "AutoModel")

    def hidden(prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode(), checkpoints.one_thread():
            return theirs(torch.tensor([prompt])).last_hidden_state[0]

    return hidden


@pytest.mark.parametrize("settings", [{}, {"device": "reference", "overlap": 1}, {"batching": "static"}],
                         ids=["cpu", "reference", "static"])
def test_vectors_equal_transformers(model, prompts, exact, settings):
    budget = sum(LENGTHS) if "batching" in settings else 64  # a static batch starts whole
    found = vectors(engine(model, **settings), prompts, PoolingSpec("mean", normalize=False), budget)
    for vector, prompt in zip(found, prompts, strict=True):
        torch.testing.assert_close(vector, exact(prompt).mean(0), atol=5e-5, rtol=1e-4)


def test_a_vector_has_the_same_bits_in_any_company(model, prompts):
    subject, spec = engine(model), PoolingSpec("cls")
    together = vectors(subject, prompts, spec)
    for vector, prompt in zip(together, prompts, strict=True):
        assert torch.equal(vectors(subject, [prompt], spec)[0], vector)
    assert all(torch.equal(*pair) for pair in zip(vectors(subject, prompts[::-1], spec)[::-1], together, strict=True))


@pytest.mark.parametrize("name", checkpoints.COMPARED_ENCODERS)
def test_labels_equal_transformers(name, prompts, tmp_path):
    folder = checkpoints.make(name, tmp_path / "labels", kind="ForSequenceClassification", num_labels=3)
    theirs = checkpoints.reference_model(folder, "float32", "AutoModelForSequenceClassification")
    subject, info = built(folder)
    found = vectors(subject, prompts, read_pooling(folder).of_family(info.pooling_type).classifying(is_activated=False))
    for numbers, prompt in zip(found, prompts, strict=True):
        with torch.inference_mode(), checkpoints.one_thread():
            wanted = theirs(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(numbers, wanted, atol=5e-5, rtol=1e-4)


def test_what_an_encoder_does_not_have_is_refused(tmp_path):
    folder = checkpoints.make("eurobert", tmp_path / "model", kind="Model")
    for settings in ({"pipeline_parallel_size": 2}, {"speculative_config": {"method": "ngram"}}):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} is not supported with a model whose tokens"):
            engine(folder, **settings)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_tokens_of_a_second_text_have_a_type_of_their_own(device, tmp_path):
    folder = checkpoints.make("bert", tmp_path / "model", kind="Model")
    (folder / "tokenizer.json").write_text(json.dumps({
        "added_tokens": [{"content": "[SEP]", "id": 7}], "model": {"vocab": {}}}))
    theirs = checkpoints.reference_model(folder, "float32", "AutoModel")
    pairs = [[5, 9, 9, 7], [5, 9, 7, 11, 12, 7], [7, 3], [5, 7, 9, 7], [4, 4, 4]]
    found = vectors(engine(folder, device=device), pairs, PoolingSpec("mean", normalize=False))
    for vector, ids in zip(found, pairs, strict=True):
        first = [*ids, 7].index(7)
        types = [int(place > first) for place in range(len(ids))]
        with torch.inference_mode(), checkpoints.one_thread():
            wanted = theirs(torch.tensor([ids]), token_type_ids=torch.tensor([types])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, wanted, atol=5e-5, rtol=1e-4)


def test_dense_modules_follow_the_pooling(prompts, tmp_path):
    """As EmbeddingGemma has them."""
    folder = checkpoints.make("gemma3", tmp_path / "model", kind="TextModel", use_bidirectional_attention=True)
    theirs, types = checkpoints.reference_model(folder, "float32", "AutoModel"), "sentence_transformers.models."
    modules = [{"path": path, "type": types + kind} for path, kind in (
        ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Dense", "Dense"), ("", "Normalize"))]
    (folder / "modules.json").write_text(json.dumps(modules))
    draw, tensors = torch.Generator().manual_seed(0), {}
    for path, sizes, bias, activation in (("2_Dense", (160, 96), True, "torch.nn.modules.activation.Tanh"),
                                          ("3_Dense", (40, 160), False, "torch.nn.modules.linear.Identity")):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps({
            "in_features": sizes[1], "out_features": sizes[0], "bias": bias, "activation_function": activation}))
        tensors[path] = {"linear.weight": torch.randn(sizes, generator=draw) / 8}
        if bias:
            tensors[path]["linear.bias"] = torch.randn(sizes[0], generator=draw)
        save_file(tensors[path], folder / path / "model.safetensors")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 120, "do_lower_case": False}))
    with pytest.raises(ConfigError, match=r"max_model_len .*120"):
        engine(folder)
    found = vectors(engine(folder, max_model_len=120), prompts, PoolingSpec("mean"))
    first, second = tensors.values()
    for vector, prompt in zip(found, prompts, strict=True):
        with torch.inference_mode(), checkpoints.one_thread():
            mean = theirs(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        wanted = torch.tanh(first["linear.weight"] @ mean + first["linear.bias"]) @ second["linear.weight"].T
        torch.testing.assert_close(vector, wanted / wanted.norm(), atol=5e-5, rtol=1e-4)
    (folder / "2_Dense" / "config.json").write_text(json.dumps({
        "in_features": 96, "out_features": 160, "bias": True, "activation_function": "torch.nn.Mish"}))
    with pytest.raises(CheckpointError, match="2_Dense: activation_function mish is not supported"):
        engine(folder, max_model_len=120)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_an_encoder_is_divided_among_ranks_of_a_layer(name, prompts, tmp_path):
    folder = checkpoints.make(name, tmp_path / "model", kind="Model", tokenizer=True)
    with ranks_on_threads():
        alone, divided = (LLM(str(folder), dtype="float32", max_model_len=128, tensor_parallel_size=ranks)
                          for ranks in (1, 2))
        for one, other in zip(*(llm.embed(prompts, use_tqdm=False) for llm in (alone, divided)), strict=True):
            assert one.outputs.embedding == pytest.approx(other.outputs.embedding, abs=1e-5)
        del alone, divided


TEXTS = ["def f(x):", "return x", "class A:\n    pass"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one label."""
    return checkpoints.make("eurobert", tmp_path_factory.mktemp("classifier") / "model", tokenizer=True,
                            kind="ForSequenceClassification", num_labels=1)


def test_offline_methods_classify_reward_and_score(classifier):
    llm = LLM(str(classifier), dtype="float32", max_model_len=64)
    theirs = checkpoints.reference_model(classifier, "float32", "AutoModelForSequenceClassification")

    def logit(ids: list[int]) -> float:
        with torch.inference_mode(), checkpoints.one_thread():
            return theirs(torch.tensor([ids])).logits[0, 0].item()

    raw = [logit(llm.tokenizer.encode(text)) for text in TEXTS]
    probabilities = [torch.tensor(one).sigmoid().item() for one in raw]
    classified = llm.classify(TEXTS, use_tqdm=False)
    assert [one.outputs.probs for one in classified] == [[pytest.approx(one, abs=1e-5)] for one in probabilities]
    assert classified[0].outputs.num_classes == 1 and classified[0].finished
    for outputs in (llm.reward(TEXTS, use_tqdm=False),
                    llm.encode(TEXTS, PoolingParams(use_activation=False), use_tqdm=False)):
        assert [one.outputs.data.tolist() for one in outputs] == [[pytest.approx(one, abs=1e-4)] for one in raw]
    pair = llm.tokenizer.encode_pair(TEXTS[0], TEXTS[1])
    (scored,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    assert scored.prompt_token_ids == pair
    assert scored.outputs.score == pytest.approx(torch.tensor(logit(pair)).sigmoid().item(), abs=1e-5)
    assert len(llm.score(TEXTS[0], TEXTS, use_tqdm=False)) == 3
    for wrong, message in (
            (lambda: llm.embed(TEXTS), "head of labels"), (lambda: llm.score([1, 2], [3]), "needs texts"),
            (lambda: llm.score(TEXTS[:2], TEXTS), "2 texts and 3"),
            (lambda: llm.generate(TEXTS, SamplingParams(max_tokens=1)), r"only classifies.*use LLM\.classify"),
            (lambda: llm.encode(TEXTS, pooling_task="token_embed"), "pooling_task must be embed or classify"),
            (lambda: llm.classify(TEXTS, pooling_params=PoolingParams(dimensions=3)), "dimensions")):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_offline_scores_of_vectors_are_cosines(tmp_path):
    folder = checkpoints.make("gemma3", tmp_path / "model", kind="TextModel", tokenizer=True,
                              use_bidirectional_attention=True)
    prompts = {"prompts": {"query": "find: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    llm = LLM(str(folder), dtype="float32", max_model_len=64)
    first, second = (torch.tensor(one.outputs.embedding) for one in llm.embed(TEXTS[:2], use_tqdm=False))
    (output,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    assert output.outputs.score == pytest.approx(torch.cosine_similarity(first, second, 0).item(), abs=1e-6)
    assert llm.embed(TEXTS[:1], use_tqdm=False)[0].prompt_token_ids == llm.tokenizer.encode("find: " + TEXTS[0])
    (encoded,) = llm.encode(TEXTS[0], use_tqdm=False)
    torch.testing.assert_close(encoded.outputs.data, first)
    with pytest.raises(ValueError, match="does not classify"):
        llm.classify(TEXTS)


def test_offline_texts_that_are_cut_keep_their_special_tokens(tmp_path):
    folder = checkpoints.make("eurobert", tmp_path / "model", tokenizer=True, kind="ForSequenceClassification",
                              num_labels=1)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin, end = list(inner.get_added_tokens_decoder())[:2]
    names = {inner.id_to_token(one): one for one in (begin, end)}
    first, last = names
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}", special_tokens=list(names.items()))
    inner.save(str(folder / "tokenizer.json"))
    llm = LLM(str(folder), dtype="float32", max_model_len=16)
    text, other = "def f(x):", "return x " * 20
    ids, more = (llm.tokenizer.encode(one, add_special_tokens=False) for one in (text, other))
    for most, places in ((5, 3), (-1, 14)):
        (cut,) = llm.classify(other, truncate_prompt_tokens=most, use_tqdm=False)
        assert cut.prompt_token_ids == [begin, *more[:places], end]
    (cut,) = llm.score(text, other, truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.prompt_token_ids == [begin, *ids, end, *more[: 16 - len(ids) - 3], end]
    (cut,) = llm.classify(more, truncate_prompt_tokens=5, use_tqdm=False)  # ids are a prompt as they are
    assert cut.prompt_token_ids == more[:5]
    with pytest.raises(ValueError, match="leave no place"):
        llm.score(other, text, truncate_prompt_tokens=8)
