"""Measures what each type of weights and of cache costs a model: the real one, another one or the built-in one.

A model reads the frozen texts of `benchmarks.real_texts`: the real one license, documentation and code of this
repository, in windows of 1,024 tokens, the built-in one functions held out of its training.  The result has a digest of
them, for only the same windows compare.  It is computed as in serving: the same decoder and kernels, over a paged
cache, and int4 calibrated.

    perplexity            over all tokens but each text's first
    greedy tokens kept    the share of these places where the most probable token is that of the first row, float32

OpenVINO reads the same windows in an environment of its own, from folders that `optimum-cli export openvino` made
(`benchmarks/peers/openvino_perplexity.py`).

    python -m benchmarks.perplexity --output perplexity-cpu.json --openvino ENVIRONMENT/bin/python int8=FOLDER ...
    python -m benchmarks.perplexity --model builtin --output perplexity-builtin-cpu.json
    python -m benchmarks.perplexity --model builtin --blocks    # all matrices in each type of GGUF
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.commands import parser_of
from benchmarks.real_texts import WINDOW, documents, functions, windows
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from slotwise import builtin
from slotwise.compute.kernels.interface import Kernels, RaggedBatch
from slotwise.compute.kernels.matrix import Factors, Format, QuantizedMatrix, Rows, Weight, stacked
from slotwise.compute.kernels.select import choose, packing_of
from slotwise.compute.model.calibration import center, read_calibrated
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.model.family_table import tensor_shapes
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES
from slotwise.compute.model.loading import describe, load_model
from slotwise.compute.model.model_registry import find
from slotwise.compute.model.weights import CheckpointWeights
from slotwise.measure.bench.results import environment, write_json
from slotwise.text.tokenizer import Tokenizer

KINDS = (  # dtype, quantization, kv_cache_dtype
    ("float32", "none", "auto"), ("bfloat16", "none", "auto"), ("bfloat16", "none", "int8"),
    ("float32", "none", "int8"), ("bfloat16", "int8", "auto"), ("bfloat16", "int8", "int8"),
    ("bfloat16", "int4", "auto"), ("float32", "int8", "auto"), ("float32", "int4", "auto"))
BLOCK = 64  # tokens
STEP = 512  # tokens
REAL, BUILTIN = "smollm2", "builtin"
TINY = 1e-12
SHARES = (1.0, 1.1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


def windows_of(path: Path) -> list[list[int]]:
    """Returns windows of the frozen texts, in token ids of the model at `path`: as they are where they are its own."""
    frozen, theirs, own = windows(), Tokenizer.load(find(REAL).path), Tokenizer.load(path)
    if own.inner.get_vocab() == theirs.inner.get_vocab():
        return frozen
    found = []
    for document in documents().values():
        ids = own.encode(theirs.decode(document, skip_special_tokens=False), add_special_tokens=False)
        found += [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
    return found


def steps(texts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yields texts in steps of about `STEP` tokens."""
    gathered: list[list[int]] = []
    for text in texts:
        if gathered and sum(map(len, gathered)) + len(text) > STEP:
            yield gathered
            gathered = []
        gathered.append(text)
    yield gathered


def as_batch(texts: list[list[int]]) -> RaggedBatch:
    """Returns a batch of whole texts as rows, each with blocks of its own and logits at every position."""
    lengths = torch.tensor([len(text) for text in texts])
    blocks = -(-lengths // BLOCK)
    firsts = blocks.cumsum(0) - blocks
    width = int(blocks.max())
    tables = (firsts[:, None] + torch.arange(width)).clamp_max(int(blocks.sum()) - 1)
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    starts = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    return RaggedBatch(
        token_ids=torch.tensor([token for text in texts for token in text]), positions=positions,
        slot_mapping=positions + firsts.repeat_interleave(lengths) * BLOCK, query_starts=starts.int(),
        context_lens=lengths.int(), block_tables=tables.int(), sample_at=torch.arange(int(starts[-1])),
        max_query_len=int(lengths.max()), max_context_len=int(lengths.max()))


class Score(NamedTuple):
    """What a model makes of texts."""

    nats: float  # over all tokens but each text's first
    count: int  # of these tokens
    greedy: Tensor  # [count] int64, the most probable token at each of these places

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.count)

    def kept(self, exact: Score) -> float:
        """The share of greedy tokens that are those of another model."""
        return float((self.greedy == exact.greedy).double().mean())


def score(decoder: Decoder, texts: list[list[int]]) -> Score:
    """Returns what the model makes of the texts, read in steps."""
    longest = max(map(len, texts))
    num_blocks = (STEP + longest) // BLOCK + STEP
    caches = [decoder.kernels.allocate_cache(num_blocks, BLOCK, shape, decoder.config.dtype)
              for shape in decoder.layer_shapes]
    nats, greedy = 0.0, []
    for gathered in steps(texts):
        batch = as_batch(gathered)
        logits: Tensor = decoder.logits(decoder.hidden(batch, caches)).float()
        follows = batch.positions[1:] > 0
        taken = torch.log_softmax(logits[:-1], dim=-1).gather(1, batch.token_ids[1:, None])[:, 0]
        nats -= float(taken[follows].double().sum())
        greedy.append(logits[:-1].argmax(-1)[follows])
    found = torch.cat(greedy)
    return Score(nats, len(found), found)


def of_blocks(name: str) -> Decoder:
    """The model with all matrices in a type of GGUF, and float32 for the rest."""
    kernels = choose("cpu")
    config = describe(builtin.path(), "float32", kernels)
    read = CheckpointWeights(builtin.path()).reader(tensor_shapes(config), config.dtype)

    def read_rounded(*names: str) -> Weight:
        tensors = [read(name) for name in names]
        return torch.cat(tensors) if tensors[0].dim() == 1 else stacked([rounded(each, name) for each in tensors])

    return Decoder(config, read_rounded, kernels, config.max_position_embeddings)


def widened(path: Path, dtype: str, quantization: str, cached: str) -> Decoder:
    """A checkpoint with all weights as plain numbers of `dtype`, which the kernels quantize as they pack them."""
    kernels = choose("cpu", quantization, cached)
    config, weights = describe(path, dtype, kernels), CheckpointWeights(path)
    shapes = tensor_shapes(config)
    weights.assemble(config.quantization, shapes)
    weights.widen(weights.formats(shapes))
    return as_served(kernels, lambda: Decoder(config, weights.reader(shapes, config.dtype), kernels, WINDOW))


def as_served(kernels: Kernels, read: Callable[[], Decoder]) -> Decoder:
    """A model as an engine reads it: calibrated, if its format gains from that, and centered."""
    packing = packing_of(kernels)
    decoder = read_calibrated(packing, read, lambda done, total: None) if packing.compensates else read()
    center(decoder, packing, WINDOW)
    return decoder


def of_model(path: Path) -> Iterator[tuple[str, str, Decoder]]:
    """Yields what `decoders` does for a checkpoint, and where its weights are quantized the model as it is stored."""
    for dtype, quantization, cached in KINDS:
        yield dtype if quantization == "none" else f"{quantization}, {dtype}", cached, widened(
            path, dtype, quantization, cached)
    kernels = choose("cpu")
    stored = as_served(kernels, partial(load_model, path, kernels=kernels, max_positions=WINDOW))
    if stored.config.quantization is not None:
        yield stored.config.quantization.description, "auto", stored


def about(path: Path, texts: list[list[int]]) -> dict[str, Any]:
    """What a result says of the model, its texts and this machine."""
    is_builtin = path == builtin.path()
    with (path / "model.safetensors" if path.is_dir() else path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "version": 1, "environment": environment(), "model": BUILTIN if is_builtin else path.name,
        "model_sha256": digest, "texts": "functions of Python's library, as benchmarks/builtin_texts.json has them"
        if is_builtin else "license, documentation and code of this repository, as benchmarks/real_texts.json has them",
        "windows": len(texts), "longest": max(map(len, texts)),
        "windows_sha256": hashlib.sha256(json.dumps(texts).encode()).hexdigest()}


def of_openvino(python: str, folder: str, texts: list[list[int]]) -> tuple[str, Score]:
    """OpenVINO's version, and what a model exported to `folder` makes of the texts."""
    script = Path(__file__).parent / "peers" / "openvino_perplexity.py"
    run = subprocess.run([python, str(script), folder], input=json.dumps(texts), stdout=subprocess.PIPE, text=True,
                         check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    return found["version"], Score(found["nats"], len(found["greedy"]), torch.tensor(found["greedy"]))


def decoders(*, blocks: bool, cache_only: bool) -> Iterator[tuple[str, str, Decoder]]:
    """Yields the names of weights and cache, and the model with them."""
    if blocks:
        yield "float32", "auto", load_model(builtin.path(), kernels=choose("cpu"), dtype="float32")
        yield from ((name, "auto", of_blocks(name)) for name in BLOCK_TYPES)
        return
    for dtype, quantization, cached in KINDS:
        if quantization == "none" or not cache_only:
            name = dtype if quantization == "none" else f"{quantization}, {dtype}"
            kernels = choose("cpu", quantization, cached)
            yield name, cached, as_served(
                kernels, partial(load_model, builtin.path(), kernels=kernels, dtype=dtype))


# -- weights rounded to GGUF's types -----------------------------------------------------------------------------------


def rounded(weight: Tensor, name: str) -> QuantizedMatrix:
    """`weight [outputs, depth]` in one of `BLOCK_TYPES`."""
    outputs, depth = weight.shape
    try:
        data = quantize(weight.float().numpy(), GGMLQuantizationType[name])
    except NotImplementedError:
        return _by_extremes(weight.float(), BLOCK_TYPES[name].format)
    return BLOCK_TYPES[name].matrix(torch.from_numpy(np.ascontiguousarray(data)), outputs, depth)


def _by_extremes(weight: Tensor, kind: Format) -> QuantizedMatrix:
    groups = weight.unflatten(1, (-1, kind.group))
    best, chosen = torch.full(groups.shape[:2], torch.inf), torch.ones(groups.shape[:2])
    for share in SHARES:
        scales, minimums = _factors(groups * share, kind)
        error = (_values(_codes(groups, scales, minimums, kind), scales, minimums, kind) - groups).square().sum(2)
        chosen = torch.where(error < best, share, chosen)
        best = torch.minimum(error, best)
    scales, minimums = _factors(groups * chosen[:, :, None], kind)
    stored = _in_units(scales, kind)
    offsets = None if minimums is None else _in_units(minimums, kind)
    codes = _codes(groups, stored.floats(), None if offsets is None else offsets.floats(), kind).flatten(1)

    def part(whole: Factors, first: int, end: int) -> Factors:
        return Factors(whole.values[first:end], None if whole.units is None else whole.units[first:end])

    def read(first: int, end: int) -> Rows:
        return Rows(codes[first:end], part(stored, first, end), None if offsets is None else part(offsets, first, end))

    return QuantizedMatrix(kind, *weight.shape, read)


def _factors(groups: Tensor, kind: Format) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums `[outputs, groups]` with which the extremes are levels."""
    if kind.has_minimums:
        least = groups.amin(2).clamp_max(0)
        return (groups.amax(2) - least) / ((1 << kind.bits) - 1), -least
    farthest = min(kind.levels) if kind.levels else -kind.zero  # the largest becomes the level farthest from zero
    return groups.gather(2, groups.abs().argmax(2, keepdim=True))[:, :, 0] / farthest, None


def _codes(groups: Tensor, scales: Tensor, minimums: Tensor | None, kind: Format) -> Tensor:
    """The nearest code of each weight."""
    by = torch.where(scales.abs() < TINY, TINY, scales)[:, :, None]
    exact = (groups + (0 if minimums is None else minimums[:, :, None])) / by
    if kind.levels:
        levels = torch.tensor(kind.levels)
        return torch.bucketize(exact, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return (exact + kind.zero).round().clamp(0, (1 << kind.bits) - 1).to(torch.uint8)


def _values(codes: Tensor, scales: Tensor, minimums: Tensor | None, kind: Format) -> Tensor:
    levels = torch.tensor(kind.levels)[codes.int()] if kind.levels else codes - float(kind.zero)
    return scales[:, :, None] * levels - (0 if minimums is None else minimums[:, :, None])


def _in_units(factors: Tensor, kind: Format) -> Factors:
    """Factors `[outputs, groups]` as the format stores them."""
    if not kind.groups_per_unit:
        return Factors(factors.to(kind.scale))
    limit = (1 << kind.scale_bits - (not kind.has_minimums)) - 1
    blocks = factors.unflatten(1, (-1, kind.groups_per_unit))
    units = (blocks.abs().amax(2, keepdim=True) / limit).half()
    values = (blocks / units.float().clamp_min(TINY)).round().clamp(-limit, limit)
    return Factors(values.flatten(1).to(kind.scale), units[:, :, 0])


def main() -> None:
    """Parse the command line and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=REAL, help="a name, a folder or a GGUF file")
    parser.add_argument("--cache-only", action="store_true", help="of the built-in model: leave out quantized weights")
    parser.add_argument("--blocks", action="store_true", help="of the built-in model: GGUF's types instead")
    parser.add_argument("--openvino", nargs="+", default=[], metavar=("PYTHON", "NAME=FOLDER"),
                        help="its environment's Python, and exported models by the names of their weights")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    asked = parser.parse_args()
    is_builtin, path = asked.model == BUILTIN, find(asked.model).path
    if not is_builtin and (asked.blocks or asked.cache_only):
        parser.error(f"--blocks and --cache-only are of the built-in model: add --model {BUILTIN}")
    texts = functions() if is_builtin else windows_of(path)
    found = decoders(blocks=asked.blocks, cache_only=asked.cache_only) if is_builtin else of_model(path)
    print(f"{len(texts)} texts\n{'weights':20}{'cache':8}{'tokens':>9}{'perplexity':>12}{'over float32':>14}"
          f"{'kept':>9}{'seconds':>9}")
    rows: list[dict[str, Any]] = []
    exact: list[Score] = []

    def report(name: str, cached: str, result: Score, began: float) -> dict[str, Any]:
        exact.append(result)
        over, kept = result.perplexity / exact[0].perplexity - 1, result.kept(exact[0])
        print(f"{name:20}{cached:8}{result.count:9}{result.perplexity:12.4f}{over:14.2%}{kept:9.2%}"
              f"{time.perf_counter() - began:9.1f}", flush=True)
        return {"weights": name, "cache": cached, "tokens": result.count, "perplexity": round(result.perplexity, 4),
                "greedy_kept": round(kept, 4)}

    for name, cached, decoder in found:
        began = time.perf_counter()
        rows.append(report(name, cached, score(decoder, texts), began))
    of_peers: list[dict[str, Any]] = []
    for named in asked.openvino[1:]:
        name, _, folder = named.partition("=")
        began = time.perf_counter()
        version, result = of_openvino(asked.openvino[0], folder, texts)
        of_peers.append(report(f"OpenVINO, {name}", "auto", result, began) | {"version": version, "weights": name})
    if asked.output:
        write_json(asked.output, about(path, texts) | {"perplexity": rows} | (
            {"openvino": of_peers} if of_peers else {}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
