"""The whole server on the device: streams beside each other, clients that leave, preemptions, and nothing runs on."""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.gpu.figures import tell
from benchmarks.gpu.setup import asked

PACKAGES = ("uvicorn", "aiohttp", "msgspec")  # of the server and of what starts it here
STREAMS, PROMPT, TOKENS, LEAVE_AFTER = 48, 32, 96, 8
SLOTS = 32
PATIENCE = 20.0  # seconds until all blocks are free again


def main() -> None:
    setup = asked(__doc__)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        tell(server={"skipped": f"{', '.join(missing)} not installed"})
        return
    from slotwise import builtin
    from slotwise.measure.bench.server_run import serving

    device = "cuda" if setup.device == "cuda" else "cpu"
    config = json.loads((Path(builtin.__file__).parent / "config.json").read_text())
    of_token = 8 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]  # in float32
    memory = SLOTS * (PROMPT + TOKENS) * of_token // 2  # of half of what all slots need: rows are preempted
    arguments = ("--device", device, "--dtype", "float32", "--max-num-seqs", str(SLOTS), "--max-model-len", "512",
                 "--kv-cache-memory", str(memory))
    started = time.monotonic()
    with serving(arguments) as served:
        ready = time.monotonic() - started
        address, key = urlsplit(served.target.base_url), served.target.api_key
        client = Client(address.hostname or "", address.port or 0, key)
        with ThreadPoolExecutor(STREAMS) as pool:
            read = list(pool.map(lambda number: client.stream(number, leaves=number % 3 == 0), range(STREAMS)))
        whole = [tokens for number, tokens in enumerate(read) if number % 3]
        if min(whole) < TOKENS:
            raise RuntimeError(f"a stream ended after {min(whole)} of {TOKENS} tokens")
        client.wait_until_free()
        tell(server={"ready_seconds": ready, "streams": len(read), "left": len(read) - len(whole),
                     "preemptions": client.metric("slotwise:num_preemptions_total"),
                     "seconds": time.monotonic() - started - ready})


class Client:
    """Requests to one server by the standard library, which a bare machine has."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._address, self._headers = (host, port), {"Authorization": f"Bearer {key}"}

    def stream(self, number: int, *, leaves: bool) -> int:
        """The tokens of one stream; one that `leaves` closes its connection after LEAVE_AFTER lines."""
        body = {"prompt": [10 + number % 100] * PROMPT, "max_tokens": TOKENS, "ignore_eos": True,
                "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body),
                               self._headers | {"Content-Type": "application/json"})
            response, tokens = connection.getresponse(), 0
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"{response.status}: {response.read(400)!r}")
            for events, line in enumerate(response):
                if leaves and events > LEAVE_AFTER:
                    break
                if b'"completion_tokens"' in line:
                    tokens = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
            return tokens
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The value of a metric without labels, or the sum over its labels."""
        connection = http.client.HTTPConnection(*self._address, timeout=30)
        connection.request("GET", "/metrics", headers=self._headers)
        text = connection.getresponse().read().decode()
        connection.close()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    def wait_until_free(self) -> None:
        """Raises RuntimeError where requests keep their slots after all clients have ended or left."""
        ends = time.monotonic() + PATIENCE
        while self.metric("slotwise:num_requests_running") or self.metric("slotwise:num_requests_waiting"):
            if time.monotonic() > ends:
                raise RuntimeError("requests run on after their clients have ended or left")
            time.sleep(0.1)


if __name__ == "__main__":
    main()
