from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """The interpreter asks the environment again while it runs."""
    from support.cuda_device import interpreted

    with interpreted():
        yield


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that is allocated and not written holds NaN, or the largest integer: whatever is read too early shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # what fills it: torch.utils.deterministic
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
