"""Every number of the command line and of an engine's settings has a range, and nothing outside it is taken."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from support.live import cli

from slotwise.cli import MODULES, build_parser
from slotwise.cli.options_of_settings import Bytes, Gibibytes, Number, Size
from slotwise.core.setting_fields import Range, settings_of
from slotwise.engine.config import ConfigError, EngineConfig

TEXTS = ["", "x", " 1", "1 ", "1_0", "٣", "0x10", "1.5", "1e3", "0", "-0", "1", "-1", "2", "5e-324", "1e-12", "1e308",
         "-1e308", "nan", "-nan", "inf", "-inf", "Infinity", str(2**31), str(2**63), str(2**70), str(-(2**70)),
         "9" * 5000, "99999", "1e-400", "+1", "--1", "1,5", "\x00"]  # fmt: skip
VALUES: list[Any] = [0, -1, 1, 2**31, 2**63, 2**70, 10**400, 0.0, 1.5, 5e-324, 1e308, math.nan, math.inf, -math.inf,
                     True, "1", "", [], {}, b"1", 1j]
REQUIRED = {"explain": ["log"], "replay": ["log"], "timeline": ["log"], "what-if": ["log"],
            "simulate": ["--machine=log"], "capacity": ["--machine=log", "--slo=ttft_p99=1s"],
            "tune": ["--machine=log", "--slo=ttft_p99=1s"], "bench steps": ["--event-log=log"]}


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of the parser, with its own."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield path, parser
    for action in below:
        for name, inner in action.choices.items():
            yield from commands(inner, (*path, name))


OPTIONS = [(path, action) for path, parser in commands(build_parser("")) for action in parser._actions
           if action.option_strings and action.type is not None and action.nargs in (None, "?")]
NUMBERS = [(path, action) for path, action in OPTIONS if isinstance(action.type, Number)]


def named(options: list[tuple[tuple[str, ...], argparse.Action]]) -> list[str]:
    return [f"{' '.join(path)} {action.option_strings[0]}" for path, action in options]


def test_every_command_is_walked_and_no_number_is_a_plain_one() -> None:
    assert {path[0] for path, _ in commands(build_parser(""))} == set(MODULES)
    assert len(NUMBERS) > 80
    plain = [name for name, (_, action) in zip(named(OPTIONS), OPTIONS, strict=True) if action.type in (int, float)]
    assert not plain
    for path, parser in commands(build_parser("")):
        for action in parser._actions:
            is_text = isinstance(action.type, Number) or not isinstance(action.default, (int, float))
            assert is_text or isinstance(action.default, bool) or action.nargs == 0, (path, action.option_strings)


@pytest.mark.parametrize(("path", "action"), NUMBERS, ids=named(NUMBERS))
def test_what_an_option_takes_is_in_its_range(
        path: tuple[str, ...], action: argparse.Action, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(action.type, Number)
    allowed, (option, *_) = action.type.range, action.option_strings
    parser, refused = build_parser(path[0]), 0
    assert action.default is None or not allowed.objection(action.default)
    for text in TEXTS:
        try:
            given = [*path, f"{option}={text}", *REQUIRED.get(" ".join(path), [])]
            value = getattr(parser.parse_args(given), action.dest)
        except SystemExit as end:
            refused += 1
            (line,) = capsys.readouterr().err.splitlines()
            assert end.code == 2 and f"argument {option}: must be" in line
            assert str(allowed) in line and text[:20].isprintable() <= (text[:20] in line) and len(line) < 400
        else:
            assert not allowed.objection(value) and type(value) is (int if allowed.is_whole else float)
            assert float(text) == value
    assert refused >= 15


def test_both_ends_of_a_range_are_taken() -> None:
    for path, action in NUMBERS:
        assert isinstance(action.type, Number)
        for bound in (action.type.range.least, action.type.range.most):
            assert action.type(repr(bound)) == bound, (path, action.option_strings)


DECLARED = settings_of(EngineConfig)
NUMERIC = [name for name, one in DECLARED.items() if re.search(r"\b(int|float)\b", one.type)]


def test_every_number_of_an_engine_has_a_range_and_every_field_is_declared() -> None:
    assert set(NUMERIC) == {name for name, one in DECLARED.items() if one.range is not None}
    assert {one.name for one in fields(EngineConfig)} == {one.path[0] for one in DECLARED.values()} | {"tiers"}


@pytest.mark.parametrize("name", NUMERIC)
def test_numbers_of_the_offline_api(name: str) -> None:
    for value in VALUES:
        wrong = DECLARED[name].objection(value)
        try:
            EngineConfig.of(model="m", **{name: value})
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 300
            assert not wrong or str(error) == f"{name} {wrong}"
        else:
            assert not wrong, f"{name}={value!r} was taken"


OTHERS = [one for name, one in DECLARED.items() if name not in NUMERIC]


@pytest.mark.parametrize("one", OTHERS, ids=lambda one: one.name)
def test_other_settings_of_the_offline_api(one: Any) -> None:
    for value in (3, 2.5, [], {}, object(), b"x", math.nan, *([None] if one.default in (..., "auto") else [])):
        if (one.name, value) == ("speculative_config", {}):
            continue
        with pytest.raises(ConfigError, match=f"^{one.name} must be"):
            EngineConfig.of(**{"model": "m", one.name: value})


@pytest.mark.parametrize("value", [True, "1", None, 1.0, math.nan])
def test_a_whole_number_is_of_that_type(value: object) -> None:
    assert Range(0, 10).objection(value) == f"must be a whole number from 0 to 10, not {value!r}"


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value"), [
    ("--port", "99999"), ("--port", "-1"), ("--stream-interval", "0"), ("--shutdown-timeout", "nan"),
    ("--shutdown-timeout", "inf"), ("--max-num-seqs", "0")])
def test_a_server_refuses_in_one_line(option: str, value: str) -> None:
    done = cli("serve", option, value)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"slotwise serve: argument {option}: must be ") and repr(value) in line


@pytest.mark.parametrize(("text", "number"), [
    ("4k", 4000), ("4K", 4096), ("25.6k", 25_600), ("0.5K", 512), ("1m", 10**6), ("2M", 2**21), ("1g", None),
    ("1.0001k", None), ("0.3K", None), ("4 k", None), ("4kk", None), ("k", None), ("-4k", None), ("4KiB", None),
    ("4B", None), ("1e3k", None), (".5k", None), ("٤k", None), ("1" * 70 + "k", None), ("4096", 4096)])
def test_tokens_may_have_a_unit(text: str, number: int | None) -> None:
    assert taken(Size(Range(1, 1 << 24)), text) == number


@pytest.mark.parametrize(("text", "number"), [
    ("8GiB", 8 << 30), ("8GB", 8 * 10**9), ("8G", 8 << 30), ("1.5KiB", 1536), ("1kB", 1000), ("1KB", None),
    ("1gib", None), ("8 GiB", None), ("4k", 4000), ("1TiB", 1 << 40), ("123", 123)])
def test_bytes_may_have_one_more(text: str, number: int | None) -> None:
    assert taken(Bytes(Range(1, 1 << 50)), text) == number


def test_gibibytes_are_what_they_are_without_a_unit() -> None:
    allowed = Range(0, 1 << 20, is_whole=False)
    assert [taken(Gibibytes(allowed), text) for text in ("8", "8GiB", "512MiB", "1.5")] == [8.0, 8.0, 0.5, 1.5]


def taken(kind: Number, text: str) -> float | None:
    """The number that an option makes of a text; None where it refuses it, with its range and how else to write it."""
    try:
        return kind(text)
    except argparse.ArgumentTypeError as error:
        assert f"must be {kind.range}{kind.hint}, not " in str(error)
        return None


def test_sizes_of_the_command_line_take_units() -> None:
    found = build_parser("serve").parse_args([
        "serve", "--max-model-len", "4k", "--max-num-batched-tokens=2K", "--kv-cache-memory", "512MiB",
        "--max-num-queued-tokens", "1m", "--kv-offloading-size", "2GiB", "--long-prefill-token-threshold", "1K"])
    assert (found.max_model_len, found.max_num_batched_tokens, found.kv_cache_memory) == (4000, 2048, 512 << 20)
    assert (found.max_num_queued_tokens, found.kv_offloading_size, found.long_prefill_token_threshold) == (
        1_000_000, 2.0, 1024)
    tokens = [action for _, action in NUMBERS if action.metavar in ("TOKENS", "BYTES", "GIB", "BYTES|auto")]
    assert len(tokens) > 20 and all(isinstance(action.type, Size) for action in tokens)
