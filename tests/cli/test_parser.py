"""Options that do not exist, `python -m slotwise`, and what a shell completes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slotwise.cli import build_parser
from slotwise.version import __version__


@pytest.mark.parametrize(("arguments", "told"), [
    (("serve", "--max-num-sqes", "4"), "unrecognized arguments: --max-num-sqes; did you mean --max-num-seqs?"),
    (("serve", "--enforce-eagre"), "did you mean --enforce-eager?"),
    (("serve", "--gpu-memory-utilisation=0.5"), "did you mean --gpu-memory-utilization?"),
    (("generate", "--max-tokns=4"), "did you mean --max-tokens?"),
    (("bench", "serve", "--base-urll", "x"), "did you mean --base-url?"),
    (("serve", "model", "another"), "unrecognized arguments: another ("),
    (("serve", "--qqqqqqqqq"), "unrecognized arguments: --qqqqqqqqq ("),
    (("--versoin", "serve"), "unrecognized arguments: --versoin; did you mean --version?")])
def test_an_unknown_option_is_told_the_nearest(
        capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(SystemExit) as end:
        build_parser(arguments[0]).parse_args(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and told in line and line.endswith(" --help)")


def test_the_package_itself_is_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "slotwise", "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"slotwise {__version__}\n", "")


def script(shell: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "slotwise", "completion", shell], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def completed(file: Path, *words: str) -> set[str]:
    """What bash offers for the last of these words, after the script."""
    line = " ".join(words)
    asks = (f'source "{file}"; COMP_WORDS=({line}); [[ -n "{words[-1]}" ]] || COMP_WORDS+=(""); '
            'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); $(complete -p slotwise | sed "s/.*-F \\([^ ]*\\).*/\\1/"); '
            'printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", asks], capture_output=True, text=True, timeout=60, cwd=file.parent)
    return {word.strip() for word in done.stdout.splitlines()}


def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    (file := tmp_path / "complete.bash").write_text(script("bash"))
    (tmp_path / "zzz.yaml").write_text("")
    assert completed(file, "slotwise", "se") == {"serve"}
    assert "--max-num-seqs" in completed(file, "slotwise", "serve", "--max-num-s")
    assert completed(file, "slotwise", "serve", "--scheduling-policy", "f") == {"fcfs", "fair"}
    assert completed(file, "slotwise", "serve", "--config", "zz") == {"zzz.yaml"}
    assert "throughput" in completed(file, "slotwise", "bench", "thr")


def test_zsh_gets_every_command_and_option() -> None:
    text = script("zsh")
    assert text.startswith("#compdef slotwise")
    for word in ("serve", "explain", "--scheduling-policy", "--ssl-certfile"):
        assert word in text
    assert "--swap-space" not in text, "vLLM's are accepted, and not offered"


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    (file := tmp_path / "slotwise.fish").write_text(script("fish"))
    (tmp_path / "zzz.yaml").write_text("")

    def offered(line: str) -> set[str]:
        done = subprocess.run(["fish", "--no-config", "-c", f"source {file}; complete -C '{line}'"],
                              capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert not done.stderr, done.stderr
        return {one.partition("\t")[0] for one in done.stdout.splitlines()}

    assert offered("slotwise se") == {"serve"}
    assert "--max-num-seqs" in offered("slotwise serve --max-num-s")
    assert offered("slotwise serve --scheduling-policy f") == {"fcfs", "fair"}
    assert offered("slotwise serve --config zz") == {"zzz.yaml"}
    assert "throughput" in offered("slotwise bench thr")


def test_fish_gets_every_command_and_option() -> None:
    text = script("fish")
    for word in ("serve", "explain", "scheduling-policy", "ssl-certfile"):
        assert word in text
    assert "swap-space" not in text, "vLLM's are accepted, and not offered"
