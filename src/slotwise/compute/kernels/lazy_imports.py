"""Lazy imports: the part of torch that the engine never uses is imported at first use."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

# Shape functions for torch's compiler, which the engine never calls: a quarter of torch's import time.
UNUSED = "torch._meta_registrations"


def spare_torch() -> None:
    """Make the import of torch's module `UNUSED` lazy.  Call it before torch is imported."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or UNUSED in sys.modules or "torch" in sys.modules:
        return
    file = Path(torch.origin).parent / f"{UNUSED.partition('.')[2]}.py"
    spec = importlib.util.spec_from_file_location(UNUSED, file) if file.exists() else None
    if spec is not None:
        module = importlib.util.module_from_spec(spec)
        module.__class__ = _LazyModule
        sys.modules[UNUSED] = module


class _LazyModule(ModuleType):
    """A module that is executed at the first access to a missing attribute."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        cast(Any, self).__class__ = ModuleType
        self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)
