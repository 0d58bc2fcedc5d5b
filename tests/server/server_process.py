"""The whole service in two processes, the engine's without a model.

usage: python server_process.py FOLDER ENGINE_LOG [SETTING=VALUE ...]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import uvloop

from slotwise.engine.channel import pair
from slotwise.engine.service import EngineService
from slotwise.server.app import build_app
from slotwise.server.serve import listen, serve
from slotwise.server.settings import ServerSettings
from slotwise.text.chat import load_chat_template
from slotwise.text.tokenizer import Tokenizer


async def main(folder: Path, log: Path, *given: str) -> subprocess.Popen[bytes]:
    named = dict(one.split("=") for one in given)
    seconds = named.pop("seconds_per_step", "0.001")
    max_live = int(named.pop("max_live", "4096"))
    settings = ServerSettings("toy", **{
        name: value if name == "api_key" else float(value) if "timeout" in name else int(value)
        for name, value in named.items()})
    ours, theirs = pair()
    with theirs, log.open("w") as output:
        engine = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_process.py")), str(theirs.fileno()), seconds],
            pass_fds=[theirs.fileno()], stdout=output)
    service = EngineService(ours, max_live=max_live)
    await service.ready()
    tokenizer = Tokenizer.load(folder)
    app = build_app(service, tokenizer, load_chat_template(folder, tokenizer.special_tokens), settings)
    for heavy in ("torch", "numpy", "numba"):
        assert heavy not in sys.modules, f"the API process has imported {heavy}"
    await serve(app, listen("127.0.0.1", 0), lambda url: print(url, engine.pid, flush=True))
    return engine


if __name__ == "__main__":
    ended = uvloop.run(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
    print("engine", ended.wait(timeout=10), flush=True)
