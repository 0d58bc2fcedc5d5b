"""GuideLLM, vLLM's benchmark of servers, with synthetic prompts of a local tokenizer."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from servers import BUILTIN, ROOT, Server

CLIENT = "`guidellm`"
VERSION = version("guidellm")
SETTING = "`--backend kind=openai_http,target=http://127.0.0.1:8000` ([the command](#benchmark-a-server))."
PROGRAM = Path(sys.executable).with_name("guidellm")
COMMAND = re.compile(r"^```\n(guidellm .*?)^```", re.DOTALL | re.MULTILINE)
CHATS = ("guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000 --profile kind=constant,rate=20 "
         "--constraint kind=max_requests,count=6 --data kind=synthetic_text,prompt_tokens=16,output_tokens=8 "
         f"--tokenizer kind=huggingface_auto,model={BUILTIN}")


def requests(command: str, server: Server, folder: Path) -> dict[str, Any]:
    """The requests of a run's only benchmark, by their outcome."""
    program, *given = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", server.url))
    assert program == "guidellm"
    done = subprocess.run(
        [PROGRAM, *given, "--disable-console", "--output", f"kind=json,path={folder / 'report.json'}"],
        cwd=ROOT, env=os.environ | {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}, capture_output=True, text=True,
        timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (benchmark,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    return benchmark["requests"]


def test_completions(builtin: Server, tmp_path: Path) -> None:
    """The command of [Benchmark a server](#benchmark-a-server): every output has the length that was asked for."""
    (command,) = COMMAND.findall((ROOT / "docs" / "clients.md").read_text())
    found = requests(command, builtin, tmp_path)
    assert not found["errored"] and [one["output_tokens"] for one in found["successful"]] == [32] * 64


def test_chats(builtin: Server, tmp_path: Path) -> None:
    """A benchmark of `/v1/chat/completions` at a constant rate: every output has the length that was asked for."""
    found = requests(CHATS, builtin, tmp_path)
    assert not found["errored"] and [one["output_tokens"] for one in found["successful"]] == [8] * 6
