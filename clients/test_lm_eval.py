"""EleutherAI's lm-evaluation-harness, with tasks over a file of this repository.

Its log-likelihoods are compared with those that transformers computes of the same checkpoint.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from servers import BUILTIN, PROMPT, ROOT, Server

CLIENT = "`lm-eval`"
VERSION = version("lm-eval")
SETTING = "`base_url` is the whole address of the route ([the command](#evaluate-a-model))."
PROGRAM = Path(sys.executable).with_name("lm_eval")
TASKS = ROOT / "clients" / "tasks"
DOCS = [json.loads(line) for line in (TASKS / "signatures.jsonl").read_text().splitlines()]
MAX_GEN_TOKS = 24
WITHIN = 2e-3  # of a log-likelihood, summed over tokens in float32
COMMAND = re.compile(r"^```\n(lm_eval .*?)^```", re.DOTALL | re.MULTILINE)
Samples = list[dict[str, Any]]  # of a task, in the order of its file
Likelihood = Callable[[str, str], tuple[float, bool]]


@pytest.fixture(scope="module")
def page(builtin: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Samples]:
    """What the page's command gives, by task."""
    folder = tmp_path_factory.mktemp("results")
    (command,) = COMMAND.findall((ROOT / "docs" / "clients.md").read_text())
    program, *given = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", builtin.url))
    assert program == "lm_eval"
    done = subprocess.run(
        [PROGRAM, *given, "--output_path", str(folder), "--log_samples"],
        cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    files = {path.name.split("_20")[0].removeprefix("samples_"): path for path in folder.rglob("samples_*.jsonl")}
    return {task: _in_order(map(json.loads, path.read_text().splitlines())) for task, path in files.items()}


def evaluated(task: str | dict[str, Any], model: str, server: Server, route: str, **more: Any) -> Samples:
    """The samples of a task through the harness's Python interface."""
    given = {"model": server.model, "base_url": f"{server.base_url}/{route}", "header": {
        "Authorization": f"Bearer {server.key}"}} | more.pop("model_args", {})
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, model_args=given, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0, **more)
    (samples,) = found["samples"].values()
    return _in_order(samples)


def _in_order(samples: Iterable[dict[str, Any]]) -> Samples:
    return sorted(samples, key=lambda sample: sample["doc_id"])


@pytest.fixture(scope="module")
def likelihood() -> Likelihood:
    """transformers' log-likelihood of a text after another one, and whether it is the greedy continuation."""
    import torch
    from support.checkpoints import one_thread, reference_model
    from transformers import AutoTokenizer

    model, tokenizer = reference_model(BUILTIN, "float32"), AutoTokenizer.from_pretrained(BUILTIN)

    def of(context: str, text: str) -> tuple[float, bool]:
        start = tokenizer(context, add_special_tokens=False).input_ids or [tokenizer.bos_token_id]
        ids = tokenizer(context + text, add_special_tokens=False).input_ids
        ids = ids if context else start + ids
        with torch.inference_mode(), one_thread():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)[len(start) - 1:-1]
        wanted = torch.tensor(ids[len(start):])
        return logprobs.gather(1, wanted[:, None]).sum().item(), logprobs.argmax(-1).equal(wanted)

    return of


def test_the_page(page: dict[str, Samples]) -> None:
    """The command of [Evaluate a model](#evaluate-a-model), as it is written there."""
    assert page.keys() == {"signature_choice", "signature_body", "signature_perplexity"}
    assert {len(samples) for samples in page.values()} == {len(DOCS)}


def test_choice(page: dict[str, Samples], likelihood: Likelihood) -> None:
    """`local-completions`: multiple choice; the log-likelihoods are those that `transformers` computes."""
    for doc, sample in zip(DOCS, page["signature_choice"], strict=True):
        for body, (response,) in zip(doc["bodies"], sample["resps"], strict=True):
            expected, greedy = likelihood(doc["signature"], body)
            assert float(response[0]) == pytest.approx(expected, abs=WITHIN)
            assert str(response[1]) == str(greedy)


def test_perplexity(page: dict[str, Samples], likelihood: Likelihood) -> None:
    """`local-completions`: perplexity of whole texts (`loglikelihood_rolling`), as `transformers` has it."""
    for doc, sample in zip(DOCS, page["signature_perplexity"], strict=True):
        expected, _ = likelihood("", doc["signature"] + doc["bodies"][doc["answer"]])
        assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=WITHIN)


def test_generation(page: dict[str, Samples], builtin: Server) -> None:
    """`local-completions`: generation until stop strings, from token ids."""
    for doc, sample in zip(DOCS, page["signature_body"], strict=True):
        ids = builtin.post("/tokenize", prompt=doc["signature"], add_special_tokens=False)["tokens"]
        assert sample["resps"][0][0] == until_definition(builtin.completion(ids, MAX_GEN_TOKS))


def test_batches(builtin: Server, likelihood: Likelihood) -> None:
    """`local-completions` with `batch_size`: several prompts in one request."""
    samples = evaluated("signature_choice", "local-completions", builtin, "completions", batch_size=4, model_args={
        "tokenizer_backend": "huggingface", "tokenizer": str(BUILTIN)})
    for doc, sample in zip(DOCS, samples, strict=True):
        found = [float(response[0]) for (response,) in sample["resps"]]
        assert found == pytest.approx([likelihood(doc["signature"], body)[0] for body in doc["bodies"]], abs=WITHIN)


def test_long_prompts(builtin: Server, tmp_path: Path) -> None:
    """`local-completions` with `max_length`: prompts are cut to exactly what the server can hold."""
    longest = builtin.http.get("/v1/models").json()["data"][0]["max_model_len"]
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": PROMPT + "\n        pass" * longest, "body": " pass"}))
    files = {"data_files": {"test": str(tmp_path / "long.jsonl")}}
    task = {"task": "long", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test",
            "output_type": "loglikelihood", "doc_to_text": "text", "doc_to_target": "body", "target_delimiter": "",
            "metric_list": [{"metric": "acc"}]}
    (sample,) = evaluated(task, "local-completions", builtin, "completions", model_args={
        "tokenizer_backend": "huggingface", "tokenizer": str(BUILTIN), "max_length": longest, "max_retries": 1})
    ((likelihood, _),) = sample["resps"][0]
    assert float(likelihood) < 0


def test_without_a_tokenizer(builtin: Server) -> None:
    """`local-completions` with `tokenizer_backend=None`: generation from texts, several at once."""
    samples = evaluated("signature_body", "local-completions", builtin, "completions", model_args={
        "tokenizer_backend": None, "num_concurrent": 4})
    for doc, sample in zip(DOCS, samples, strict=True):
        assert sample["resps"][0][0] == until_definition(builtin.completion(doc["signature"], MAX_GEN_TOKS))


def test_chat(chat: Server) -> None:
    """`local-chat-completions` with `apply_chat_template` and a system message."""
    samples = evaluated("signature_body", "local-chat-completions", chat, "chat/completions",
                        apply_chat_template=True, system_instruction="Write code.")
    for doc, sample in zip(DOCS, samples, strict=True):
        turns = [{"role": "system", "content": "Write code."}, {"role": "user", "content": doc["signature"]}]
        assert sample["resps"][0][0] == until_definition(chat.chat(turns, MAX_GEN_TOKS))


def until_definition(text: str) -> str:
    return re.split("\ndef |\nclass ", text)[0]
