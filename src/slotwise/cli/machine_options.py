"""Options of a simulated server: the machine it runs on, its draft model, ranks and adapters."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from slotwise.cli.numbers import Number
from slotwise.cli.options import add_engine_options
from slotwise.core.settings import real, whole
from slotwise.observe.event_log import read_file
from slotwise.simulate.machines import LINK, ModelShape, described, names, setup_of
from slotwise.simulate.recorded import read_recording
from slotwise.simulate.simulator import AdapterLoad, Setup
from slotwise.simulate.virtual_machine import SimulatedDraftModel

MS = 1000.0
MAX_ADAPTERS = 4096
MAX_MS = 86_400_000.0
ENGINE = ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--max-stall-ms", "--enable-prefix-caching",
          "--tensor-parallel-size", "--pipeline-parallel-size")


def add_machine_options(command: argparse.ArgumentParser) -> None:
    """Options of the server that is simulated; `setup_of_machine` reads them."""
    command.add_argument("--machine", required=True, metavar="NAME|LOG", help="a machine of the package's file, with "
                         f"--model: {', '.join(names())}; or an event log, whose engine's settings and step times are "
                         "taken")
    command.add_argument("--model", metavar="MODEL", help="with a machine's name: a checkpoint's folder or GGUF file, "
                         "of which only the config is read")
    command.add_argument("--acceptance", type=_shares, metavar="SHARE,...", help="simulate a draft model: of a row's "
                         "drafts the share that is right at each position where those before are, from 0 to 1; there "
                         "are as many drafts as shares, or fewer (default: a log's, else no drafts)")
    command.add_argument("--draft-ms", type=Number(real(0, MAX_MS)), default=None, metavar="MS",
                         help="with --acceptance: milliseconds of a pass of the draft model (default: 0)")
    command.add_argument("--link-us", type=Number(real(0, 1e6)), default=None, metavar="US",
                         help="with several ranks: microseconds in which they exchange the sums of a layer, and hand a "
                         f"step on to the next stage (default: {LINK * 1e6:g})")
    command.add_argument("--adapters", type=Number(whole(1, MAX_ADAPTERS)), default=None, metavar="N",
                         help="each request is of one of N LoRA adapters, in turn (default: of none)")
    command.add_argument("--max-loras", type=Number(whole(1, MAX_ADAPTERS)), default=None, metavar="N",
                         help="with --adapters: adapters among the rows of one step (default: 1)")
    command.add_argument("--adapter-ms", type=Number(real(0, MAX_MS)), default=None, metavar="MS",
                         help="with --adapters: milliseconds that each adapter among a step's rows takes (default: 0)")
    add_engine_options(command, ENGINE)
    for name in ENGINE:
        command.set_defaults(**{name.removeprefix("--").replace("-", "_"): None})


def _shares(text: str) -> tuple[float, ...]:
    """The type of --acceptance."""
    try:
        return SimulatedDraftModel(tuple(map(float, text.split(",")))).shares
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} does not read as shares from 0 to 1, as 0.8,0.7,0.6") from None


def setup_of_machine(asked: argparse.Namespace) -> tuple[Setup, str]:
    """Returns the setup of a server on the machine, and words for the machine."""
    setup, about = _machine(asked)
    setup = _with_adapters(setup, asked)
    if asked.acceptance is None:
        if asked.draft_ms is not None:
            raise ValueError("--draft-ms is of the draft model that --acceptance describes")
        return setup, about
    model = SimulatedDraftModel(asked.acceptance, (asked.draft_ms or 0.0) / MS)
    return replace(setup, speculation=model.speculation, draft_model=model), about


def _with_adapters(setup: Setup, asked: argparse.Namespace) -> Setup:
    if asked.adapters is None:
        for name in ("max_loras", "adapter_ms"):
            if getattr(asked, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is of the adapters of --adapters")
        return setup
    limits = replace(setup.limits, max_loras=asked.max_loras or setup.limits.max_loras)
    return replace(setup, limits=limits, adapters=AdapterLoad(asked.adapters, (asked.adapter_ms or 0.0) / MS))


def _machine(asked: argparse.Namespace) -> tuple[Setup, str]:
    if os.path.isfile(asked.machine):
        of_names = ("--model", "--link-us", *ENGINE)
        given = [name for name in of_names if getattr(asked, name[2:].replace("-", "_")) is not None]
        if given:
            raise ValueError(f"{given[0]} is for a machine of the file: the log says what its engine had")
        setup, recording = read_recording(read_file(asked.machine))
        run, error = recording.run, recording.times.error
        return setup, (f"the machine of {asked.machine} ({run.model}, {run.device}; its step times are predicted with "
                       f"a median error of {error:.0%})")
    if asked.model is None:
        raise ValueError("--machine with a machine's name needs --model; an event log must be a file")
    from slotwise.engine.config import EngineConfig

    options = {name[2:].replace("-", "_"): getattr(asked, name[2:].replace("-", "_")) for name in ENGINE}
    config = EngineConfig.of(model=asked.model, **{name: value for name, value in options.items() if value is not None})
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if asked.link_us is not None and ranks == 1:
        raise ValueError("--link-us is between ranks: give --tensor-parallel-size or --pipeline-parallel-size, too")
    link = LINK if asked.link_us is None else asked.link_us * 1e-6
    return setup_of(asked.machine, _shape(asked.model), config, link), (
        f"{ranks} of " * (ranks > 1) + described(asked.machine))


def _shape(model: str) -> ModelShape:
    """Returns a model's shape, from its config; in bfloat16."""
    from slotwise.model.checkpoint import locate
    from slotwise.model.loading import read_config

    config = read_config(locate(model))
    head, width = config.hidden_size * config.vocab_size, 2
    if config.mixture is not None:
        raise ValueError("the roofline of a mixture of experts depends on which experts a step hits: name an event log")
    if config.recurrent is not None:
        raise ValueError("recurrent states, which steps read and write whole, are in no data sheet: name an event log")
    positions = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    return ModelShape((config.layer_weights + head) * width, positions, config.layer_weights, head,
                      4 * config.num_layers * config.num_heads * config.head_dim, config.max_position_embeddings,
                      config.num_layers)
