"""slotwise doctor: what this machine is, what would be chosen for a model, and what to do about what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotwise.cli.options_of_settings import Commands, add_command, add_engine_options, engine_settings, option_of
from slotwise.cli.parser import mark_common
from slotwise.cli.process import ending_at_once
from slotwise.cli.pull import USUAL_MODEL_HELP, usual_model
from slotwise.compute.model.checkpoint import is_hub_id
from slotwise.compute.model.model_registry import find
from slotwise.compute.model.published_models import PUBLISHED, present
from slotwise.engine.config import EngineConfig
from slotwise.errors import CheckpointError, described, one_line, printable
from slotwise.platform import files
from slotwise.platform.host import cpu_quota, kernels_obstacle, num_processors
from slotwise.version import __version__

if TYPE_CHECKING:
    from slotwise.compose.survey import Processor, Survey

PORT = 8000  # of `slotwise serve`
PORTS = 32  # ports from there on, of which the first free one is told
LEAST_DISK = 1 << 30  # bytes for a model and compiled kernels
BUSY = 0.5  # load of a processor above which other programs count
WIDTH, LABEL = 100, 15  # columns of a line and of what it is about
GB, MIB = 1e9, 1 << 20
NAMES = {"bfloat16": "bfloat16", "quantized": "int8, int4, GGUF"}  # of weights, by kind of product


def add(commands: Commands) -> None:
    command = add_command(
        commands, "doctor", "tell what this machine is, what would be chosen for a model, and what is wrong", run)
    command.usage = "slotwise doctor [MODEL] [options]"
    mark_common(
        command.add_argument("model_tag", nargs="?", metavar="MODEL", help=USUAL_MODEL_HELP),
        command.add_argument("--json", action="store_true", help="print all of it as JSON"))
    add_engine_options(command)


@dataclass
class Report:
    """What was found.

    `told` has the figures, as `--json` prints them; `lines` what a reader sees of them, by heading.
    """

    told: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    can_serve: bool = True

    def say(self, heading: str, label: str, text: str) -> None:
        self.lines.setdefault(heading, []).append((label, text))

    def advise(self, text: str) -> None:
        self.advice.append(text)


def run(asked: argparse.Namespace) -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    report = Report()
    with ending_at_once():
        _machine(report)
        _model(report, asked)
    if asked.json:
        print(json.dumps(report.told | {"advice": report.advice, "can_serve": report.can_serve}, indent=2))
    else:
        print("\n".join(_page(report)))
    return 0 if report.can_serve else 1


# -- the machine -------------------------------------------------------------------------------------------------------


def _machine(report: Report) -> None:
    from slotwise.compose import survey
    from slotwise.measure.bench.results import machine as processor_name

    told = report.told
    told["versions"] = versions = {"slotwise": __version__, **survey.versions()}
    report.say("", "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
               + f" ({survey.torch_build()} build)")
    machine: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "processor": printable(processor_name()), **survey.memory()}
    told["machine"] = machine
    _processors(report, machine)
    if (found := survey.processor()) is None:
        report.say("machine", "kernels", "plain torch (device reference)")
        report.advise(f"{kernels_obstacle() or 'this processor lacks AVX2'}: plain torch computes, which is slower")
    else:
        _kernels(report, machine, found)
    machine["gpus"] = gpus = survey.gpus()
    report.say("machine", "GPU", ", ".join(f"{one['name']}, {one['bytes'] / GB:.0f} GB" for one in gpus) or "not found")
    if not gpus and survey.torch_build() != "CPU":
        report.advise("torch was built for CUDA, and sees no GPU: its CPU build is gigabytes smaller")
    machine["bytes_per_second"] = rate = survey.bandwidth(survey.kernels_here())
    report.say("machine", "memory", f"{machine['free_bytes'] / GB:,.1f} GB free, read at {rate / GB:,.1f} GB/s"
               + (f"; last cache {machine['last_cache_bytes'] / MIB:,.0f} MiB" if not gpus else ""))
    _cache_folder(report, machine)
    _port(report, machine)


def _processors(report: Report, machine: dict[str, Any]) -> None:
    usable, quota, load = num_processors(), cpu_quota(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    machine |= {"processors": usable, "quota": quota, "load": round(load, 2)}
    there = f"{usable} of {os.cpu_count() or usable} processors"
    report.say("machine", "processor", f"{machine['processor']}, {there}" + f", a quota of {quota:g}" * bool(quota))
    if quota and quota < usable:
        report.advise(f"this process may use {quota:g} processors' time on {usable} processors, so threads would wait "
                      f"for each other: serve with --cpu-threads {max(1, int(quota))}")
    if load > BUSY * usable:
        report.advise(f"other programs use this machine (load {load:.1f} on {usable} processors): the rates here are "
                      "lower than those of an idle one")


def _kernels(report: Report, machine: dict[str, Any], found: Processor) -> None:
    machine["kernels"] = {"features": found.features, "paths": found.paths, "threads": found.threads,
                          "num_compiled": found.num_compiled, "folder": str(found.kernel_folder or "")}
    report.say("machine", "instructions", ", ".join(found.features) or "no vectors that kernels know")
    report.say("machine", "products", "; ".join(f"{NAMES[kind]} by {path}" for kind, path in found.paths.items())
               + f"; {found.threads} threads")
    if not found.num_compiled:
        report.say("machine", "kernels", "not compiled yet: the first start takes some seconds longer")
    else:
        report.say("machine", "kernels", f"{found.num_compiled} compiled, in {_short(found.kernel_folder)}")
    if variable := os.environ.get("SLOTWISE_CPU_LINEAR"):
        report.advise(f"$SLOTWISE_CPU_LINEAR chooses the path {printable(variable)}: unset it for the fastest one")
    if found.kernel_folder is None:
        report.advise("no folder for compiled kernels can be written, so every start compiles them: set "
                      "XDG_CACHE_HOME to a folder that only you can write")


def _cache_folder(report: Report, machine: dict[str, Any]) -> None:
    from slotwise.compose import survey

    folder = files.cache_folder() / "slotwise"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    free = survey.disk_free(folder)
    machine["cache_folder"] = {"path": str(folder), "bytes": size, "free_bytes": free}
    report.say("machine", "cache folder", f"{_short(folder)}, {size / MIB:,.0f} MiB; {free / GB:,.0f} GB of the disk "
               "are free")
    if why := files.folder_objection(folder):
        report.advise(f"{why}: it is not used; set XDG_CACHE_HOME to a folder that only you can write")
    if free < LEAST_DISK:
        report.advise(f"{free / MIB:,.0f} MiB are free for models and kernels in {_short(folder)}: free some, or set "
                      "XDG_CACHE_HOME to a folder on another disk")


def _port(report: Report, machine: dict[str, Any]) -> None:
    free = next((port for port in range(PORT, PORT + PORTS) if _is_free(port)), 0)
    machine["free_port"] = free
    report.say("machine", "port", f"{PORT} is free" if free == PORT else f"{PORT} is in use; {free or 'none'} is free")
    if free != PORT:
        report.advise(f"port {PORT} is in use: serve with --port {free}")


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _short(path: Path | None) -> str:
    """A path with ~ for the user's folder."""
    text, home = str(path), str(Path.home())
    return "~" + text.removeprefix(home) if text.startswith(home + os.sep) else text


# -- the model ---------------------------------------------------------------------------------------------------------


def _model(report: Report, asked: argparse.Namespace) -> None:
    """Adds what would be chosen for the model, or why it cannot be served.

    Raises:
        ConfigError: the settings contradict each other or the model.
    """
    from slotwise.compose.survey import survey

    model = asked.model_tag or usual_model()
    published = PUBLISHED.get(model)
    if published is not None and present(published) is None:
        report.can_serve = False
        report.told["model"] = {"name": model, "error": "it has not been downloaded"}
        report.say("model", "model", f"{model} has not been downloaded ({published.all_bytes / 1e6:,.0f} MB)")
        report.advise(f"`slotwise pull {model}` downloads {published.served_name}")
        return
    settings = engine_settings(asked)
    EngineConfig.of(model=model, **settings)
    try:
        found = find(model)
        result = survey(EngineConfig.of(model=str(found.path), **settings))
    except (CheckpointError, MemoryError) as error:
        from slotwise.cli import as_typed

        report.can_serve = False
        why = one_line(as_typed(described(error), {name: option_of(name) for name in settings}))
        report.told["model"] = {"name": model, "error": why}
        report.say("model", "model", f"{printable(model)} cannot be served")
        report.advise(f"`slotwise pull {printable(model)}` downloads the model, if the hub has it" if is_hub_id(model)
                      else why)
        return
    _chosen(report, found.name, result)
    if not model:
        name = next(iter(PUBLISHED))
        report.advise(f"the built-in model completes Python code; `slotwise pull {name}` downloads a chat model")


def _chosen(report: Report, name: str, result: Survey) -> None:
    found, machine = result.found, result.machine
    config, limits, used = found.model.config, found.limits, found.used
    kind = str(config.dtype).removeprefix("torch.")
    stored = config.quantization.description if config.quantization is not None else kind
    report.told["model"] = {
        "name": name, "device": found.device, "dtype": kind, "stored_as": stored, "product_path": result.path,
        "weight_bytes": used.weights, "step_weight_bytes": found.model.step_weight_bytes,
        "workspace_bytes": used.workspace, "cache_bytes": used.cache, "num_blocks": limits.num_blocks,
        "block_size": limits.block_size, "max_model_len": limits.max_model_len, "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "bytes_per_second": machine.bytes_per_second, "operations_per_second": machine.operations_per_second,
        "rates": [{"streams": rate.streams, "roofline": rate.bound, "learned": rate.learned} for rate in result.rates]}
    of_weights = stored if stored == kind else f"{stored}, computed in {kind}"
    report.say("model", "model", f"{name}: {of_weights}, on the {found.device.upper()} by {result.path}")
    report.say("model", "weights", f"{used.weights / MIB:,.0f} MiB, of which a token reads "
               f"{found.model.step_weight_bytes / MIB:,.0f} MiB at {machine.bytes_per_second / GB:,.1f} GB/s")
    tokens = limits.num_blocks * limits.block_size
    report.say("model", "context", f"{limits.max_model_len:,} tokens a sequence; {limits.max_num_seqs} at once, with "
               f"{tokens:,} tokens of cache ({limits.num_blocks:,} blocks, {used.cache / MIB:,.0f} MiB)")
    for rate in result.rates:
        streams = f"{rate.streams} stream{'s' * (rate.streams > 1)}"
        reached = (f"; {rate.learned:,.0f} as learned at earlier starts" if rate.learned else
                   "; about half of it is usual, and a first start measures it")
        report.say("model", streams, f"at most {rate.bound:,.0f} tokens/s by memory and arithmetic{reached}")


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(report: Report) -> Iterator[str]:
    """The lines that a reader sees."""
    width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    for heading, lines in report.lines.items():
        if heading:
            yield ""
        for label, text in lines:
            yield from _wrapped(f"{label:{LABEL}}", text, width)
    yield ""
    if not report.advice:
        yield "Nothing to do: `slotwise serve` will start."
    for text in report.advice:
        yield from _wrapped("- ", text, width)


def _wrapped(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=" " * len(label),
                         break_long_words=False, break_on_hyphens=False)
