"""Triton's `jit` with types, and what tensor cores multiply on the device or under Triton's interpreter.

Kernels call each other with `tl.tensor`, and are launched on a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
import triton
import triton.language as tl

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)


class Kernel(Protocol[Arguments, Result]):
    """A function that Triton compiles."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call it, within another kernel."""
        ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The function that launches it on `grid`, with tensors and numbers, constants and options by name."""
        ...


def jit(function: Callable[Arguments, Result]) -> Kernel[Arguments, Result]:
    """A kernel, specialized for its arguments."""
    return cast("Kernel[Arguments, Result]", triton.jit(function))


def jit_varying(
    *names: str, alignments: tuple[str, ...] = ()
) -> Callable[[Callable[Arguments, Result]], Kernel[Arguments, Result]]:
    """A kernel that is not compiled again for other values of its arguments `names`.

    Args:
        alignments: names of arguments for whose other alignments it is not compiled again, either.
    """
    decorator: Any = triton.jit(do_not_specialize=list(names), do_not_specialize_on_alignment=list(alignments))
    return cast("Callable[[Callable[Arguments, Result]], Kernel[Arguments, Result]]", decorator)


@jit
def _nothing() -> None:
    pass


INTERPRETED = not isinstance(_nothing, triton.JITFunction)
"""Whether kernels are defined under Triton's interpreter, and run on the CPU."""

# The interpreter multiplies the bits of bfloat16 instead of its values.
OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,
            torch.float16: tl.float32 if INTERPRETED else tl.float16}
"""What tensor cores multiply, by the type of tensors."""
