"""Keeps Numba from reading `.numba_config.yaml` of the current folder, which may be a checkpoint's.

Numba looks for that file when it is imported and again at every compilation, if it can import yaml.  A command's
process imports Numba's configuration without yaml, and then without the file's name.  The variables NUMBA_* of the
environment hold as ever.  Children have another current folder (`child.HOME`), and other programs keep their file.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

CONFIG = "numba.core.config"
PARSER = "yaml"


def ignore_file() -> None:
    """From here on an import of Numba reads no file of the current folder.  Does nothing where it is imported."""
    if CONFIG not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds that one module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != CONFIG:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Executes the module without its parser of files."""

    def exec_module(self, module: ModuleType) -> None:
        parser = sys.modules.get(PARSER)
        sys.modules[PARSER] = None  # type: ignore[assignment]  # makes its import fail
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says that it cannot read the file
                super().exec_module(module)
        finally:
            if parser is None:
                del sys.modules[PARSER]
            else:
                sys.modules[PARSER] = parser
        module._config_fname = ""  # type: ignore[attr-defined]  # what it looks for when it compiles
