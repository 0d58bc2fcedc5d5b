"""Commands and environments of child Python processes; neither they nor this one import from the current folder.

The current folder may be a checkpoint's, whose `torch.py` would run in the place of torch.  `python -m` puts it first
on the module path, and an empty or relative entry of PYTHONPATH means it or a folder in it.  This module is imported
while that still holds: it may import only what Python has imported at its start.
"""

from __future__ import annotations

import os
import sys

CACHES = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR")  # folders that parent and child must share
KEYS = ("SLOTWISE_API_KEY", "SLOTWISE_ADMIN_API_KEY")
SECRETS = (*KEYS, "SLOTWISE_KV_TRANSFER_SECRET")  # read by commands only; children receive none
HOME = "/"  # the current folder of children, since libraries read configuration from it
COMMAND = "slotwise"
OURS = os.path.abspath(__file__).rpartition(f"{os.sep}{COMMAND}{os.sep}")[0]  # the folder in which this package lies
MAIN = os.path.join(OURS, COMMAND, "__main__.py")
INSTALLED = ("site-packages", "dist-packages")
_kept = set(SECRETS)


def python(module: str, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    """Returns the command that runs `module` of this package in a new interpreter, to be started in `HOME`.

    Args:
        options: of the interpreter.

    Raises:
        RuntimeError: the interpreter's path is unknown, as when Python is embedded in another program.
    """
    if not os.path.isabs(sys.executable or ""):
        raise RuntimeError("Python does not know the path of its interpreter (sys.executable): start it by a full path")
    return [sys.executable, "-P", *options, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Returns the environment of a new process: this one's, without API keys and relative folders of modules.

    If this package is not installed, its own folder is added: a child runs the same code as its parent.
    """
    found = {name: value for name, value in os.environ.items() if name not in _kept}
    path = [entry for entry in found.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    if os.path.basename(OURS) not in INSTALLED and OURS not in path:
        path.append(OURS)
    if path:
        found["PYTHONPATH"] = os.pathsep.join(path)
    for name in CACHES:
        if found.get(name):
            found[name] = os.path.abspath(found[name])
    return found | {"PYTHONSAFEPATH": "1"}


def keep_secret(name: str) -> None:
    """Keeps a variable of the environment from children started from here on."""
    _kept.add(name)


def leave_current_folder() -> bool:
    """Removes the current folder and relative entries from the module path of a process that runs a command.

    Called first in the command's package.  Modules already imported stay; other programs keep their path.

    Returns:
        Whether this process runs a command.
    """
    by_name = sys.argv[0] in ("-m", MAIN)  # the first until the named module is found; then the file of this package
    if not by_name and os.path.basename(sys.argv[0]) != COMMAND:
        return False
    if by_name and not sys.flags.safe_path:
        del sys.path[0]
    entries = os.environ["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in os.environ else []
    unwanted = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)}
    sys.path[:] = [entry for entry in sys.path if entry not in unwanted]
    return True
