"""Installs a wheel in an empty environment, serves its built-in model from another folder, and asks it for an answer.

usage: python deploy/try_wheel.py WHEEL

It needs the standard library and pip, and downloads what the wheel depends on.  `make dist` runs it with the Python at
hand.  For the other versions of Python that the package promises, pip resolves the dependencies and installs nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
PROMPT = "def add(a, b):"
START = 300  # seconds until the server is ready: kernels are compiled for the first time


def serve_and_ask(program: Path, folder: Path) -> str:
    """Returns what the server continues a prompt with.  Raises RuntimeError where it does not serve, or end cleanly."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SLOTWISE"))}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    with subprocess.Popen(
        [program, "serve", "--port", "0"], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as server:
        signal.signal(signal.SIGALRM, lambda *_: server.kill())
        signal.alarm(START)
        printed = []
        try:
            assert server.stdout is not None
            for line in server.stdout:
                printed.append(line)
                if "Ready" in line and (found := ADDRESS.search(line)):
                    break
            else:
                raise RuntimeError("the server did not become ready:\n" + "".join(printed))
            body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
            request = urllib.request.Request(
                found[0] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                text = str(json.load(response)["choices"][0]["text"])
            server.send_signal(signal.SIGTERM)
            server.communicate()
        except BaseException:
            server.kill()
            raise
        finally:
            signal.alarm(0)
    if server.returncode != 0 or not text.strip():
        raise RuntimeError(f"exit status {server.returncode}, answer {text!r}:\n" + "".join(printed))
    return text


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for version in PYTHONS:
            if version != f"{sys.version_info.major}.{sys.version_info.minor}":
                subprocess.run(
                    [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run",
                     "--ignore-installed", "--only-binary", ":all:", "--python-version", version,
                     "--target", str(folder / "nothing"), str(wheel)], check=True)
                print(f"Python {version}: every dependency has a wheel", flush=True)
        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv" / "bin"
        subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel],
                       check=True)
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        text = serve_and_ask(programs / "slotwise", elsewhere)
        print(f"Python {sys.version.split()[0]}: installed, served and answered\n{PROMPT}{text}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
