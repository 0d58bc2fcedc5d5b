"""EleutherAI's lm-evaluation-harness, with tasks over a file of this repository.

Its log-likelihoods are compared with those that transformers computes of the same checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from servers import BUILTIN, ROOT, Server

CLIENT = "`lm-eval`"
VERSION = version("lm-eval")
PROGRAM = Path(sys.executable).with_name("lm_eval")
TASKS = ROOT / "clients" / "tasks"
DOCS = [json.loads(line) for line in (TASKS / "signatures.jsonl").read_text().splitlines()]
MAX_GEN_TOKS = 24
WITHIN = 2e-3  # of a log-likelihood, summed over tokens in float32
COMMAND = re.compile(r"^```\n(lm_eval .*?)^```", re.DOTALL | re.MULTILINE)
Samples = list[dict[str, Any]]
Run = Callable[..., dict[str, Samples]]


@pytest.fixture
def run(tmp_path: Path, chat: Server) -> Run:
    """Runs lm_eval and returns the samples of each task, in the order of the file."""
    def lm_eval(*arguments: str) -> dict[str, Samples]:
        done = subprocess.run(
            [PROGRAM, *arguments, "--include_path", str(TASKS), "--output_path", str(tmp_path), "--log_samples"],
            cwd=ROOT, env=os.environ | {"OPENAI_API_KEY": chat.key}, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        return {path.name.split("_20")[0].removeprefix("samples_"): _samples(path)
                for path in tmp_path.rglob("samples_*.jsonl")}

    return lm_eval


def _samples(path: Path) -> Samples:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def arguments(server: Server, route: str, *tasks: str, model: str = "local-completions", **more: object) -> list[str]:
    given = {"model": server.model, "base_url": f"{server.base_url}/{route}"} | more
    return ["--model", model, "--model_args", ",".join(f"{name}={value}" for name, value in given.items()),
            "--tasks", ",".join(tasks)]


@pytest.fixture(scope="module")
def likelihood() -> Callable[[str, str], tuple[float, bool]]:
    """transformers' log-likelihood of a text after another one, and whether it is the greedy continuation."""
    import torch
    from checkpoints import one_thread, reference_model
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


def test_likelihoods(builtin: Server, run: Run, likelihood: Callable[[str, str], tuple[float, bool]]) -> None:
    """`local-completions`: multiple choice by log-likelihood; the values are those of transformers."""
    (samples,) = run(*arguments(builtin, "completions", "signature_choice", tokenizer_backend="huggingface",
                                tokenizer=BUILTIN, num_concurrent=4)).values()
    assert len(samples) == len(DOCS)
    for doc, sample in zip(DOCS, samples, strict=True):
        for body, (response,) in zip(doc["bodies"], sample["resps"], strict=True):
            expected, greedy = likelihood(doc["signature"], body)
            assert float(response[0]) == pytest.approx(expected, abs=WITHIN)
            assert str(response[1]) == str(greedy)


def test_batches(builtin: Server, run: Run, likelihood: Callable[[str, str], tuple[float, bool]]) -> None:
    """`local-completions` with `batch_size`: several prompts of token ids in one request."""
    (samples,) = run(*arguments(builtin, "completions", "signature_choice", tokenizer_backend="huggingface",
                                tokenizer=BUILTIN), "--batch_size", "4").values()
    first = [float(response[0]) for (response,) in samples[0]["resps"]]
    expected = [likelihood(DOCS[0]["signature"], body)[0] for body in DOCS[0]["bodies"]]
    assert first == pytest.approx(expected, abs=WITHIN)


def test_perplexity(builtin: Server, run: Run, likelihood: Callable[[str, str], tuple[float, bool]]) -> None:
    """`local-completions`: perplexity of whole texts (`loglikelihood_rolling`), as transformers has it."""
    (samples,) = run(*arguments(builtin, "completions", "signature_perplexity", tokenizer_backend="huggingface",
                                tokenizer=BUILTIN)).values()
    for doc, sample in zip(DOCS, samples, strict=True):
        expected, _ = likelihood("", doc["signature"] + doc["bodies"][doc["answer"]])
        assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=WITHIN)


def test_generation(builtin: Server, run: Run) -> None:
    """`local-completions`: generation until stop strings, without a tokenizer on the client's side."""
    (samples,) = run(*arguments(builtin, "completions", "signature_body", tokenizer_backend="none",
                                num_concurrent=4)).values()
    for doc, sample in zip(DOCS, samples, strict=True):
        text = builtin.completion(doc["signature"], MAX_GEN_TOKS)
        assert sample["resps"][0][0] == re.split("\ndef |\nclass ", text)[0]


def test_chat(chat: Server, run: Run) -> None:
    """`local-chat-completions` with `--apply_chat_template` and a system message."""
    (samples,) = run(*arguments(chat, "chat/completions", "signature_body", model="local-chat-completions"),
                     "--apply_chat_template", "--system_instruction", "Write code.").values()
    for doc, sample in zip(DOCS, samples, strict=True):
        turns = [{"role": "system", "content": "Write code."}, {"role": "user", "content": doc["signature"]}]
        assert sample["resps"][0][0] == chat.chat(turns, MAX_GEN_TOKS)


def test_the_page(builtin: Server, run: Run) -> None:
    """The command of [Evaluate a model](#evaluate-a-model), as it is written there."""
    (command,) = COMMAND.findall((ROOT / "docs" / "clients.md").read_text())
    program, *given = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", builtin.url))
    assert program == "lm_eval"
    assert run(*given).keys() == {"signature_choice", "signature_body"}
