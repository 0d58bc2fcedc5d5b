"""Clients that are installed in environments of their own, and the programs that use them.

`make clients-more` makes an environment for each folder of clients/more: a virtual environment from its
requirements.txt, or `node_modules` from its package.json.  Tests run in the project's own environment and start
programs in the client's: a command that the client installs, or the folder's client.py or client.mjs, whose functions
call the client as a user's program would (see `Calls`).
"""

from __future__ import annotations

import json
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from servers import ROOT, Server

FOLDERS = ROOT / "clients" / "more"
ENVIRONMENTS = ROOT / ".venv-clients-more"
LONGEST = 240  # seconds a program may take


class Environment:
    """Where the client of a folder in clients/more is installed.

    Attributes:
        version: that of the client's package; empty if it is not installed.
        needed: a mark that skips tests without it.
    """

    def __init__(self, name: str, package: str) -> None:
        self.folder = FOLDERS / name
        self._node = (self.folder / "package.json").exists()
        self._installed = self.folder / "node_modules" if self._node else ENVIRONMENTS / name
        self.version = self._version_of(package)
        self.needed = pytest.mark.skipif(
            not self.version, reason=f"{package} is not installed: make clients-more-install ONLY={name}")

    def _version_of(self, package: str) -> str:
        if self._node:
            described = self._installed / package / "package.json"
            return json.loads(described.read_text())["version"] if described.exists() else ""
        places = [str(place) for place in self._installed.glob("lib/python*/site-packages")]
        return next((found.version for found in metadata.distributions(name=package, path=places)), "")

    def program(self, name: str) -> str:
        """The path of a program that the client's package installs."""
        return str(self._installed / (".bin" if self._node else "bin") / name)

    def run(self, program: str, *arguments: str, home: Path, stdin: str = "", status: int = 0,
            **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment.

        Args:
            home: the folder that it runs in and takes for the user's home.
            status: the exit status that it must have.
            variables: further environment variables.
        """
        found = os.pathsep.join((str(Path(self.program(program)).parent), os.environ["PATH"]))
        environment = os.environ | {"HOME": str(home), "NO_COLOR": "1", "PATH": found} | variables
        done = subprocess.run([self.program(program), *arguments], cwd=home, env=environment, input=stdin,
                              capture_output=True, text=True, timeout=LONGEST)
        assert done.returncode == status, f"{program} exits with {done.returncode}: {done.stdout}\n{done.stderr}"
        return done

    def calls(self, server: Server, home: Path) -> Calls:
        """Runs the folder's client.py or client.mjs, which calls the client at `server`."""
        asked = {"url": server.url, "base_url": server.base_url, "model": server.model, "key": server.key}
        results = home / "results.json"
        if self._node:
            command = ["node", str(self.folder / "client.mjs")]
        else:
            command = [self.program("python"), str(self.folder / "client.py")]
        environment = os.environ | {"HOME": str(home), "PYTHONPATH": str(FOLDERS)}
        done = subprocess.run([*command, json.dumps(asked), str(results)], cwd=home, env=environment,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST)
        assert done.returncode == 0, done.stderr
        return Calls(json.loads(results.read_text()))


class Calls:
    """What the functions of a client's program returned or raised."""

    def __init__(self, results: dict[str, Any]) -> None:
        self._results = results

    def __getitem__(self, name: str) -> Any:
        """What the function of that name returned.  The test fails with the traceback of one that raised."""
        result = self._results[name]
        assert "raised" not in result, result["raised"]
        return result["returned"]
