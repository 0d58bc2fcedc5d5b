"""Every fault in a GPU kernel is caught by a test or a bound of the machine code."""

from __future__ import annotations

import pytest

from attacks.gpu_faults import FAULTS, Fault, caught_by


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_is_caught(fault: Fault) -> None:
    assert caught_by(fault)
