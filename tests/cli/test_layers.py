"""Where the settings of a server come from: the command line, the environment, a file, the default."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from slotwise.cli import build_parser, main, serve_command


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("SLOTWISE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


def parsed(*arguments: str) -> argparse.Namespace:
    found: argparse.Namespace = build_parser("serve").parse_args(["serve", *arguments])
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command with these arguments ends with."""
    with pytest.raises(SystemExit) as end:
        parsed(*arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("slotwise serve: ")
    return line


def test_without_any_layer_every_setting_has_its_default() -> None:
    found = parsed()
    serve_parser = build_parser("serve")._subparsers._group_actions[0].choices["serve"]
    for action in serve_parser._actions:
        if action.default != argparse.SUPPRESS:
            assert getattr(found, action.dest) == action.default, action.dest
    assert found.run is serve_command.run and found.max_num_seqs == 64 and found.api_key == []


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
        monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text("max-num-seqs: 4\nmax_num_batched_tokens: 2K\nseed: 3\nport: 9000\nlog-format: json\n")
    monkeypatch.setenv("SLOTWISE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("SLOTWISE_SEED", "6")
    found = parsed("--config", str(file), "--max-num-seqs", "7")
    assert (found.max_num_seqs, found.seed, found.max_num_batched_tokens) == (7, 6, 2048)
    assert (found.port, found.log_format, found.block_size) == (9000, "json", None)
    assert parsed("--port", "1").port == 1 and parsed().port == 8000


def test_a_variable_may_name_the_file(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    file.write_text("port: 1")
    (other := tmp_path / "other.yaml").write_text("port: 2")
    monkeypatch.setenv("SLOTWISE_CONFIG", str(file))
    assert parsed().port == 1 and parsed("--config", str(other)).port == 2


def test_a_list_is_replaced_and_not_joined(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text('allowed-origins: ["https://a.example", "https://b.example"]\nserved-model-name: [x, y]\n')
    found = parsed("--config", str(file))
    assert found.allowed_origins == ["https://a.example", "https://b.example"]
    assert found.served_model_name == ["x", "y"]
    monkeypatch.setenv("SLOTWISE_ALLOWED_ORIGINS", '["https://c.example", "https://d.example"]')
    monkeypatch.setenv("SLOTWISE_SERVED_MODEL_NAME", "z")
    found = parsed("--config", str(file))
    assert found.allowed_origins == ["https://c.example", "https://d.example"] and found.served_model_name == ["z"]
    found = parsed("--config", str(file), "--allowed-origins", "https://e.example", "--served-model-name", "u", "v")
    assert found.allowed_origins == ["https://e.example"] and found.served_model_name == ["u", "v"]
    monkeypatch.setenv("SLOTWISE_ALLOWED_HOSTS", "[::1]")
    assert parsed().allowed_hosts == ["[::1]"]


def test_switches_are_true_or_false(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text("enable-prefix-caching: false\ndisable-log-stats: true\ntrust-remote-code: yes\n")
    found = parsed("--config", str(file))
    assert (found.enable_prefix_caching, found.disable_log_stats, found.trust_remote_code) == (False, True, True)
    monkeypatch.setenv("SLOTWISE_DISABLE_LOG_STATS", "0")
    monkeypatch.setenv("SLOTWISE_ENABLE_PREFIX_CACHING", "True")
    found = parsed("--config", str(file))
    assert (found.enable_prefix_caching, found.disable_log_stats) == (True, False)
    assert parsed("--config", str(file), "--no-enable-prefix-caching").enable_prefix_caching is False
    file.write_text("no-enable-prefix-caching: true")
    monkeypatch.delenv("SLOTWISE_ENABLE_PREFIX_CACHING")
    assert parsed("--config", str(file)).enable_prefix_caching is False


def test_the_model_may_be_anywhere(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text("model: of-the-file")
    assert serve_command.model_of(parsed("--config", str(file))) == "of-the-file"
    assert serve_command.model_of(parsed("given", "--config", str(file))) == "given"
    assert serve_command.model_of(parsed("--model", "option", "--config", str(file))) == "option"
    monkeypatch.setenv("SLOTWISE_MODEL", "of-the-environment")
    assert serve_command.model_of(parsed("--config", str(file))) == "of-the-environment"
    assert serve_command.model_of(parsed("same", "--model", "same")) == "same"
    with pytest.raises(ValueError, match="a server has one model"):
        serve_command.model_of(parsed("one", "--model", "other"))
    with pytest.raises(ValueError, match=r"has taken \./checkpoint for a further name"):
        monkeypatch.delenv("SLOTWISE_MODEL")
        serve_command.model_of(parsed("--served-model-name", "toy", "./checkpoint"))


def test_texts_of_the_file_are_what_is_written(file: Path) -> None:
    file.write_text("api-key: [0123, 1e3]\nserved-model-name: no\nmax-stall-ms: 1e1\n")
    found = parsed("--config", str(file))
    assert (found.api_key, found.served_model_name, found.max_stall_ms) == (["0123", "1e3"], ["no"], 10.0)


def test_keys_of_the_environment_win_over_those_of_the_file(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text("api-key: [a, b]\nadmin-api-key: c\n")
    found = parsed("--config", str(file))
    assert serve_command.api_keys_of(found.api_key) == ("a", "b")
    assert serve_command.admin_key_of(found.admin_api_key) == "c"
    monkeypatch.setenv("SLOTWISE_API_KEY", "d,e")
    monkeypatch.setenv("SLOTWISE_ADMIN_API_KEY", "f")
    found = parsed("--config", str(file))
    assert serve_command.api_keys_of(found.api_key) == ("d", "e")
    assert serve_command.admin_key_of(found.admin_api_key) == "f"
    assert serve_command.api_keys_of(parsed("--config", str(file), "--api-key", "g").api_key) == ("g",)


@pytest.mark.parametrize(("content", "told"), [
    ("max-num-sqes: 4", "there is no option 'max-num-sqes'; did you mean 'max-num-seqs'?"),
    ("zzzzqqq: 4", "there is no option 'zzzzqqq'"), ("config: x.yaml", "there is no option 'config'"),
    ("help: true", "there is no option 'help'"), ("? [a]\n: 1", "there is no option '?'"),
    ("port: 1\nport: 2", "port is there twice"), ("max-num-seqs: 1\nmax_num_seqs: 1", "max_num_seqs is there twice"),
    ("port:", "port: it has no value"), ("port: ~", "port: it has no value"), ('host: " "', "it is set, but empty"),
    ("api-key: []", "it is set, but empty"), ("port: {a: 1}", "port: must be a value or a list of values"),
    ("api-key: [[a]]", "api-key: must be a value"), ("port: [1, 2]", "server.yaml: port: takes one value, not 2"),
    ("port: 99999", "server.yaml: port: must be a whole number from 0 to 65535"),
    ("disable-log-stats: 2", "server.yaml: disable-log-stats: must be true or false, not '2'"),
    ("log-format: xml", "server.yaml: log-format: invalid choice"), ("- port", "must hold options and their values"),
    ("port", "must hold options"), ("a: b: c", "mapping values are not allowed"), ("\x00", "special characters"),
    ("[" * 100_000, "recursion"), ("&a [*a]", "must hold options")])
def test_a_file_with_a_fault_is_one_line(
        capsys: pytest.CaptureFixture[str], file: Path, content: str, told: str) -> None:
    file.write_text(content)
    line = refused(capsys, "--config", str(file))
    assert f"{file}: " in line and told in line


def test_what_is_no_file_of_settings_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "No such file" in refused(capsys, "--config", str(tmp_path / "nowhere"))
    os.mkfifo(tmp_path / "pipe")
    assert "must be a regular file" in refused(capsys, "--config", str(tmp_path / "pipe"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "utf-8" in refused(capsys, "--config", str(tmp_path / "binary"))
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 40)
    assert "larger than" in refused(capsys, "--config", str(tmp_path / "large"))
    (tmp_path / "empty").write_text("# nothing\n")
    assert parsed("--config", str(tmp_path / "empty")).port == 8000


@pytest.mark.parametrize(("name", "value", "told"), [
    ("PORT", "x", "SLOTWISE_PORT: must be a whole number"), ("MAX_NUM_SEQS", "0", "SLOTWISE_MAX_NUM_SEQS: must be"),
    ("MAX_NUM_SEQS", "", "it is set, but empty"), ("DISABLE_LOG_STATS", "maybe", "must be true or false"),
    ("ALLOWED_ORIGINS", '["a"]', "must be origins"), ("ALLOWED_ORIGINS", "[]", "it is set, but empty")])
def test_a_variable_with_a_fault_is_one_line(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, told: str) -> None:
    monkeypatch.setenv(f"SLOTWISE_{name}", value)
    line = refused(capsys)
    assert f"SLOTWISE_{name}: " in line and told in line


def test_an_address_that_kubernetes_sets_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTWISE_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("SLOTWISE_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    assert parsed().port == 8000


def test_other_commands_read_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTWISE_MAX_NUM_SEQS", "5")
    assert build_parser("generate").parse_args(["generate"]).max_num_seqs == 64


@pytest.mark.parametrize(("content", "variables", "arguments", "says"), [
    ("max_num_batched_tokens: 8\n", {}, (), "max_num_batched_tokens (8) must be at least --max-num-seqs (64)"),
    ("max-num-batched-tokens: 8\n", {}, ("--max-num-seqs", "9"),
     "max-num-batched-tokens (8) must be at least --max-num-seqs (9)"),
    ("", {"SLOTWISE_MAX_NUM_SEQS": "32"}, ("--max-num-batched-tokens", "8"),
     "--max-num-batched-tokens (8) must be at least SLOTWISE_MAX_NUM_SEQS (32)"),
    ("tensor-parallel-size: 2\n", {}, ("--packed-weights-cache", "1"),
     "--packed-weights-cache is not supported with tensor-parallel-size 2"),
    ("", {}, ("-tp", "2", "--packed-weights-cache", "1"), "--packed-weights-cache is not supported with -tp 2")])
def test_a_message_names_each_setting_as_it_was_typed(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path, content: str,
        variables: dict[str, str], arguments: tuple[str, ...], says: str) -> None:
    file.write_text(content)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("slotwise.compose.launch.hold_off", lambda: None)  # of the collector, in this process
    assert main(["serve", "--port", "0", "--config", str(file), *arguments]) == 1
    assert f"slotwise serve: {says}" in capsys.readouterr().err
