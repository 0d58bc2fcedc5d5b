"""Lazy imports: the parts of torch that the engine never uses are imported at first use."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

# Shape functions for torch's compiler, torch.export, distributions and torch's own quantization, which the engine never
# calls: two fifths of torch's import time.
UNUSED = ("torch._meta_registrations", "torch.export", "torch.distributions", "torch.quantization")


def spare_torch() -> None:
    """Make the import of torch's modules `UNUSED` lazy.  Call it before torch is imported."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or "torch" in sys.modules:
        return
    for name in UNUSED:
        place = Path(torch.origin).parent / name.partition(".")[2]
        package = place / "__init__.py"
        file = package if package.exists() else place.with_suffix(".py")
        spec = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=[str(place)] if file == package else None) if file.exists() else None
        if spec is not None:
            module = importlib.util.module_from_spec(spec)
            module.__class__ = _LazyModule
            sys.modules[name] = module
    sys.meta_path.insert(0, _Submodules())


class _LazyModule(ModuleType):
    """A module that is executed at the first access to a missing attribute."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        _execute(self)
        return getattr(self, name)


def _execute(module: _LazyModule) -> None:
    cast(Any, module).__class__ = ModuleType
    module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]


class _Submodules(MetaPathFinder, Loader):
    """Executes a lazy package before a module within it is imported, and returns modules that this has imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = sys.modules.get(name.rpartition(".")[0])
        if not isinstance(package, _LazyModule):
            return None
        _execute(package)
        # If the package has imported the module, Python must not execute it again: `create_module` returns it.
        found = sys.modules.pop(name, None)
        return ModuleSpec(name, self, loader_state=(found, found.__spec__)) if found is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state[1]
