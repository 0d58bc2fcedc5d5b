"""GuideLLM, vLLM's benchmark of servers, with synthetic prompts of a local tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from servers import BUILTIN, Server

CLIENT = "`guidellm`"
VERSION = version("guidellm")
PROGRAM = Path(sys.executable).with_name("guidellm")
PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS = 16, 8, 6


def measured(server: Server, folder: Path, route: str, profile: str) -> dict[str, Any]:
    """The first benchmark of a run's report."""
    report = folder / "report.json"
    done = subprocess.run([
        PROGRAM, "run", "--disable-console",
        "--backend", f"kind=openai_http,target={server.url},model={server.model},request_format={route}",
        "--profile", profile, "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--tokenizer", f"kind=huggingface_auto,model={BUILTIN}", "--output", f"kind=json,path={report}"],
        cwd=folder, env=os.environ | {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}, capture_output=True, text=True,
        timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return benchmark


@pytest.mark.parametrize(("route", "profile"), [
    ("/v1/completions", "kind=concurrent,streams=2"), ("/v1/chat/completions", "kind=constant,rate=20"),
], ids=["completions", "chat"])
def test_benchmark(builtin: Server, tmp_path: Path, route: str, profile: str) -> None:
    """A benchmark of `{route}` with `--profile {profile}`: all requests succeed, with the lengths asked for."""
    requests = measured(builtin, tmp_path, route, profile)["requests"]
    assert len(requests["successful"]) == REQUESTS and not requests["errored"]
    assert {request["output_tokens"] for request in requests["successful"]} == {OUTPUT_TOKENS}
