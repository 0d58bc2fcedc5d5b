"""Commands that were written for `vllm serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from support.live import cli, serving

from slotwise.cli import build_parser
from slotwise.compat.vllm import FLAGS, NO, YES, Flag, notices


def parsed(*arguments: str) -> argparse.Namespace:
    found: argparse.Namespace = build_parser("serve").parse_args(["serve", *arguments])
    return found


def written(flag: Flag, name: str, value: str) -> list[str]:
    """A flag as the command line has it."""
    if not flag.is_switch:
        return [name, value]
    return [name if value == YES else name.replace("--", "--no-", 1)]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.dest)
def test_a_flag_that_fits_is_a_line_at_the_start(flag: Flag) -> None:
    for value in flag.fits or ((YES, NO) if flag.is_switch else ("1", "x")):
        for name in flag.names:
            (line,) = notices(parsed("model", *written(flag, name, value)))
            assert line == f"{flag.names[0]} has no effect: {flag.meaning}"


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.fits], ids=lambda flag: flag.dest)
def test_a_flag_that_does_not_fit_is_refused_with_what_to_do(flag: Flag) -> None:
    other = NO if flag.fits == (YES,) else YES if flag.fits == (NO,) else "7"
    with pytest.raises(ValueError) as wrong:
        notices(parsed("model", *written(flag, flag.names[0], other)))
    given = " ".join(written(flag, flag.names[0], other))
    assert str(wrong.value).startswith(f"{given}: ") and len(str(wrong.value)) > len(flag.dest) + 20


def test_without_such_flags_there_is_no_line() -> None:
    assert notices(parsed()) == []


def test_a_refused_flag_ends_the_command_with_one_line() -> None:
    done = cli("serve", "--data-parallel-size", "2")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "slotwise serve: --data-parallel-size 2: an engine has one copy" in done.stderr


def test_a_command_for_vllm_starts_a_server(tmp_path: Path) -> None:
    log, file = tmp_path / "log", tmp_path / "server.yaml"
    file.write_text("served-model-name: [toy, other-toy]\nmax-num-seqs: 2\nmax-model-len: 1K\nswap-space: 4\n")
    with serving("--config", str(file), "--data-parallel-size", "1", "--trust-remote-code", "--enforce-eager",
                 "--disable-log-requests", "--enable-chunked-prefill", "--dtype", "float", "--disable-log-stats",
                 log=log) as live:
        models = live.client.get("/v1/models").json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("toy", 1024), ("other-toy", 1024)]
        for name, status in (("toy", 200), ("other-toy", 200), ("another", 404)):
            answer = live.client.post("/v1/completions", json={"model": name, "prompt": "def f", "max_tokens": 1})
            assert answer.status_code == status
        assert live.client.get("/admin/scheduling").json()["max_num_seqs"] == 2
    lines = log.read_text().splitlines()
    for name in ("data-parallel-size", "trust-remote-code", "enforce-eager", "disable-log-requests", "swap-space",
                 "enable-chunked-prefill"):
        assert len([line for line in lines if f" --{name} has no effect: " in line]) == 1
    assert not [line for line in lines if "dtype" in line or "Traceback" in line]
