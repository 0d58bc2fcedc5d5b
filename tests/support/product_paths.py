"""The paths of products as parameters, so that a test runs on each that this processor can execute; their assembly."""

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


def assembly_of_products() -> str:
    """What int8 products of bfloat16 are compiled to, for the processor that Numba is told of."""
    import torch
    from numba import cfunc

    from slotwise.compute.kernels.cpu.products import linear_blocks
    from slotwise.compute.kernels.cpu.products.block_layout import layout_of
    from slotwise.compute.kernels.cpu.products.quantize import FORMATS

    code = linear_blocks.product_kernel(layout_of(FORMATS["int8"]), torch.bfloat16, paths.quantized(""))
    text: str = cfunc("void(int64)", nopython=True)(code._entry)._library.get_asm_str()
    return text


def check_sums_of_bytes(assembly: str, *instructions: str) -> None:
    """Bytes are multiplied and added by each of `instructions`, and by nothing else, in vectors of 256 bits."""
    used = [" ".join(line.split()) for line in assembly.splitlines()]
    of_bytes = [line for line in used if any(each in line for each in ("vpdpbusd", "vpmaddubsw", "vpmaddwd"))]
    assert all(line.startswith(instructions) and "%ymm" in line for line in of_bytes)
    assert all(any(line.startswith(each) for line in of_bytes) for each in instructions)
    assert not any("%zmm" in line for line in used)
