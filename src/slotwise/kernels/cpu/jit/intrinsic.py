"""Functions of kernels that are written as LLVM IR.

    def _fetch_add(builder, address, amount):            # emits the instructions of one call
        return builder.atomic_rmw("add", ...)

    fetch_add: Callable[[int, int], int] = intrinsic(_fetch_add, INT, INT, returns=INT)

The declared type is what kernels and the type checker see; the numba types say what is in registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from numba import types
from numba.extending import intrinsic as numba_intrinsic

ElementType: TypeAlias = Any  # numba's type of a stored element; its `bitwidth` is not in numba's annotations

INT, FLOAT, NOTHING = types.int64, types.float32, types.void
KIND = object()
"""An argument of which only the type counts, that of stored elements: the emitter gets the type."""
VALUE = object()
"""An element of the last `KIND` as it is in registers: int64 for the wider integers, else float32."""


def intrinsic(emit: Callable[..., Any], *arguments: Any, returns: Any = NOTHING) -> Any:
    """A function for kernels whose calls become what `emit` emits.

    Args:
        emit: called with a builder and the values of the arguments; returns the result, or a list for a tuple.
        arguments: a numba type, KIND or VALUE for each.
        returns: a numba type or VALUE.
    """
    def define(_typing: object, *given: types.Type) -> tuple[Any, Callable[..., Any]]:
        def resolved(wanted: Any, kind: types.Type) -> types.Type:
            return kind if wanted is KIND else _in_registers(given) if wanted is VALUE else wanted

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            operands = [kind if wanted is KIND else value
                        for wanted, kind, value in zip(arguments, given, values, strict=True)]
            made = emit(builder, *operands)
            if made is None:
                return context.get_dummy_value()
            return context.make_tuple(builder, signature.return_type, made) if isinstance(made, list) else made

        operands = [resolved(*pair) for pair in zip(arguments, given, strict=True)]
        return resolved(returns, returns)(*operands), generate

    names = ["typing", *(f"argument{place}" for place in range(len(arguments)))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    define.__name__ = define.__qualname__ = emit.__name__.lstrip("_")
    define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # numba reads it
    return numba_intrinsic(define)


def _in_registers(given: tuple[types.Type, ...]) -> types.Type:
    """The type of an element in registers whose kind is the last of the given types."""
    return INT if given[-1] in (types.int32, types.int64) else FLOAT
