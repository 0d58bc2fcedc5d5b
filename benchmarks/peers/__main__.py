"""Measures the same requests on Slotwise and on its peers: the table of docs/reference/peers.md.

    benchmarks/peers/install.sh FOLDER vllm openvino pace llamacpp_built ik_llamacpp onnxruntime
    python -m benchmarks.peers FOLDER --machine 'EPYC Zen 5, AVX-512 BF16' --json benchmarks/results/peers-cpu.json

Each engine is a script of this folder, runs in its own environment, and is started alone, one after the other; an
engine that FOLDER lacks is left out.  All have the weights of SmolLM2-135M-Instruct: as a checkpoint in bfloat16,
converted by each engine's own tool to eight or four bits, or as the published GGUF file (Q4_1).  `--measures` are
explained in same_requests.py.  A round of all engines takes about twenty minutes on two cores; quote ratios of one.
ONNX Runtime GenAI is too slow for more than `--measures step:1`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.commands import bar, parser_of
from benchmarks.peers.same_requests import MEASURES

from slotwise.compute.model.model_registry import find
from slotwise.measure.bench.results import environment, write_json

HERE = Path(__file__).parent
MODEL = "smollm2"
LIMIT_SECONDS = 1200


class Peer(NamedTuple):
    """An engine with one kind of weights."""

    engine: str
    weights: str
    python: Path  # of its environment; measured where it exists
    script: str
    model: Callable[[Path], Path]  # what it loads, by the folder; written where it is missing
    options: Sequence[str] = ()


def checkpoint(folder: Path) -> Path:
    path = folder / "checkpoint"
    return _written(path, [sys.executable, "-m", "benchmarks.checkpoint", path, "--gguf", find(MODEL).path])


def gguf(folder: Path) -> Path:
    return find(MODEL).path


def openvino(weights: str) -> Callable[[Path], Path]:
    def model(folder: Path) -> Path:
        path = folder / f"openvino-{weights}"
        return _written(path, [
            folder / "openvino/bin/optimum-cli", "export", "openvino", "--model", checkpoint(folder), "--task",
            "text-generation-with-past", "--weight-format", weights, path])
    return model


def onnxruntime(folder: Path) -> Path:
    path = folder / "onnxruntime-int4"
    return _written(path, [
        folder / "onnxruntime/bin/python", "-m", "onnxruntime_genai.models.builder", "-i", checkpoint(folder), "-o",
        path, "-p", "int4", "-e", "cpu", "-c", folder / "onnxruntime-cache"])


def _written(path: Path, command: Sequence[str | Path]) -> Path:
    if not path.exists():
        subprocess.run([*map(str, command)], check=True, stdout=sys.stderr)
    return path


def peers(folder: Path) -> list[Peer]:
    """Returns all peers; in a group of equal weights Slotwise is first."""
    def of(name: str) -> Path:
        return folder / name / "bin" / "python"

    def server(name: str, release: str) -> Peer:
        path = folder / f"{name}-built" / "bin" / "llama-server"
        return Peer(name, "Q4_1", Path(sys.executable) if path.exists() else path, "run_llamacpp.py", gguf,
                    ("--server", str(path), "--name", name, "--release", release))

    ours = Path(sys.executable)
    return [
        Peer("slotwise", "bfloat16", ours, "run_slotwise.py", checkpoint),
        Peer("openvino", "bfloat16", of("openvino"), "run_openvino.py", openvino("fp16")),
        Peer("vllm", "bfloat16", of("vllm"), "run_vllm.py", checkpoint),
        Peer("pace", "bfloat16", of("pace"), "run_pace.py", checkpoint),
        Peer("slotwise", "int8", ours, "run_slotwise.py", checkpoint, ("--quantization", "int8")),
        Peer("openvino", "int8", of("openvino"), "run_openvino.py", openvino("int8")),
        Peer("slotwise", "int4", ours, "run_slotwise.py", checkpoint, ("--quantization", "int4")),
        Peer("onnxruntime", "int4", of("onnxruntime"), "run_onnxruntime.py", onnxruntime),
        Peer("slotwise", "Q4_1", ours, "run_slotwise.py", gguf),
        server("llamacpp", "of llama-cpp-python 0.3.36"),
        server("ik_llamacpp", "of ik-llama-cpp-python 0.1.5"),
    ]


def measured(peer: Peer, folder: Path, measures: Sequence[str], log: Any) -> dict[str, Any]:
    """Returns what a peer's script printed, by measure, and its version."""
    variables = dict(os.environ)
    if peer.engine == "vllm":
        preloaded = [*glob("/usr/lib/*/libtcmalloc_minimal.so.4"), str(folder / "vllm/lib/libiomp5.so")]
        variables["LD_PRELOAD"] = ":".join(preloaded)
    command = [str(peer.python), str(HERE / peer.script), str(peer.model(folder)), "--measures", *measures,
               *peer.options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables, timeout=LIMIT_SECONDS)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != len(measures):
        raise SystemExit(f"{peer.engine} ended with status {done.returncode}; --log FILE keeps what it said: "
                         f"{done.stdout[-500:]}")
    return {"engine": peer.engine, "weights": peer.weights, "version": lines[0]["version"],
            "figures": {line["measure"]: line["value"] for line in lines}, "environment": environment()}


def main() -> None:
    """Measure all that are installed, and keep what they give."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="where the peers are installed, and models are written")
    parser.add_argument("--engines", nargs="+", help="only these; slotwise, openvino, vllm, pace, llamacpp, "
                        "ik_llamacpp or onnxruntime")
    parser.add_argument("--weights", nargs="+", help="only these; bfloat16, int8, int4 or Q4_1")
    parser.add_argument("--measures", nargs="+", default=list(MEASURES), metavar="MEASURE", help="what is measured")
    parser.add_argument("--machine", required=True, help="of the table, such as 'EPYC Zen 5, AVX-512 BF16'")
    parser.add_argument("--json", type=Path, help="the file to which figures are added")
    parser.add_argument("--log", default=os.devnull, help="of the engines")
    asked: argparse.Namespace = parser.parse_args()
    folder = asked.folder.absolute()
    every = peers(folder)
    for name, known in (("engines", {one.engine for one in every}), ("weights", {one.weights for one in every})):
        if unknown := sorted(set(getattr(asked, name) or ()) - known):
            parser.error(f"--{name}: {unknown[0]} is not one of {', '.join(sorted(known))}")
    chosen = [one for one in every if one.engine in (asked.engines or [one.engine])
              and one.weights in (asked.weights or [one.weights])]
    for missing in (one for one in chosen if not one.python.exists()):
        print(f"{missing.engine} is left out: {missing.python} does not exist", file=sys.stderr)
    with open(asked.log, "w") as log:
        for peer in bar([one for one in chosen if one.python.exists()], "peers"):
            run = {"machine": asked.machine} | measured(peer, folder, asked.measures, log)
            print(json.dumps({key: value for key, value in run.items() if key != "environment"}), flush=True)
            if asked.json:
                runs = json.loads(asked.json.read_text())["runs"] if asked.json.exists() else []
                write_json(asked.json, {"runs": [*runs, run]})


if __name__ == "__main__":
    main()
