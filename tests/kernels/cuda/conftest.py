from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """The interpreter asks the environment again while it runs."""
    from kernels.cuda.device import interpreted

    with interpreted():
        yield
