"""Triton's `jit` with types: kernels call each other with `tl.tensor`, and are launched on a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import triton

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
    """A kernel, specialised for its arguments."""
    return cast("Kernel[Arguments, Result]", triton.jit(function))


def jit_varying(
    *names: str, alignments: tuple[str, ...] = ()
) -> Callable[[Callable[Arguments, Result]], Kernel[Arguments, Result]]:
    """The same for a kernel that other values of its arguments `names` do not compile again.

    Args:
        alignments: names of arguments of which other alignments do not, either.
    """
    decorator: Any = triton.jit(do_not_specialize=list(names), do_not_specialize_on_alignment=list(alignments))
    return cast("Callable[[Callable[Arguments, Result]], Kernel[Arguments, Result]]", decorator)
