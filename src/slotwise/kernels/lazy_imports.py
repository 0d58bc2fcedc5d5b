"""Imports that wait until somebody needs them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

# Shapes of results without results, for torch's compiler, which the engine never calls: a quarter of torch's import.
UNUSED = "torch._meta_registrations"


def spare_torch() -> None:
    """Before torch is imported: its module `UNUSED` is loaded when something in it is asked for, and not before."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or UNUSED in sys.modules or "torch" in sys.modules:
        return
    file = Path(torch.origin).parent / f"{UNUSED.partition('.')[2]}.py"
    spec = importlib.util.spec_from_file_location(UNUSED, file) if file.exists() else None
    if spec is not None:
        module = importlib.util.module_from_spec(spec)
        module.__class__ = _Waiting
        sys.modules[UNUSED] = module


class _Waiting(ModuleType):
    """A module that is executed when a name is asked for that is not there yet."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)
