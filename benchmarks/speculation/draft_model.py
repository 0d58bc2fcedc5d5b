"""What a draft model costs and gains, and how often drafts must be right to be worth it.

usage: python -m benchmarks.speculation draft_model make CHECKPOINT FOLDER --layers 3 --rest 0.1 --sharp 8
       python -m benchmarks.speculation draft_model run TARGET DRAFT NAME [--only costs 1 8 ...] [--pairs 6]

`make` writes a pair that agrees in part: FOLDER/draft has the first layers of the checkpoint, FOLDER/target all of
them, the later ones with their outputs scaled by `--rest`.  The logits of both are multiplied by `--sharp`: those of
random weights give all tokens nearly the same probability, as no trained model does.  Shapes, and so costs, are the
checkpoint's.

`run` measures for numbers of streams:

    costs      steps without drafts, with k drafts a row verified, and what proposing these took, as medians; and the
               break-even acceptance: the share of right drafts, the same at each position, from which on k drafts are
               faster than none
    N          N streams of seeded sampling at temperature 1, with the draft model and without, in interleaved pairs on
               the same weights; a ratio above 1 means that it is faster.  The budget chooses the drafts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import bar, parser_of
from benchmarks.pairs import interval

from slotwise.compose.engine_builder import Loaded, load
from slotwise.core.interfaces import DraftRow, Due, Proposal
from slotwise.core.params import SamplingSpec
from slotwise.core.record import PROPOSED, Proposing, StepRecord
from slotwise.core.request import Request, RequestSpec
from slotwise.core.step_time import Work
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.measure.bench.results import environment, write_json

NUM_DRAFTS = (1, 2, 4)
STEPS = 24  # measured of each number of drafts
PROMPT, OUTPUT = 64, 96  # tokens
VOCABULARY = 4000
STREAMS = (1, 8, 32)


def make(checkpoint: Path, folder: Path, layers: int, rest: float, sharp: float) -> None:
    """Writes the pair."""
    from safetensors.torch import load_file, save_file

    described = json.loads((checkpoint / "config.json").read_text())
    (file,) = checkpoint.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] *= sharp
    for name in ("target", "draft"):
        shutil.copytree(checkpoint, folder / name)
    later = [name for name in weights if ".layers." in name and int(name.split(".layers.")[1].split(".")[0]) >= layers]
    scaled = {name: tensor * rest if name in later and ("o_proj" in name or "down_proj" in name) else tensor
              for name, tensor in weights.items()}
    save_file(scaled, folder / "target" / file.name, metadata={"format": "pt"})
    save_file({name: tensor for name, tensor in weights.items() if name not in later}, folder / "draft" / file.name,
              metadata={"format": "pt"})
    (folder / "draft" / "config.json").write_text(json.dumps(described | {"num_hidden_layers": layers}))


class Fixed:
    """Leaves the same number of drafts of each row to the draft model."""

    def __init__(self) -> None:
        self.number = 0

    def due(self, requests: Sequence[Request]) -> Due:
        return Due(range(len(requests)), "")

    def propose(self, rows: Sequence[DraftRow], num_decoding: int, work: Work, most: int) -> Proposal:
        return Proposal([(PROPOSED,) * min(self.number, row.limit) for row in rows], "")

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        return 0.0

    def waits(self, request: Request) -> bool:
        return False

    def committed(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], proposing: Proposing | None = None,
    ) -> None:
        """It learns nothing."""

    def finished(self, request: Request) -> None:
        """It keeps nothing."""


def jobs(number: int, seed: int, max_tokens: int = OUTPUT) -> list[Add]:
    draw = random.Random(seed)
    params = SamplingSpec(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
    return [Add(at, RequestSpec(
        [draw.randrange(3, VOCABULARY) for _ in range(PROMPT)], params, draw.getrandbits(60))) for at in range(number)]


def play(engine: Engine, adds: Sequence[Add]) -> tuple[float, list[StepRecord]]:
    """Returns the seconds, and the records of all steps."""
    records, began = [], time.perf_counter()
    for one in adds:
        engine.handle(one)
    while engine.has_work:
        records.append(engine.step())
    return time.perf_counter() - began, records


def break_even(plain: float, drafted: float, number: int) -> float | None:
    """The share of right drafts from which on steps of `drafted` seconds with drafts are faster; None: more than 1."""
    needed, low, high = drafted / plain, 0.0, 1.0
    if needed > number + 1:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**power for power in range(number + 1)) < needed else (low, middle)
    return round(high, 3)


def costs(engine: Engine, streams: int) -> list[dict[str, Any]]:
    """Median steps of `streams` rows in which each has so many drafts, in turn."""
    proposer = engine._scheduler._drafting.proposer = Fixed()
    for one in jobs(streams, 1, max_tokens=900):
        engine.handle(one)
    found: dict[int, list[tuple[float, float]]] = {number: [] for number in (0, *NUM_DRAFTS)}
    while engine.step().plan.counts != (1,) * streams:
        pass
    for turn in range(STEPS + 3):
        for number, seen in found.items():
            proposer.number = number
            record = engine.step()
            if turn > 2 and all(len(one) == number for one in record.plan.drafts):
                seconds = (record.ended_ns - record.started_ns) * 1e-9
                seen.append((seconds, record.result.proposing.seconds if record.result.proposing else 0.0))
    for one in engine._scheduler.requests():
        engine._scheduler.finish(one.request_id, "abort", 0.0)
    while engine.has_work:
        engine.step()
    engine.step()
    plain = statistics.median(seconds for seconds, _ in found[0])
    rows = []
    for number in NUM_DRAFTS:
        step = statistics.median(seconds for seconds, _ in found[number])
        proposing = statistics.median(seconds for _, seconds in found[number])
        rows.append({"streams": streams, "drafts": number, "plain_ms": round(plain * 1e3, 2),
                     "step_ms": round(step * 1e3, 2), "proposing_ms": round(proposing * 1e3, 2),
                     "break_even": break_even(plain, step, number)})
    return rows


def paired(engines: dict[str, Engine], streams: int, pairs: int) -> dict[str, Any]:
    """Output tokens per second with and without, whose outputs must be the same."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    drafts = right = 0
    proposing = total = 0.0
    for engine in engines.values():
        play(engine, jobs(streams, 999))
    for pair in bar(range(pairs), "pairs"):
        outputs = {}
        for name in list(engines)[:: 1 if pair % 2 else -1]:
            seconds, records = play(engines[name], jobs(streams, pair))
            rates[name].append(streams * OUTPUT / seconds)
            told = outputs[name] = {}
            for record in records:
                for request_id, tokens in zip(record.plan.request_ids, record.tokens, strict=True):
                    told[request_id] = told.get(request_id, ()) + tokens
                for found, tokens in zip(record.plan.drafts, record.tokens, strict=False):
                    drafts, right = drafts + len(found), right + (max(0, len(tokens) - 1) if found else 0)
                proposing += record.result.proposing.seconds if record.result.proposing else 0.0
            total += seconds if name == "on" else 0.0
        if outputs["on"] != outputs["off"]:
            raise SystemExit(f"the outputs of {streams} streams differ with and without drafts")
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {"streams": streams, "off": [round(one, 1) for one in rates["off"]],
            "on": [round(one, 1) for one in rates["on"]], "ratio": interval(ratios), "drafts": drafts, "right": right,
            "proposing_share": proposing / total}


def built(loaded: Loaded, config: EngineConfig, *, drafts: bool) -> Engine:
    engine, _ = loaded.engine(config)
    if not drafts:
        engine._scheduler._drafting.proposer = None
    return engine


def run(asked: argparse.Namespace) -> None:
    config = EngineConfig.of(
        model=asked.target, dtype=asked.dtype, max_model_len=1024, enable_prefix_caching=False, max_num_seqs=32,
        kv_cache_memory=asked.cache << 20, speculative_config={"model": asked.draft, "num_speculative_tokens": 8})
    loaded = load(config)
    written = json.loads(asked.json.read_text())["rows"] if asked.json and asked.json.exists() else []
    rows = [one for one in written if (one["pair"], one["dtype"]) != (asked.name, asked.dtype)]
    about = {"pair": asked.name, "dtype": asked.dtype}
    kinds = asked.only
    if "costs" in kinds:
        for streams in (1, 4, 8):
            rows += [about | one for one in costs(built(loaded, config, drafts=True), streams)]
    engines = {name: built(loaded, config, drafts=name == "on") for name in ("off", "on")}
    for kind in kinds:
        if kind != "costs":
            rows.append(about | paired(engines, int(kind), asked.pairs))
    for one in rows:
        print(one, file=sys.stderr)
    if asked.json:
        write_json(asked.json, {"environment": environment(), "seed": 0, "rows": rows})


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("checkpoint", type=Path, help="a checkpoint's folder")
    making.add_argument("folder", type=Path, help="where to write it")
    making.add_argument("--layers", type=int, default=3, help="layers of the draft model")
    making.add_argument("--rest", type=float, default=0.1, help="factor of the later layers' outputs")
    making.add_argument("--sharp", type=float, default=8, help="factor of the logits")
    running = commands.add_parser("run")
    for name in ("target", "draft", "name"):
        running.add_argument(name, help="the pair: folders of both models, and a name for the result")
    running.add_argument("--dtype", default="float32", help="of the weights")
    running.add_argument("--only", nargs="+", default=("costs", *map(str, STREAMS)),
                         help="costs, and numbers of streams")
    running.add_argument("--pairs", type=int, default=6, help="pairs of runs")
    running.add_argument("--cache", type=int, default=256, help="MiB")
    running.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    if asked.command == "make":
        make(asked.checkpoint, asked.folder, asked.layers, asked.rest, asked.sharp)
    else:
        run(asked)
