"""The base class of messages: msgspec's Struct, or a plain dataclass where msgspec is not installed.

An engine in a process of its own needs msgspec; the offline API, as on a machine with little but torch, does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgspec import Struct
else:
    try:
        from msgspec import Struct
    except ImportError:

        class Struct:
            """Accepts the arguments of msgspec's; ignores `wire`, the options of its encoding."""

            def __init_subclass__(cls, *, frozen: bool = False, **wire: Any) -> None:
                dataclass(frozen=frozen)(cls)


__all__ = ["Struct"]
