"""What messages are made of: msgspec's Struct, or a plain dataclass where msgspec is not installed.

An engine in a process of its own needs msgspec; one that is called, as on a machine with little but torch, does not.
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
            """Takes what msgspec's takes; `wire` says how it travels, which it cannot."""

            def __init_subclass__(cls, *, frozen: bool = False, **wire: Any) -> None:
                dataclass(frozen=frozen)(cls)


__all__ = ["Struct"]
