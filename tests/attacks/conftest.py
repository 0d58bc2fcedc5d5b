"""Options of the drills, which are left out without `--drills`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attacks")
    group.addoption("--drills", action="store_true", help="run the attacks that take minutes, too")
    group.addoption("--attack-seconds", type=float, default=120.0,
                    help="of the overload, and of attacks (default: 120)")
    group.addoption("--attack-seed", type=int, default=1, help="of attacks (default: 1)")
    group.addoption("--record", action="store_true", help="write what was seen to benchmarks/results/")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--drills", default=False):
        drills = [item for item in items if item.get_closest_marker("drill")]
        config.hook.pytest_deselected(items=drills)
        items[:] = [item for item in items if item not in drills]
