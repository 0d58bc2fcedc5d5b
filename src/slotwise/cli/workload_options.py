"""Options that describe a workload, and the workload they describe."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slotwise.cli.options_of_settings import Number, Size, input_file
from slotwise.core.setting_fields import Range, real, settings_of, whole
from slotwise.engine.config import EngineConfig
from slotwise.measure.workload import chats, distributions, workloads
from slotwise.measure.workload.distributions import MAX_LENGTH, MAX_RATE, Arrivals
from slotwise.measure.workload.trace import read_trace, replay
from slotwise.measure.workload.workloads import (
    MAX_REQUESTS,
    NO_PREFIX,
    Conversation,
    Recipe,
    Workload,
    generate,
)


@dataclass(frozen=True, slots=True)
class Defaults:
    """A command's values for options that are not given."""

    num_prompts: int = 64
    input_lengths: str = "uniform:16:256"
    output_lengths: str = "lognormal:64:1.0:512"
    arrivals: str = "at-once"
    dataset: str = "random"  # as the help says it
    num_chats: int = 0  # 0: the command has no model that could answer chats


RANDOM = "random"
DATASETS = (RANDOM, chats.NAME)
DEFAULTS = Defaults()
RATE = Range(1 / MAX_RATE, MAX_RATE, is_whole=False, may_be_infinite=True)
DRAWN = ("input_lengths", "output_lengths")
SCALED = ("length_scale", "time_scale")
SHAPE = ("dataset_name", "trace", "num_prompts", *DRAWN, "arrivals", "request_rate", "burstiness", "prefix",
         "max_tokens", *SCALED)


WORKLOAD_OPTIONS = (
    "workload", "trace", "num_prompts", "input_lengths", "output_lengths", "arrivals", "request_rate", "burstiness",
    "prefix", "max_tokens", "length_scale", "time_scale", "save_workload")


def refuse_beside(asked: argparse.Namespace, option: str, names: Iterable[str]) -> None:
    """Raises ValueError if one of the options `names` is given: beside `option` it would change nothing."""
    for name in names:
        if getattr(asked, name) is not None:
            raise ValueError(f"{option} takes no --{name.replace('_', '-')}: leave one of them out")


def add_workload_options(command: argparse.ArgumentParser, defaults: Defaults = DEFAULTS) -> None:
    """Add all but `--seed`, which a command with engine options has already; others call `add_seed_option`."""
    group = command.add_argument_group("workload")
    group.add_argument("--workload", type=input_file, metavar="FILE", help="repeat one that was saved")
    group.add_argument("--trace", type=input_file, metavar="CSV", help="replay recorded requests: a "
                       "file with the columns arrived_at, num_prefill_tokens, num_decode_tokens, or Azure's")
    _add_dataset_option(group, defaults)
    group.add_argument("--input-lengths", metavar="LENGTHS", help="tokens of the prompts: one of "
                       + ", ".join(kind.form for kind in distributions.LENGTH_KINDS.values())
                       + f" (default: {defaults.input_lengths})")
    group.add_argument("--output-lengths", metavar="LENGTHS",
                       help=f"tokens of the outputs, likewise (default: {defaults.output_lengths})")
    group.add_argument("--arrivals", metavar="ARRIVALS", help="one of "
                       + ", ".join(kind.form for kind in distributions.ARRIVAL_KINDS.values())
                       + f" (default: {defaults.arrivals}, or the trace's)")
    group.add_argument("--request-rate", type=Number(RATE), metavar="R",
                       help="the same as --arrivals poisson:R; inf is at-once")
    group.add_argument("--burstiness", type=Number(real(0.0001, 10_000)), metavar="B",
                       help="shape of the gamma-distributed gaps at that rate: below 1 arrivals come in bursts")
    group.add_argument("--prefix", metavar=distributions.Prefixes.form, help="put one of so many shared prefixes "
                       "before each prompt")
    group.add_argument("--max-tokens", type=Size(whole(1, MAX_LENGTH)), metavar="TOKENS",
                       help="max_tokens of every request (default: the longest possible output"
                       + (f", and {chats.MAX_TOKENS} of chats)" if defaults.num_chats else ")"))
    group.add_argument("--length-scale", type=Number(real(0.0001, 100)), metavar="X",
                       help="multiply the lengths of a trace")
    group.add_argument("--time-scale", type=Number(real(0, 1e6)), metavar="X",
                       help="multiply the times of a trace")
    group.add_argument("--save-workload", metavar="FILE", help="write the workload, for --workload to repeat")


def _add_dataset_option(group: argparse._ArgumentGroup, defaults: Defaults) -> None:
    number = f"{defaults.num_prompts}"
    if defaults.num_chats:
        group.add_argument("--dataset-name", choices=DATASETS, help="random: prompts of random token ids, and outputs "
                           "of the lengths below; chats: real chat turns, code and documents, whose answers end where "
                           f"the model ends them (default: {defaults.dataset})")
        number += "" if defaults.num_chats == defaults.num_prompts else f", or {defaults.num_chats} chats"
    else:
        group.set_defaults(dataset_name=None)
    group.add_argument("--num-prompts", type=Number(whole(1, MAX_REQUESTS)), metavar="N",
                       help=f"requests (default: {number})")


def add_seed_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seed", type=Number(settings_of(EngineConfig)["seed"].range or whole(0)), default=0,
                         metavar="N", help="seed of the workload (default: 0)")


def workload_of(asked: argparse.Namespace, defaults: Defaults = DEFAULTS) -> Workload:
    """The workload of the options, saved if `--save-workload` is given.

    Raises:
        ValueError: one line about options that contradict each other or are out of range.
        OSError: a file cannot be read or written.
    """
    _refuse_contradictions(asked)
    workload = _chats(asked, defaults) if asked.dataset_name == chats.NAME else _workload(asked, defaults)
    if asked.save_workload:
        workloads.save_workload(workload, asked.save_workload)
    return workload


def in_tokens(workload: Workload, path: Path) -> Workload:
    """The workload with its conversations as the model in `path` reads them; one of random prompts as it is.

    Raises:
        ValueError: the model has no chat template, or its files cannot be used.
    """
    if not workload.conversations:
        return workload
    from slotwise.text.chat_template import load_chat_template
    from slotwise.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    template = load_chat_template(path, tokenizer.special_tokens)
    if template is None:
        raise ValueError(f"--dataset-name chats needs a model with a chat template, and {path} has none")

    def tokens(one: Conversation) -> list[int]:
        messages = [{"role": role, "content": text} for role, text in one]
        return tokenizer.encode(template.render(messages), add_special_tokens=False)

    return chats.in_tokens(workload, tokens)


def _workload(asked: argparse.Namespace, defaults: Defaults) -> Workload:
    if asked.workload:
        return workloads.load_workload(asked.workload)
    shared = distributions.parse_prefixes(asked.prefix) if asked.prefix else NO_PREFIX
    max_tokens = asked.max_tokens or 0
    num_prompts = defaults.num_prompts if asked.num_prompts is None else asked.num_prompts
    if asked.trace:
        trace = read_trace(asked.trace, _or(asked.length_scale, 1.0), _or(asked.time_scale, 1.0), num_prompts)
        return replay(trace, _arrivals(asked, "trace"), max_tokens, shared, asked.seed)
    recipe = Recipe(
        num_prompts, distributions.parse_lengths(asked.input_lengths or defaults.input_lengths),
        distributions.parse_lengths(asked.output_lengths or defaults.output_lengths),
        _arrivals(asked, defaults.arrivals), shared, max_tokens)
    return generate(recipe, asked.seed)


def _chats(asked: argparse.Namespace, defaults: Defaults) -> Workload:
    num_chats = defaults.num_chats if asked.num_prompts is None else asked.num_prompts
    return chats.generate_chats(num_chats, _arrivals(asked, defaults.arrivals), asked.max_tokens or 0, asked.seed)


def _arrivals(asked: argparse.Namespace, default: str) -> Arrivals:
    if asked.request_rate is None:
        return distributions.parse_arrivals(asked.arrivals or default)
    if math.isinf(asked.request_rate) and asked.request_rate > 0:
        return distributions.AtOnce()
    if asked.burstiness in (None, 1.0):
        return distributions.Poisson(asked.request_rate)
    return distributions.Gamma(asked.request_rate, asked.burstiness**-0.5)


def _refuse_contradictions(asked: argparse.Namespace) -> None:
    """Raises ValueError for two options of which one would have no effect."""
    if asked.workload:
        _refuse(asked, SHAPE, "--workload repeats what was saved")
    if asked.trace:
        _refuse(asked, DRAWN, "--trace brings its lengths along")
    else:
        _refuse(asked, SCALED, "nothing to scale without --trace")
    if asked.dataset_name == chats.NAME:
        _refuse(asked, (*DRAWN, "trace", "prefix", "save_workload"), "--dataset-name chats brings its texts along, and "
                "the seed repeats them")
    if asked.arrivals is not None:
        _refuse(asked, ("request_rate", "burstiness"), "--arrivals says it all")
    if asked.arrivals == "trace" and not asked.trace:
        raise ValueError("--arrivals trace needs --trace")
    if asked.burstiness is not None and (asked.request_rate is None or math.isinf(asked.request_rate)):
        raise ValueError("--burstiness needs a finite --request-rate")
    if asked.time_scale is not None and (asked.request_rate is not None or asked.arrivals not in (None, "trace")):
        raise ValueError("--time-scale has no effect on arrivals that are not the trace's")


def _refuse(asked: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(asked, name) is not None:
            raise ValueError(f"{why}: leave out --{name.replace('_', '-')}")


def _or(asked: float | None, default: float) -> float:
    return default if asked is None else asked
