"""What `make families` found of each family, as a file that the table of architectures is made from.

A pytest plugin: `-p support.families_result --families-result FILE`.
"""

from __future__ import annotations

import json
import platform
import re
from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest

from support.checkpoints import EVERY, class_name

TESTS = {
    "alone": "test_alone", "in company": "test_in_a_batch_arriving_at_random_steps",
    "chunked": "test_in_chunks_of_seven_tokens_and_then_from_cached_prefixes",
    "preempted": "test_with_so_few_blocks_that_requests_are_preempted",
    "prefix-cached": "test_in_chunks_of_seven_tokens_and_then_from_cached_prefixes",
    "GGUF": "test_a_file_computes_the_tokens_of_its_checkpoint",
    "converted": "test_a_file_of_the_converter_computes_the_logits_of_transformers",
    "LoRA": "test_the_tokens_of_an_adapter_are_those_of_merged_weights", "ranks": "test_every_family",
    "no ranks": "test_recurrent_states_are_refused", "not all ranks": "test_what_needs_all_of_a_layer_is_refused",
    "int8": "test_int8_weights_are_smaller_and_close",
}  # fmt: skip
"""The tests that compare a family, by what of it."""
NODE = re.compile(r"::(\w+)\[([\w-]+)\]$")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--families-result", type=Path, metavar="FILE", help="write what tests found of each family")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--families-result")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FamiliesResult(path))


class FamiliesResult:
    """Collects the outcomes of TESTS: "passed", "failed", or the message that refuses a family."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, str]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        node = NODE.search(report.nodeid)
        if node is None or (report.when != "call" and report.passed):
            return
        refused = dict(report.user_properties).get("refused", "")
        for what, test in TESTS.items():
            for family in node[2].split("-") if test == node[1] else ():
                if family in EVERY:
                    self._found[family][what] = str(refused) if report.passed and refused else report.outcome

    def pytest_sessionfinish(self) -> None:
        made = {name: version(name) for name in ("transformers", "torch")}
        rows = {family: {"class": class_name(family)} | {
            what: self._found[family][what] for what in TESTS if what in self._found[family]} for family in EVERY}
        result = {"date": date.today().isoformat(), "machine": platform.machine(), **made, "families": rows}
        self._path.write_text(json.dumps(result, indent=1) + "\n")
