"""Measures an encoder's vectors and scores: Slotwise, sentence-transformers and ONNX Runtime, float32, the same texts.

Each engine reads texts and returns normalized vectors, or reads pairs of a query and a document and returns scores, on
all cores, in a process of its own; the rounds of the engines take turns.  sentence-transformers and ONNX Runtime sort
texts by length and pad each batch of 32 to its longest; the graph of ONNX Runtime is exported from transformers' model,
from the tokens to the normalized mean or to the score.  The result has the largest difference between the numbers of an
engine and those of sentence-transformers.

    python -m benchmarks.encoders --peer-python VENV/bin/python --output encoders-cpu.json
    python -m benchmarks.encoders --task score --peer-python VENV/bin/python --output ranking-cpu.json

VENV has sentence-transformers, onnxruntime, onnx and torch.  The model is that of `slotwise pull minilm`; for scores,
it gets a pooler and a head of one label with random weights, which cost what trained ones do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SLOTWISE, SENTENCES, ONNX = "slotwise", "sentence-transformers", "onnxruntime"
ENGINES = (SLOTWISE, SENTENCES, ONNX)
BATCH = 32  # texts of sentence-transformers' and ONNX Runtime's batches: sentence-transformers' default
WARM = 64  # texts before the measurement
EMBED, SCORE = "embed", "score"
LOADS = {  # words of a text, at least and at most; texts
    "queries": (4, 16, 1024), "passages": (60, 160, 192), "mixed": (4, 160, 384)}
DOCUMENTS = {  # words of a document, at least and at most; queries, and documents that each is paired with
    "sentences": (6, 16, 32, 32), "paragraphs": (40, 90, 16, 32)}

Input = str | tuple[str, str]
"""A text, or a query and a document."""
Numbers = list[list[float]]
"""The vector of every text, or the score of every pair, alone in its list."""
Read = Callable[[Sequence[Input]], Numbers]


def texts_of(least: int, most: int, count: int, seed: int = 0) -> list[str]:
    """Returns pieces of this repository's documentation, of `least` to `most` words."""
    words = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))).split()
    draw = random.Random(seed)
    pieces = []
    for _ in range(count):
        first, length = draw.randrange(len(words) - most), draw.randint(least, most)
        pieces.append(" ".join(words[first : first + length]))
    return pieces


def inputs_of(task: str) -> dict[str, Sequence[Input]]:
    """Returns what each load of a task reads."""
    if task == EMBED:
        return {load: texts_of(*sizes) for load, sizes in LOADS.items()}
    found: dict[str, Sequence[Input]] = {}
    for load, (least, most, num_queries, num_documents) in DOCUMENTS.items():
        queries = texts_of(4, 16, num_queries, seed=1)
        documents = texts_of(least, most, num_queries * num_documents)
        found[load] = [(queries[index // num_documents], document) for index, document in enumerate(documents)]
    return found


def write_cross_encoder(encoder: Path, folder: Path, seed: int = 0) -> None:
    """Writes the layers of a BERT with a random pooler and a random head of one label."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((encoder / "config.json").read_text())
    drawn, size = torch.Generator().manual_seed(seed), config["hidden_size"]

    def product(outputs: int) -> torch.Tensor:
        return torch.randn(outputs, size, generator=drawn) / size ** 0.5

    weights = {f"bert.{name}": weight for name, weight in load_file(encoder / "model.safetensors").items()
               if name.startswith(("embeddings.", "encoder.")) and name != "embeddings.position_ids"}
    weights |= {"bert.pooler.dense.weight": product(size), "bert.pooler.dense.bias": torch.zeros(size),
                "classifier.weight": product(1), "classifier.bias": torch.zeros(1)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {
        "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}))
    for path in encoder.glob("*token*.json"):
        shutil.copy(path, folder)


def _slotwise(model: str, task: str) -> tuple[Read, str]:
    from slotwise import LLM
    from slotwise.version import __version__

    llm = LLM(model, dtype="float32")

    def embed(texts: Sequence[Any]) -> Numbers:
        return [one.outputs.embedding for one in llm.embed(list(texts), use_tqdm=False)]

    def score(pairs: Sequence[Any]) -> Numbers:
        queries, documents = zip(*pairs, strict=True)
        return [[one.outputs.score] for one in llm.score(queries, documents, use_tqdm=False)]

    return (embed if task == EMBED else score), __version__


def _sentence_transformers(model: str, task: str) -> tuple[Read, str]:
    import sentence_transformers

    def embed(texts: Sequence[Any]) -> Numbers:
        found: Numbers = encoder.encode(list(texts), batch_size=BATCH).tolist()
        return found

    def score(pairs: Sequence[Any]) -> Numbers:
        return [[one] for one in encoder.predict(list(pairs), batch_size=BATCH).tolist()]

    name = "SentenceTransformer" if task == EMBED else "CrossEncoder"
    encoder = getattr(sentence_transformers, name)(model, device="cpu")
    return (embed if task == EMBED else score), sentence_transformers.__version__


def _onnxruntime(model: str, task: str) -> tuple[Read, str]:
    import numpy as np
    import onnxruntime
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        _export(model, task, path := f"{folder}/model.onnx")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def read(texts: Sequence[Input]) -> Numbers:
        encoded = tokenizer.encode_batch_fast(list(texts))
        order = sorted(range(len(texts)), key=lambda place: -sum(encoded[place].attention_mask))
        found: Numbers = [[]] * len(texts)
        for first in range(0, len(order), BATCH):
            places = order[first : first + BATCH]
            longest = sum(encoded[places[0]].attention_mask)
            ids, mask, types = (np.array([getattr(encoded[place], name)[:longest] for place in places], np.int64)
                                for name in ("ids", "attention_mask", "type_ids"))
            (numbers,) = session.run(None, {"input_ids": ids, "attention_mask": mask, "token_type_ids": types})
            for place, row in zip(places, numbers.tolist(), strict=True):
                found[place] = row
        return found

    return read, onnxruntime.__version__


def _export(model: str, task: str, path: str) -> None:
    """Writes one graph: the model, and a mean over the tokens and a norm, or a sigmoid."""
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = AutoModel if task == EMBED else AutoModelForSequenceClassification
            self.inner = kind.from_pretrained(model, dtype="float32", attn_implementation="eager").eval()

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            outputs = self.inner(input_ids, attention_mask, token_type_ids)
            if task == SCORE:
                return torch.sigmoid(outputs.logits)
            weights = attention_mask.unsqueeze(-1).float()
            return torch.nn.functional.normalize((outputs.last_hidden_state * weights).sum(1) / weights.sum(1))

    sample = torch.ones(2, 8, dtype=torch.int64)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "texts", 1: "tokens"} for name in names} | {"numbers": {0: "texts"}}
    with torch.inference_mode():
        torch.onnx.export(Pooled(), (sample, sample, sample * 0), path, input_names=names, output_names=["numbers"],
                          dynamic_axes=axes, dynamo=False)


MAKERS = {SLOTWISE: _slotwise, SENTENCES: _sentence_transformers, ONNX: _onnxruntime}


def work(engine: str, model: str, task: str) -> None:
    """Reads one line of JSON for each measurement, a list of texts or pairs, and answers with seconds and numbers."""
    with open(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # libraries print to stderr: stdout carries the answers
        read, version = MAKERS[engine](model, task)
        print(json.dumps(version), file=answers, flush=True)
        for line in sys.stdin:
            inputs = [one if isinstance(one, str) else tuple(one) for one in json.loads(line)]
            read(inputs[:WARM])
            began = time.perf_counter()
            numbers = read(inputs)
            print(json.dumps([time.perf_counter() - began, numbers]), file=answers, flush=True)


class Worker:
    """A process with one engine, which runs only while it is asked."""

    def __init__(self, python: str, engine: str, model: str, task: str) -> None:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "TOKENIZERS_PARALLELISM": "true"}
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.encoders", "--worker", engine, "--model", model, "--task", task],
            env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL)
        self.version = self._answer()

    def measure(self, inputs: Sequence[Input]) -> tuple[float, Numbers]:
        """Seconds and numbers."""
        assert self._process.stdin is not None
        print(json.dumps(inputs), file=self._process.stdin, flush=True)
        seconds, numbers = self._answer()
        return seconds, numbers

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self._process.args))} ended")  # type: ignore[arg-type]
        return json.loads(line)


def measure(
    model: str, task: str, peer_python: str, rounds: int, loads: Sequence[str],
) -> Iterator[list[dict[str, Any]]]:
    """Yields for each load a row of every engine."""
    from slotwise.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model)
    workers = {engine: Worker(sys.executable if engine == SLOTWISE else peer_python, engine, model, task)
               for engine in ENGINES}
    try:
        for load, inputs in inputs_of(task).items():
            if loads and load not in loads:
                continue
            rows = []
            lengths = [len(tokenizer.encode(one) if isinstance(one, str) else tokenizer.encode_pair(*one))
                       for one in inputs]
            seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
            numbers: dict[str, Numbers] = {}
            for _ in range(rounds):
                for engine, worker in workers.items():
                    taken, numbers[engine] = worker.measure(inputs)
                    seconds[engine].append(taken)
            for engine, worker in workers.items():
                off = max(abs(one - other) for pair in zip(numbers[engine], numbers[SENTENCES], strict=True)
                          for one, other in zip(*pair, strict=True))
                spent = statistics.median(seconds[engine])
                rows.append({
                    "load": load, "engine": engine, "version": worker.version, "texts": len(inputs),
                    "tokens": sum(lengths), "shortest": min(lengths), "median": statistics.median(lengths),
                    "longest": max(lengths), "seconds": seconds[engine], "difference": off,
                    "least": min(map(min, numbers[engine])), "most": max(map(max, numbers[engine])),
                    "texts_s": len(inputs) / spent, "tokens_s": sum(lengths) / spent})
                print(f"{load:<12}{engine:<24}{rows[-1]['texts_s']:>8,.0f} a second {rows[-1]['tokens_s']:>10,.0f} "
                      f"tokens/s  difference {off:.1e}", file=sys.stderr)
            yield rows
    finally:
        for worker in workers.values():
            worker.close()


def keep(file: Path, task: str, rows: list[dict[str, Any]]) -> None:
    """Adds the rows of a load to a file, in place of those that it has of the same load."""
    from slotwise.measure.bench.results import environment, write_json

    of_load: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(file.read_text())["encoders"] if file.exists() else []:
        of_load.setdefault(row["load"], []).append(row)
    of_load[rows[0]["load"]] = rows
    order = [load for load in inputs_of(task) if load in of_load]
    write_json(file, {**environment(), "encoders": [row for load in order for row in of_load[load]]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", help="a folder, or a name that `slotwise pull` knows")
    parser.add_argument("--task", choices=(EMBED, SCORE), default=EMBED, help="vectors of texts, or scores of pairs")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python of the other engines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", default=[], choices=[*LOADS, *DOCUMENTS], help="only these loads")
    parser.add_argument("--output", help="file in benchmarks/results that gets the rows")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, asked.model, asked.task)
        return
    from slotwise.compute.model.model_registry import find

    with tempfile.TemporaryDirectory() as folder:
        model = Path(find(asked.model).path)
        if asked.task == SCORE:
            write_cross_encoder(model, model := Path(folder))
        for rows in measure(str(model), asked.task, asked.peer_python, asked.rounds, asked.loads):
            if asked.output:
                keep(ROOT / "benchmarks" / "results" / asked.output, asked.task, rows)


if __name__ == "__main__":
    main()
