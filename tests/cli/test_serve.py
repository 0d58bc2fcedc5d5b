"""What `slotwise serve` makes of its options."""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path

import httpx
import pytest
from support.live import cli, serving

from slotwise.api.http_server import listen
from slotwise.cli import build_parser, main, serve_command
from slotwise.core.scheduler_limits import Tier


def asked(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_command.add(parser.add_subparsers())
    return parser.parse_args(["serve", *arguments])


@pytest.mark.parametrize(("arguments", "environment", "keys"), [
    ((), None, ()), (("--api-key", "a"), " ", ("a",)), ((), "one", ("one",)), ((), "one, two,,", ("one", "two")),
    (("--api-key", "a,b", "--api-key", "c"), "one", ("a,b", "c"))])
def test_keys_come_from_the_command_line_or_else_the_environment(
        monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], environment: str | None,
        keys: tuple[str, ...]) -> None:
    monkeypatch.delenv("SLOTWISE_API_KEY", raising=False)
    if environment is not None:
        monkeypatch.setenv("SLOTWISE_API_KEY", environment)
    assert serve_command.api_keys_of(asked(*arguments).api_key) == keys


@pytest.mark.parametrize("key", ["", " ", "a\n", "a\x1b"])
def test_a_key_that_cannot_be_sent_is_refused(capsys: pytest.CaptureFixture[str], key: str) -> None:
    with pytest.raises(SystemExit):
        asked("--api-key", key)
    assert "a key must not be empty, and must be of characters that can be sent" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["", " ", "a\0b", "a\n"])
def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str) -> None:
    """An empty one, as of an unset variable, would open the server to all; one with a NUL is an error of sockets."""
    (tmp_path / "config.yaml").write_text(f"host: {json.dumps(host)}\n")
    for arguments in (["--host", host], ["--config", str(tmp_path / "config.yaml")]):
        with pytest.raises(SystemExit):
            build_parser("serve").parse_args(["serve", *arguments])
        (line,) = capsys.readouterr().err.splitlines()
        assert "host: " in line


@pytest.mark.parametrize("value", ["", " ", "\t\n", ",", " , ,", "a\x01b", "\udcff"])
@pytest.mark.parametrize("name", ["SLOTWISE_API_KEY", "SLOTWISE_ADMIN_API_KEY"])
def test_a_variable_that_holds_no_key_opens_no_server(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert main(["serve", "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"slotwise serve: {name} is set, but holds ")
    assert line.endswith("set it to a key, or unset it to serve without one")


@pytest.mark.parametrize(("value", "told"), [
    (None, "needs a secret that its peers have"), ("", "SLOTWISE_KV_TRANSFER_SECRET: a transfer secret has 16"),
    ("short", "SLOTWISE_KV_TRANSFER_SECRET: a transfer secret has 16")])
def test_no_server_lets_prompts_travel_without_a_secret(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str | None, told: str) -> None:
    monkeypatch.delenv("SLOTWISE_KV_TRANSFER_SECRET", raising=False)
    if value is not None:
        monkeypatch.setenv("SLOTWISE_KV_TRANSFER_SECRET", value)
    role = '{"kv_connector": "TCPConnector", "kv_role": "kv_producer"}'
    assert main(["serve", "--port", "0", "--kv-transfer-config", role]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_transfer_secret_without_a_role_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    assert main(["serve", "--port", "0", "--kv-transfer-secret-file", str(tmp_path / "secret")]) == 1
    assert "--kv-transfer-secret-file has no effect without --kv-transfer-config" in capsys.readouterr().err


def test_there_is_one_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLOTWISE_ADMIN_API_KEY", raising=False)
    assert serve_command.admin_key_of(None) == "" and serve_command.admin_key_of("a,b") == "a,b"
    monkeypatch.setenv("SLOTWISE_ADMIN_API_KEY", " root ")
    assert serve_command.admin_key_of(None) == "root"
    monkeypatch.setenv("SLOTWISE_ADMIN_API_KEY", "a,b")
    with pytest.raises(ValueError, match="there is one admin key"):
        serve_command.admin_key_of(None)


@pytest.mark.parametrize(("keys", "told"), [
    ("api_keys = []", "api_keys: it is empty"), ('api_keys = [" "]', "a key must not be empty"),
    ('api_keys_env = "NO_SUCH"', "no keys in NO_SUCH"), ('api_keys_env = "BLANK"', "no keys in BLANK")])
def test_a_tier_without_the_keys_it_announces_opens_no_server(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: str, told: str) -> None:
    monkeypatch.setenv("BLANK", " , ")
    path = tmp_path / "tiers.toml"
    path.write_text(f'[[tier]]\nname = "gold"\n{keys}\n')
    with pytest.raises(ValueError, match=told):
        serve_command.tiers_of(asked("--tiers", str(path)))


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


TIERS = '[[tier]]\nname = "gold"\nslots = 2\napi_keys = ["g"]\n[[tier]]\nname = "silver"\n'


def test_tiers_are_read_before_anything_is_started(tmp_path: Path) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(TIERS)
    found = serve_command.tiers_of(asked("--tiers", str(path), "--max-num-seqs", "4", "--api-key", "k"))
    assert [served.tier for served in found] == [Tier("gold", slots=2), Tier("silver")]
    assert serve_command.tiers_of(asked()) == ()
    path.write_text(TIERS + 'api_keys = ["s"]\n')
    with pytest.raises(ValueError, match="an --api-key is in no tier, and there is no tier without keys for it"):
        serve_command.tiers_of(asked("--tiers", str(path), "--api-key", "k"))
    assert len(serve_command.tiers_of(asked("--tiers", str(path), "--api-key", "s"))) == 2
    wrong = cli("serve", "--tiers", str(path), "--max-num-seqs", "1")
    assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1
    assert wrong.stderr.startswith(f"slotwise serve: {path}: tier gold: slots: with it, tiers keep 2 of the 1")
    path.write_text('[[tier]]\nname = "gold"\nrequests_per_minute = 5\n')
    assert serve_command.tiers_of(asked("--tiers", str(path), "--api-key", "k"))[0].settings.requests_per_minute == 5
    with pytest.raises(ValueError, match="tier gold: a quota is a key's, and the server has no keys"):
        serve_command.tiers_of(asked("--tiers", str(path)))


def test_a_tier_and_the_admin_key_reach_a_real_server(tmp_path: Path) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(TIERS)
    with serving("--tiers", str(path), "--admin-api-key", "root", "--max-num-seqs", "4", log=tmp_path / "log") as live:
        body = {"prompt": "def add(a, b):", "max_tokens": 3, "temperature": 0}
        told = [httpx.post(f"{live.url}/v1/completions", json=body | more, headers={"Authorization": f"Bearer {key}"},
                           timeout=120) for key, more in (("g", {}), ("root", {"service_tier": "silver"}), ("k", {}))]
        assert [answer.status_code for answer in told] == [200, 200, 401]
        assert [answer.json()["service_tier"] for answer in told[:2]] == ["gold", "silver"]
        scheduling = [httpx.get(f"{live.url}/admin/scheduling", headers={"Authorization": f"Bearer {key}"}, timeout=120)
                      for key in ("g", "root")]
        assert [answer.status_code for answer in scheduling] == [403, 200]
        assert [tier["name"] for tier in scheduling[1].json()["tiers"]] == ["gold", "silver"]


@pytest.mark.parametrize("option", ["--tiers", "--chat-template"])
@pytest.mark.parametrize("file", ["pipe", "/dev/zero", "."])
def test_a_file_that_may_never_end_is_not_read(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, file: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit):
        main(["serve", option, str(tmp_path / file)])
    assert f"{option}: must be a regular file" in capsys.readouterr().err


def test_a_very_large_file_of_tiers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "tiers").open("wb") as file:
        file.truncate(1 << 40)
    assert main(["serve", "--tiers", str(tmp_path / "tiers")]) == 1
    assert "larger than" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "scale"])
def test_a_port_in_use_is_named_with_the_process_that_listens_on_it(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = cli(command, "--port", str(port))
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        f"slotwise {command}: --port {port} is in use: process {os.getpid()} (")
    assert "choose another port" in done.stderr


@pytest.mark.parametrize(("host", "says"), [
    ("192.0.2.1", "--host 192.0.2.1 is not an address of this machine"), ("no such host", "--host no such host: ")])
def test_an_address_that_cannot_be_bound_names_its_option(host: str, says: str) -> None:
    with pytest.raises(OSError, match=f"^{says}"):
        listen(host, 0)
