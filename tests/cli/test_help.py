"""`--help` shows the common options, `--help all` every one, and `--help GROUP` those of a group."""

from __future__ import annotations

import pytest

from slotwise.cli import build_parser
from slotwise.cli.parser import topic_of


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        build_parser(arguments[0]).parse_args(arguments)
    assert end.value.code == 0
    return capsys.readouterr().out


def options_in(text: str) -> list[str]:
    return [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  -")]


def test_the_help_of_serve_shows_ten_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, "serve", "--help")
    assert text.startswith("usage: slotwise serve [MODEL] [options]\n")
    assert set(options_in(text)) == {
        "--host", "--port", "--api-key", "--served-model-name", "--max-num-seqs", "--dtype", "--quantization",
        "--max-model-len", "--gpu-memory-utilization"}
    assert len(text.splitlines()) < 50, "it fits a screen"


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("form", ["{} all", "{}=all"])
def test_all_of_it_is_one_word_further(capsys: pytest.CaptureFixture[str], option: str, form: str) -> None:
    if option == "-h" and "=" in form:
        form = "-hall"
    text = helped(capsys, "serve", *form.format(option).split())
    assert {"--host", "--kv-transfer-config", "--max-loras"} <= set(options_in(text))
    assert "--swap-space" not in text, "vLLM's flags that change nothing are accepted, and not listed"


def test_every_option_is_in_the_common_ones_or_in_a_group_that_the_help_names(
        capsys: pytest.CaptureFixture[str]) -> None:
    short = helped(capsys, "serve", "--help")
    named = short.replace("\n", " ").rpartition("one of the groups ")[2].replace(" ", "").split(",")
    found = set(options_in(short))
    for group in named:
        found |= set(options_in(helped(capsys, "serve", "--help", group)))
    assert found >= set(options_in(helped(capsys, "serve", "--help", "all")))
    assert "lora-adapters" in named and topic_of("LoRA adapters") == "lora-adapters"


def test_an_unknown_topic_is_told_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser("serve").parse_args(["serve", "--help", "adapters"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no group 'adapters'; there are all," in line and "lora-adapters" in line


def test_a_command_without_common_options_shows_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert helped(capsys, "top", "--help") == helped(capsys, "top", "--help", "all")
