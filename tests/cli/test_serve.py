"""What `slotwise serve` makes of its options."""

from __future__ import annotations

import argparse

import pytest

from slotwise.cli import serve


def asked(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add(parser.add_subparsers())
    return parser.parse_args(["serve", *arguments])


@pytest.mark.parametrize(("arguments", "environment", "keys"), [
    ((), "", ()), ((), "one", ("one",)), ((), "one, two,,", ("one", "two")),
    (("--api-key", "a,b", "--api-key", "c"), "one", ("a,b", "c"))])
def test_keys_come_from_the_command_line_or_else_the_environment(
        monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], environment: str, keys: tuple[str, ...]) -> None:
    monkeypatch.setenv("SLOTWISE_API_KEY", environment)
    assert serve._keys(asked(*arguments).api_key) == keys


def test_the_queue_is_bounded_by_measuring_unless_told() -> None:
    given = asked()
    assert (given.max_num_queued_reqs, given.max_num_queued_tokens, given.queue_timeout) == (None, None, 0)
    given = asked("--max-num-queued-reqs", "5", "--max-num-queued-tokens", "600", "--queue-timeout", "2.5")
    assert (given.max_num_queued_reqs, given.max_num_queued_tokens, given.queue_timeout) == (5, 600, 2.5)


@pytest.mark.parametrize("arguments", [
    ("--max-num-queued-reqs", "0"), ("--max-num-queued-tokens", "-1"), ("--queue-timeout", "-1"),
    ("--queue-timeout", "nan"), ("--queue-timeout", "inf"), ("--api-key", " ")])
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked(*arguments)
    assert "must" in capsys.readouterr().err
