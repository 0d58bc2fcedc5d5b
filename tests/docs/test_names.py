"""Pages that speak of other servers name what Slotwise has, and what they call absent is refused."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `docs` is run from the repository's root and never installed

from docs.generate import coming_from, names, supported  # noqa: E402
from docs.generate.markdown import code  # noqa: E402

from slotwise.api.protocol.unsupported import ELSEWHERE  # noqa: E402
from slotwise.cli import build_parser  # noqa: E402
from slotwise.compute.kernels.reference import ReferenceKernels  # noqa: E402
from slotwise.compute.kernels.select import choose  # noqa: E402
from slotwise.engine.config import KV_CACHE_DTYPES  # noqa: E402

FLAG = re.compile(r"`(--[\w-]+)`")
ROUTE = re.compile(r"`?(/[\w/]+)`?")
ABSENT = sorted(
    {option.there for option in coming_from.VLLM_OPTIONS if option.there not in names.all_options()}
    | {flag for row in coming_from.LLAMA_CPP for flag in FLAG.findall(row.there)
       if flag not in names.all_options()})
PAGES = ("deployment", "supported", "reference/coming-from")
COMMAND = re.compile(r"^(?:/\S+/)?slotwise serve (.*)$", re.MULTILINE)
FIRST_PAGES = ("README.md", "docs/start.md", "docs/when.md")
TYPED = re.compile(r"(?:^|`)(?:\.venv/bin/)?slotwise ([^`\n]*)", re.MULTILINE)


@pytest.mark.parametrize("name", [
    "--max-num-seqs", "--no-enable-prefix-caching", "/health", "/v1/models/{model}", "slotwise chat", "max_tokens",
    "messages", "prompt"])
def test_what_is_there_is_found(name: str) -> None:
    assert names.has(name)


@pytest.mark.parametrize("name", [
    "--max-num", "--max-step-context", "/v1", "/v1/no/such", "slotwise sing", "no_such_field", "audio"])
def test_what_is_absent_retired_or_refused_is_not_found(name: str) -> None:
    assert not names.has(name)


def test_a_table_cannot_name_what_is_not_there() -> None:
    assert coming_from.check("`--port` and `/health`") == "`--port` and `/health`"
    with pytest.raises(KeyError, match="--no-such-option"):
        coming_from.check("`--no-such-option`")


@pytest.mark.parametrize("option", ABSENT)
def test_an_option_that_is_absent_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not taken for the beginning of another one either."""
    with pytest.raises(SystemExit) as ended:
        build_parser("serve").parse_args(["serve", option])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"unrecognized arguments: {option}" in error


def test_an_option_of_the_same_name_is_not_called_absent() -> None:
    same, *rows = coming_from.vllm_options().splitlines()
    for option in coming_from.VLLM_OPTIONS:
        row = [line for line in rows if line.startswith(f"| {code(option.there)} |")] or [same]
        assert code(option.there) in row[0] and ("The same" in row[0]) == names.has(option.there)


def test_what_is_listed_as_not_there_is_not_there() -> None:
    shown = supported.without()
    assert shown.count("\n") + 1 == sum(not names.has(name) for _, name in supported.WITHOUT)
    assert "--data-parallel-size" in shown


def test_the_types_of_a_device_are_those_that_its_kernels_accept() -> None:
    for device in ("cpu", "reference"):
        kernels = choose(device)
        path = supported.KERNELS[device]
        assert supported._kinds(path) == [str(kind).removeprefix("torch.") for kind in kernels.kinds]
        accepted = []
        for name in KV_CACHE_DTYPES:
            try:
                choose(device, kv_cache_dtype=name)
            except ValueError:
                continue
            accepted.append(name)
        assert supported._caches(path) == accepted
    assert supported._kinds(supported.KERNELS["cuda"]) == supported._kinds(supported.KERNELS["reference"])
    assert ReferenceKernels.name in supported.KERNELS


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_the_parsers(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for arguments in COMMAND.findall(text):
        build_parser("serve").parse_args(["serve", *arguments.split()])
    if page == "reference/coming-from":
        assert COMMAND.findall(text)


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_what_a_newcomer_types_is_accepted(page: str) -> None:
    """Commands in code blocks and in the text, with their arguments."""
    for typed in TYPED.findall((ROOT / page).read_text()):
        arguments = shlex.split(typed, comments=True)
        build_parser(arguments[0]).parse_args(arguments)


def test_the_readme_tells_to_serve_and_to_test() -> None:
    targets = re.findall(r"^make ([a-z]+) ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert targets == ["serve", "test"]
    rules = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in rules for target in targets)


def test_a_route_of_another_server_that_is_served_here_is_not_denied() -> None:
    rows = {path: row for row in (*coming_from.LLAMA_CPP, *coming_from.OLLAMA) for path in ROUTE.findall(row.there)}
    served = {path: here for path, here in ELSEWHERE.items() if path in rows}
    assert len(served) > 8 and all(here in rows[path].here for path, here in served.items())
