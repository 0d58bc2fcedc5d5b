"""Kernels by the name of a device."""

from __future__ import annotations

import pytest

from slotwise.kernels.select import choose


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_known_device(name):
    assert choose(name).name == name


def test_an_unknown_device_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"'abacus'.*'cpu'.*'reference'"):
        choose("abacus")
