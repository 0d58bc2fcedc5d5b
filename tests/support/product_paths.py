"""The paths of products as parameters: every test runs on each that this processor can execute."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from slotwise.compute.kernels.cpu.products import paths


def param(path: str, *values: object) -> object:
    """`values`, then `path`, as one set of parameters; skipped by name where the path cannot run."""
    why = paths.obstacle(path)
    name = "-".join([*(str(value).removeprefix("torch.") for value in values), path])
    return pytest.param(*values, path, id=name, marks=pytest.mark.skipif(bool(why), reason=f"path {path}: {why}"))


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Runs a test on each of the paths, which it is given as `path`."""
    return pytest.mark.parametrize("path", [param(name) for name in names])
