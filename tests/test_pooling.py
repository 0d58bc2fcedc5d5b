"""Vectors of prompts against transformers' hidden states, however the prompts are computed."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import checkpoints
from support.live import serving

from slotwise import LLM, PoolingParams, SamplingParams
from slotwise.compose.engine_builder import build_engine
from slotwise.compute.model.decoder import Decoder
from slotwise.core import params
from slotwise.core.record import StepRecord
from slotwise.core.request import RequestSpec
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.errors import CheckpointError
from slotwise.measure.simulate.replay import replay
from slotwise.observe import log_file

LENGTHS = [1, 2, 40, 75, 23, 60, 100]
BYTES_A_BLOCK = 2 * 16 * 4 * 32 * 4 * 3  # keys and values, tokens, heads, head_dim, float32, layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("qwen3", tmp_path_factory.mktemp("qwen3"), tokenizer=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return checkpoints.prompts(LENGTHS, seed=5)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Callable[..., torch.Tensor]:
    """The vector that transformers' last hidden states give."""
    model = checkpoints.reference_model(folder, "float32").model

    def vector(prompt: list[int], kind: str, dimensions: int | None = None, *, normalize: bool = True) -> torch.Tensor:
        with torch.inference_mode(), checkpoints.one_thread():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        numbers = torch.arange(1.0, len(prompt) + 1)[:, None]
        found = {
            "mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0], "max": hidden.amax(0),
            "weightedmean": (hidden * numbers).sum(0) / numbers.sum(),
            "mean_sqrt_len_tokens": hidden.sum(0) / len(prompt) ** 0.5}[kind][:dimensions]
        return found / found.norm() if normalize else found

    return vector


def engine(folder: Path, **settings: object) -> Engine:
    built, _ = build_engine(EngineConfig.of(**{
        "model": str(folder), "dtype": "float32", "block_size": 16, "kv_cache_memory": 16 << 20, "max_model_len": 128,
        "max_num_seqs": 8} | settings))
    return built


def add(name: str, prompt: list[int], kind: str, *, normalize: bool = True) -> Add:
    return Add(name, RequestSpec(
        prompt, params.SamplingSpec(max_tokens=None), pooling=params.PoolingSpec(kind, normalize=normalize)))



def run(subject: Engine, adds: list[Add]) -> tuple[dict[str, torch.Tensor], list[StepRecord]]:
    for command in adds:
        subject.handle(command)
    vectors, records = {}, []
    while subject.has_work:
        record = subject.step()
        records.append(record)
        assert not record.outcome.failure and not any(end.message for end in record.ended), record
        for name, vector in zip(record.plan.request_ids, record.result.pooled, strict=False):
            if vector:
                vectors[name] = torch.tensor(array("f", vector))
    return vectors, records


@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize("settings", [
    {}, {"max_num_batched_tokens": 16}, {"kv_cache_memory": BYTES_A_BLOCK * 12}, {"overlap": 1},
    {"batching": "static"}, {"device": "reference"}, {"max_num_batched_tokens": 16, "overlap": 1}],
    ids=["whole", "chunked", "preempted", "overlap", "static", "device", "chunked and overlap"])
def test_vectors_equal_transformers_beside_requests_that_generate(folder, prompts, exact, kind, settings):
    pooled = [add(f"p{index}", prompt, kind) for index, prompt in enumerate(prompts)]
    sampled = [Add(f"s{index}",
                   RequestSpec(prompt, params.SamplingSpec(temperature=0, max_tokens=12, ignore_eos=True)))
               for index, prompt in enumerate(prompts)]
    both = [one for pair in zip(pooled, sampled, strict=True) for one in pair]
    vectors, records = run(engine(folder, **settings), both)
    for index, prompt in enumerate(prompts):
        torch.testing.assert_close(vectors[f"p{index}"], exact(prompt, kind), atol=2e-5, rtol=1e-4)
    ends = {end.request_id: (end.reason, end.num_output) for record in records for end in record.ended}
    assert ends == {f"p{index}": ("stop", 0) for index in range(len(prompts))} | {
        f"s{index}": ("length", 12) for index in range(len(prompts))}
    if "kv_cache_memory" in settings:
        assert any(record.preempted for record in records)
    if "max_num_batched_tokens" in settings:
        assert max(sum(record.plan.counts) for record in records) <= 16


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16, "overlap": 1}], ids=["whole", "chunked"])
def test_every_pooling_equals_transformers(folder, prompts, exact, settings):
    adds = [add(f"{kind} {index}", prompt, kind) for kind in params.POOLING_TYPES
            for index, prompt in enumerate(prompts)]
    vectors, _ = run(engine(folder, **settings), adds)
    for kind in params.POOLING_TYPES:
        for index, prompt in enumerate(prompts):
            torch.testing.assert_close(vectors[f"{kind} {index}"], exact(prompt, kind), atol=2e-5, rtol=1e-4)


def test_the_last_layer_ends_with_the_tokens_that_are_pooled(folder, prompts, monkeypatch):
    rows = []
    hidden = Decoder.hidden
    monkeypatch.setattr(Decoder, "hidden", lambda *given: rows.append(len(given[1].sample_at)) or hidden(*given))
    subject = engine(folder)
    for kind in ("cls", "last", "mean"):
        rows.clear()
        run(subject, [add(str(index), prompt, kind) for index, prompt in enumerate(prompts)])
        assert sum(rows) == (sum(LENGTHS) if kind == "mean" else len(LENGTHS))


def labeled(name: str, prompt: list[int], labels: tuple[int, ...]) -> Add:
    return Add(name, RequestSpec(prompt, params.SamplingSpec(max_tokens=None),
                                 pooling=params.PoolingSpec(task="labels", label_ids=labels)))


def test_labels_have_the_log_probabilities_of_the_next_token_alone_and_in_company(folder, prompts):
    labels = (7, 500, 3)
    model = checkpoints.reference_model(folder, "float32")
    adds = [labeled(f"p{index}", prompt, labels) for index, prompt in enumerate(prompts)]
    together, _ = run(engine(folder), adds)
    for index, prompt in enumerate(prompts):
        with torch.inference_mode(), checkpoints.one_thread():
            wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        wanted = torch.cat((wanted[list(labels)], wanted.max()[None]))
        torch.testing.assert_close(together[f"p{index}"], wanted, atol=2e-4, rtol=1e-4)
        alone, _ = run(engine(folder, max_num_batched_tokens=16), [adds[index]])
        assert torch.equal(alone[f"p{index}"], together[f"p{index}"])


def test_a_head_of_labels_classifies(prompts, tmp_path):
    folder = checkpoints.make("llama3", tmp_path / "labels", kind="ForSequenceClassification", num_labels=3)
    model = checkpoints.reference_model(folder, "float32", "AutoModelForSequenceClassification")
    for activation in ("", "softmax"):
        spec = params.PoolingSpec(task="classify", activation=activation)
        found, _ = run(engine(folder), [Add(str(index), RequestSpec(
            prompt, params.SamplingSpec(max_tokens=None), pooling=spec)) for index, prompt in enumerate(prompts)])
        for index, prompt in enumerate(prompts):
            with torch.inference_mode(), checkpoints.one_thread():
                wanted = model(torch.tensor([prompt])).logits[0]
            wanted = wanted.softmax(-1) if activation else wanted
            torch.testing.assert_close(found[str(index)], wanted, atol=2e-5, rtol=1e-4)


def test_generation_is_the_same_beside_pooled_requests(folder, prompts):
    sampled = [Add(f"s{index}",
                   RequestSpec(prompt, params.SamplingSpec(temperature=0, max_tokens=8, ignore_eos=True)))
               for index, prompt in enumerate(prompts)]

    def tokens(adds: list[Add]) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for record in run(engine(folder), adds)[1]:
            for name, row in zip(record.plan.request_ids, record.tokens, strict=True):
                found[name] = found.get(name, ()) + row
        return {name: row for name, row in found.items() if row}

    beside = [add(f"p{index}", prompt, "mean") for index, prompt in enumerate(prompts)]
    assert tokens([*beside, *sampled]) == tokens(sampled)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_cached_prefix_serves_the_last_token_and_not_the_mean(folder, exact, kind):
    subject, prompt = engine(folder), checkpoints.prompts([64], seed=9)[0]
    run(subject, [add("first", prompt, kind)])
    vectors, records = run(subject, [add("again", prompt, kind)])
    assert sum(sum(record.plan.counts) for record in records) == (64 if kind == "mean" else 16)
    torch.testing.assert_close(vectors["again"], exact(prompt, kind), atol=2e-5, rtol=1e-4)


def test_a_failed_step_does_not_count_a_chunk_twice(folder, exact, monkeypatch):
    subject, prompt = engine(folder, max_num_batched_tokens=16, overlap=1), checkpoints.prompts([60], seed=2)[0]
    run(subject, [])
    collect, calls = subject.executor.collect, []

    def failing() -> object:
        calls.append(0)
        result = collect()
        if len(calls) == 2:  # of the step of another request: the step in flight behind it is dropped
            raise RuntimeError("one step failed")
        return result

    monkeypatch.setattr(subject.executor, "collect", failing)
    subject.handle(add("broken", [1] * 32, "mean"))
    subject.handle(add("sound", prompt, "mean"))
    vectors, ends = {}, {}
    while subject.has_work:
        record = subject.step()
        vectors |= {name: vector for name, vector in zip(record.plan.request_ids, record.result.pooled, strict=False)
                    if vector}
        ends |= {end.request_id: end.reason for end in record.ended}
    assert ends == {"broken": "error", "sound": "stop"}
    torch.testing.assert_close(torch.tensor(array("f", vectors["sound"])), exact(prompt, "mean"), atol=2e-5, rtol=1e-4)


def test_embed_returns_vllms_outputs(folder, prompts, exact):
    llm = LLM(str(folder), dtype="float32", max_model_len=128, pooler_config={"pooling_type": "MEAN"})
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == prompt and output.finished
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), exact(prompt, "mean"), atol=2e-5, rtol=1e-4)
    (short,) = llm.embed(prompts[3], use_tqdm=False, pooling_params=PoolingParams(dimensions=8, normalize=False))
    wanted = exact(prompts[3], "mean", 8, normalize=False)
    torch.testing.assert_close(torch.tensor(short.outputs.embedding), wanted, atol=2e-5, rtol=1e-4)
    assert llm.generate([prompts[0]], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished
    with pytest.raises(ValueError, match="dimensions"):
        llm.embed(prompts[0], pooling_params=PoolingParams(dimensions=1 << 15))
    with pytest.raises(ValueError, match="129 tokens"):
        llm.embed([[1] * 129])


@pytest.fixture(scope="module", params=["Qwen3Model", "Qwen3ForCausalLM"])
def headless(request, folder, tmp_path_factory):
    """The model without its head, which its config does not tie, as published models that make vectors are stored."""
    bare = tmp_path_factory.mktemp("headless") / "model"
    checkpoints.reference_model(folder, "float32").model.save_pretrained(bare)
    checkpoints.edit_config(bare, architectures=[request.param], tie_word_embeddings=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, bare)
    return bare


def test_a_model_without_a_head_makes_vectors_and_no_text(headless, prompts, exact):
    llm = LLM(str(headless), dtype="float32", max_model_len=128)
    for output, prompt in zip(llm.embed(prompts, use_tqdm=False), prompts, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), exact(prompt, "last"), atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"no head; use LLM\.embed"):
        llm.generate([prompts[0]], SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("headless", ["Qwen3Model"], indirect=True)
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_model_without_a_head_is_divided_among_ranks(ranks, headless, prompts, exact):
    llm = LLM(str(headless), dtype="float32", max_model_len=128, **ranks)
    for output, prompt in zip(llm.embed(prompts, use_tqdm=False), prompts, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), exact(prompt, "last"), atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"no head; use LLM\.embed"):
        llm.generate([prompts[0]], SamplingParams(max_tokens=1), use_tqdm=False)


def test_a_file_that_lacks_its_head_by_mistake_is_refused(folder, tmp_path):
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    checkpoints.edit_config(broken, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks 1 of .* lm_head\.weight"):
        LLM(str(broken), dtype="float32")
    write(broken, "modules.json", [])
    assert LLM(str(broken), dtype="float32", max_model_len=64).embed([[1, 2]], use_tqdm=False)


@pytest.mark.parametrize("headless", ["Qwen3Model"], indirect=True)
def test_a_server_of_a_model_without_a_head_refuses_to_generate(headless, prompts, exact, tmp_path):
    with serving(str(headless), "--dtype", "float32", "--max-model-len", "128", log=tmp_path / "log") as live:
        vector = live.client.post("/v1/embeddings", json={"input": prompts[2]}).json()["data"][0]["embedding"]
        torch.testing.assert_close(torch.tensor(vector), exact(prompts[2], "last"), atol=2e-5, rtol=1e-4)
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        for route, body in (("completions", {"prompt": "a"}), ("chat/completions", asked), ("messages", asked),
                            ("responses", {"input": "a"})):
            answer = live.client.post(f"/v1/{route}", json=body)
            assert answer.status_code == 400 and "only makes vectors" in answer.text, route


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value))


def test_the_checkpoint_says_how_it_pools(tmp_path):
    from slotwise.compose.model_defaults import read_pooling

    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Normalize")]
    assert read_pooling(tmp_path).of_family("cls").params == params.PoolingSpec("cls")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    write(tmp_path, "modules.json", modules)
    assert read_pooling(tmp_path).of_family("cls").params == params.PoolingSpec("mean")
    write(tmp_path, "modules.json", modules[:2])
    assert read_pooling(tmp_path).params == params.PoolingSpec("mean", normalize=False)
    chosen = read_pooling(tmp_path, {"seq_pooling_type": "LAST", "use_activation": True})
    assert chosen.of_family("cls").params == params.PoolingSpec("last")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False})
    assert read_pooling(tmp_path).params == params.PoolingSpec("cls", normalize=False)
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True})
    with pytest.raises(CheckpointError, match=r"sentence_bert_config.json: do_lower_case True is not supported"):
        read_pooling(tmp_path)
    scored = {"transformer_task": "sequence-classification", "module_output_name": "scores",
              "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}
    write(tmp_path, "sentence_bert_config.json", scored)  # as sentence-transformers saves a cross-encoder
    assert not read_pooling(tmp_path).objection
    write(tmp_path, "sentence_bert_config.json", scored | {"module_output_name": "token_embeddings"})
    with pytest.raises(CheckpointError, match="module_output_name 'token_embeddings' is not supported"):
        read_pooling(tmp_path)
    write(tmp_path, "sentence_bert_config.json", {"transformer_task": "text-generation"})
    assert "text-generation" in read_pooling(tmp_path).objection
    (tmp_path / "sentence_bert_config.json").unlink()
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True})
    assert "cls and max" in read_pooling(tmp_path).objection
    write(tmp_path, "modules.json", [*modules, {"type": "sentence_transformers.models.LSTM"}])
    assert "LSTM" in read_pooling(tmp_path).objection
    assert not read_pooling(tmp_path, {"pooling_type": "MEAN"}).objection
    write(tmp_path, "modules.json", [modules[0], modules[2], modules[1]])
    assert "order" in read_pooling(tmp_path).objection
    for wrong in ({"pooling_type": "FIRST"}, {"normalize": 1}, {"poling_type": "LAST"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            read_pooling(tmp_path, wrong)


def test_the_checkpoint_names_labels_prompts_and_dimensions(tmp_path):
    from slotwise.compose.model_defaults import read_pooling

    prompts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
    write(tmp_path, "config_sentence_transformers.json", prompts)
    write(tmp_path, "config.json", {"architectures": ["Qwen3Model"], "matryoshka_dimensions": [64, 32]})
    found = read_pooling(tmp_path)
    assert (found.prompted("x"), found.prompted("x", "document"), found.prompted("x", "")) == ("Q: x", "x", "x")
    with pytest.raises(params.InvalidParams, match="query, document"):
        found.prompted("x", "passage")
    assert found.chosen(32, normalize=None).dimensions == 32
    with pytest.raises(params.InvalidParams, match="64, 32"):
        found.chosen(48, normalize=None)
    with pytest.raises(params.InvalidParams, match="does not classify"):
        found.classifying()
    labels: dict[str, object] = {"architectures": ["BertForSequenceClassification"], "id2label": {"1": "b", "0": "a"}}
    for more, activation in (({}, "softmax"), ({"problem_type": "multi_label_classification"}, "sigmoid"),
                             ({"problem_type": "regression"}, ""), ({"id2label": {"0": "a"}}, "sigmoid"),
                             ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "")):
        write(tmp_path, "config.json", labels | more)
        found = read_pooling(tmp_path)
        assert found.labels == ("a", "b")[: 1 if "id2label" in more else 2] and "head of labels" in found.objection
        wanted = params.PoolingSpec("cls", normalize=False, task="classify", activation=activation)
        assert found.of_family("cls").classifying() == wanted
        assert found.classifying(is_activated=False).activation == ""


def test_a_server_gives_the_same_and_its_log_replays(folder, prompts, exact, tmp_path, openai):
    log = tmp_path / "events"
    arguments = (str(folder), "--dtype", "float32", "--max-model-len", "128", "--max-num-batched-tokens", "32",
                 "--max-num-seqs", "8", "--pooler-config", '{"pooling_type": "MEAN"}', "--event-log", str(log))
    with serving(*arguments, log=tmp_path / "log") as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        for dimensions in (None, 16):
            options = {} if dimensions is None else {"dimensions": dimensions}
            answer = client.embeddings.create(model=model, input=prompts, **options)
            assert answer.usage.prompt_tokens == sum(LENGTHS)
            for one, prompt in zip(answer.data, prompts, strict=True):
                wanted = exact(prompt, "mean", dimensions)
                torch.testing.assert_close(torch.tensor(one.embedding), wanted, atol=2e-5, rtol=1e-4)
        assert client.completions.create(model=model, prompt=prompts[2], max_tokens=3).usage.completion_tokens
        metrics = live.client.get("/metrics").text
        assert f'slotwise:request_success_total{{finished_reason="stop",model_name="{model}"}} {2 * len(prompts)}' in (
            metrics), [line for line in metrics.splitlines() if "request_success" in line]
    outcome = replay(log_file.read_file(log))
    assert outcome.difference is None and outcome.requests == 2 * len(prompts) + 1
