"""Measures vectors a second of an encoder: Slotwise, sentence-transformers and ONNX Runtime, float32, the same texts.

Each engine reads texts and returns normalized vectors, on all cores, in a process of its own; the rounds of the engines
take turns.  sentence-transformers and ONNX Runtime sort texts by length and pad each batch of 32 to its longest; the
graph of ONNX Runtime is exported from transformers' model, its mean and its norm included.  The result has the largest
difference between the vectors of an engine and those of sentence-transformers.

    python -m benchmarks.encoders --peer-python VENV/bin/python --output encoders-cpu.json

VENV has sentence-transformers, onnxruntime, onnx and torch.  The model is that of `slotwise pull minilm`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SLOTWISE, SENTENCES, ONNX = "slotwise", "sentence-transformers", "onnxruntime"
ENGINES = (SLOTWISE, SENTENCES, ONNX)
BATCH = 32  # texts of sentence-transformers' and ONNX Runtime's batches: sentence-transformers' default
WARM = 64  # texts before the measurement
LOADS = {  # words of a text, at least and at most; texts
    "queries": (4, 16, 1024), "passages": (60, 160, 192), "mixed": (4, 160, 384)}

Embed = Callable[[Sequence[str]], list[list[float]]]
"""Vectors of texts."""


def texts_of(load: str, seed: int = 0) -> list[str]:
    """Returns pieces of this repository's documentation of random lengths."""
    words = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))).split()
    least, most, count = LOADS[load]
    draw = random.Random(seed)
    pieces = []
    for _ in range(count):
        first, length = draw.randrange(len(words) - most), draw.randint(least, most)
        pieces.append(" ".join(words[first : first + length]))
    return pieces


def _slotwise(model: str) -> tuple[Embed, str]:
    from slotwise import LLM
    from slotwise.version import __version__

    llm = LLM(model, dtype="float32")

    def embed(texts: Sequence[str]) -> list[list[float]]:
        return [one.outputs.embedding for one in llm.embed(list(texts), use_tqdm=False)]

    return embed, __version__


def _sentence_transformers(model: str) -> tuple[Embed, str]:
    import sentence_transformers

    encoder = sentence_transformers.SentenceTransformer(model, device="cpu")
    return (lambda texts: encoder.encode(list(texts), batch_size=BATCH).tolist()), sentence_transformers.__version__


def _onnxruntime(model: str) -> tuple[Embed, str]:
    import numpy as np
    import onnxruntime
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        _export(model, path := f"{folder}/model.onnx")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def embed(texts: Sequence[str]) -> list[list[float]]:
        encoded = tokenizer.encode_batch_fast(list(texts))
        order = sorted(range(len(texts)), key=lambda place: -sum(encoded[place].attention_mask))
        found: list[list[float]] = [[]] * len(texts)
        for first in range(0, len(order), BATCH):
            places = order[first : first + BATCH]
            longest = sum(encoded[places[0]].attention_mask)
            ids, mask, types = (np.array([getattr(encoded[place], name)[:longest] for place in places], np.int64)
                                for name in ("ids", "attention_mask", "type_ids"))
            (vectors,) = session.run(None, {"input_ids": ids, "attention_mask": mask, "token_type_ids": types})
            for place, vector in zip(places, vectors.tolist(), strict=True):
                found[place] = vector
        return found

    return embed, onnxruntime.__version__


def _export(model: str, path: str) -> None:
    """Writes the model, a mean over the tokens and a norm as one graph."""
    import torch
    from transformers import AutoModel

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = AutoModel.from_pretrained(model, dtype="float32", attn_implementation="eager").eval()

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            hidden = self.inner(input_ids, attention_mask, token_type_ids).last_hidden_state
            weights = attention_mask.unsqueeze(-1).float()
            return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1))

    sample = torch.ones(2, 8, dtype=torch.int64)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "texts", 1: "tokens"} for name in names} | {"vectors": {0: "texts"}}
    with torch.inference_mode():
        torch.onnx.export(Pooled(), (sample, sample, sample * 0), path, input_names=names, output_names=["vectors"],
                          dynamic_axes=axes, dynamo=False)


MAKERS = {SLOTWISE: _slotwise, SENTENCES: _sentence_transformers, ONNX: _onnxruntime}


def work(engine: str, model: str) -> None:
    """Reads one line of JSON for each measurement, a list of texts, and answers with seconds and vectors."""
    with open(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        embed, version = MAKERS[engine](model)
        print(json.dumps(version), file=answers, flush=True)
        for line in sys.stdin:
            texts = json.loads(line)
            embed(texts[:WARM])
            began = time.perf_counter()
            vectors = embed(texts)
            print(json.dumps([time.perf_counter() - began, vectors]), file=answers, flush=True)


class Worker:
    """A process with one engine, which runs only while it is asked."""

    def __init__(self, python: str, engine: str, model: str) -> None:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "TOKENIZERS_PARALLELISM": "true"}
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.encoders", "--worker", engine, "--model", model], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.version = self._answer()

    def measure(self, texts: Sequence[str]) -> tuple[float, list[list[float]]]:
        """Seconds and vectors."""
        assert self._process.stdin is not None
        print(json.dumps(texts), file=self._process.stdin, flush=True)
        seconds, vectors = self._answer()
        return seconds, vectors

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self._process.args))} ended")  # type: ignore[arg-type]
        return json.loads(line)


def measure(model: str, peer_python: str, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each load and engine."""
    from slotwise.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model)
    workers = {engine: Worker(sys.executable if engine == SLOTWISE else peer_python, engine, model)
               for engine in ENGINES}
    rows = []
    try:
        for load in LOADS:
            texts = texts_of(load)
            lengths = [len(tokenizer.encode(text)) for text in texts]
            seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
            vectors: dict[str, list[list[float]]] = {}
            for _ in range(rounds):
                for engine, worker in workers.items():
                    taken, vectors[engine] = worker.measure(texts)
                    seconds[engine].append(taken)
            for engine, worker in workers.items():
                off = max(abs(one - other) for pair in zip(vectors[engine], vectors[SENTENCES], strict=True)
                          for one, other in zip(*pair, strict=True))
                rows.append({
                    "load": load, "engine": engine, "version": worker.version, "texts": len(texts),
                    "tokens": sum(lengths), "shortest": min(lengths), "median": statistics.median(lengths),
                    "longest": max(lengths), "seconds": seconds[engine], "difference": off,
                    "tokens_s": sum(lengths) / statistics.median(seconds[engine])})
                print(f"{load:<10}{engine:<24}{rows[-1]['tokens_s']:>10,.0f} tokens/s  difference {off:.1e}",
                      file=sys.stderr)
    finally:
        for worker in workers.values():
            worker.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", help="a folder, or a name that `slotwise pull` knows")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python of the other engines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="file in benchmarks/results; nothing is written by default")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, asked.model)
        return
    from slotwise.compute.model.model_registry import find
    from slotwise.measure.bench.results import environment, write_json

    rows = measure(str(find(asked.model).path), asked.peer_python, asked.rounds)
    if asked.output:
        write_json(ROOT / "benchmarks" / "results" / asked.output, {**environment(), "encoders": rows})


if __name__ == "__main__":
    main()
