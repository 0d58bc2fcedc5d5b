"""A server as its operator sees it: metrics, traces, the terminal view and log lines, of one and the same run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support import dashboards, vllm_names
from support.otlp import Collector, attributes, collecting

KEY = "a-key"
NUM_REQUESTS, SLOTS = 12, 4
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = ["tokenizing", "queue", "prefill", "decode", "sending"]


@dataclass
class Seen:
    url: str
    log: Path
    collector: Collector
    answers: list[dict[str, Any]]
    busy: str  # `slotwise top` while there was work

    def get(self, path: str) -> str:
        answer = httpx.get(self.url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)
        return answer.raise_for_status().text

    def metrics(self) -> list[Sample]:
        return [sample for family in text_string_to_metric_families(self.get("/metrics")) for sample in family.samples]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def ask(url: str, number: int) -> dict[str, Any]:
    body = {"prompt": f"def function_{number}(argument):", "max_tokens": 40, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": f"r{number}", "traceparent": CALLER}
    return httpx.post(url + "/v1/completions", json=body, headers=headers, timeout=120).raise_for_status().json()


def top(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slotwise.cli", "top", url, "--once", *arguments], capture_output=True, text=True,
        timeout=120, env=os.environ | {"COLUMNS": "150"})


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    log = tmp_path_factory.mktemp("observed") / "log"
    command = [sys.executable, "-m", "slotwise.cli", "serve", "--port", "0", "--max-num-seqs", str(SLOTS),
               "--api-key", KEY, "--log-format", "json", "--vllm-metrics"]
    with collecting() as collector, log.open("w") as errors:
        command += ["--otlp-traces-endpoint", collector.url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            url = ready(log)
            with ThreadPoolExecutor(NUM_REQUESTS) as threads:
                answers = [threads.submit(ask, url, number) for number in range(NUM_REQUESTS)]
                busy = top(url, "--api-key", KEY)
            assert busy.returncode == 0, busy.stderr
            yield Seen(url, log, collector, [answer.result() for answer in answers], busy.stdout)
        finally:
            process.terminate()
            said, _ = process.communicate(timeout=120)
            assert said == "", "with JSON lines nothing is said beside them"


def ready(log: Path) -> str:
    for _ in range(600):
        for line in log.read_text().splitlines():
            if "url" in (told := json.loads(line)):
                return told["url"]
        time.sleep(0.1)
    raise AssertionError(f"the server never was ready: {log.read_text()}")


def test_the_budget_is_told_at_the_start_in_a_line_of_json(seen: Seen) -> None:
    (line,) = [line for line in seen.lines() if "url" in line]
    assert line["slots"] == SLOTS and line["model"] == "slotwise-builtin" and line["level"] == "info"
    assert all(line[name] > 0 for name in (
        "blocks", "block_size", "max_num_batched_tokens", "max_model_len", "weights_bytes", "cache_bytes"))
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in seen.lines())


def test_all_that_dashboard_and_alerts_name_is_there(seen: Seen) -> None:
    shown = {sample.name for sample in seen.metrics()}
    named = {name for expr in [*dashboards.queries(), *(rule["expr"] for rule in dashboards.alerts())]
             for name in dashboards.names(expr)}
    of_experts = {"slotwise:expert_tokens_total", "slotwise:expert_imbalance", "slotwise:idle_experts"}
    assert named - shown == of_experts | {"slotwise:admission_rejections_total"}, "no experts, no refusal"


def test_all_that_vllms_dashboards_name_is_there_with_the_same_values(seen: Seen) -> None:
    samples = seen.metrics()
    theirs = {sample.name: sample for sample in samples if sample.labels.get("engine") == "0"}
    assert set(vllm_names.DASHBOARD.split()) | set(vllm_names.OLD_DASHBOARD.split()) <= theirs.keys()
    (ours,) = [sample for sample in samples if sample.name == "slotwise:generation_tokens_total"]
    found = theirs["vllm:generation_tokens_total"]
    assert found.value == ours.value > 0 and found.labels["model_name"] == "slotwise-builtin"


def test_metrics_add_up(seen: Seen) -> None:
    values: dict[str, float] = {}
    for sample in seen.metrics():
        name = sample.name.removeprefix("slotwise:")
        values[name] = values.get(name, 0) + sample.value
    usage = [answer["usage"] for answer in seen.answers]
    assert values["generation_tokens_total"] == sum(one["completion_tokens"] for one in usage) == NUM_REQUESTS * 40
    assert values["prompt_tokens_total"] == sum(one["prompt_tokens"] for one in usage)
    assert values["request_success_total"] == NUM_REQUESTS and values["engine_healthy"] == 1
    assert values["request_wait_seconds_total"] == pytest.approx(values["request_queue_time_seconds_sum"], abs=1e-3)
    assert values["request_wait_seconds_total"] > 0 and values["kv_cache_usage_perc"] == 0
    assert values["slot_steps_total"] == SLOTS * values["iteration_time_seconds_count"]


def test_every_request_is_a_trace_within_its_callers(seen: Seen) -> None:
    seen.collector.eventually(lambda collector: len(collector.roots()) >= NUM_REQUESTS)
    roots = {attributes(root)["gen_ai.response.id"]: root for root in seen.collector.roots()}
    assert roots.keys() == {answer["id"] for answer in seen.answers}
    waited = set()
    for answer in seen.answers:
        root = roots[answer["id"]]
        assert root.trace_id.hex() == CALLER.split("-")[1] and root.parent_span_id.hex() == CALLER.split("-")[2]
        told, children = attributes(root), seen.collector.children(root)
        assert told["gen_ai.usage.output_tokens"] == 40 and told["gen_ai.response.model"] == "slotwise-builtin"
        assert [span.name for span in children] == STAGES
        assert children[0].start_time_unix_nano == root.start_time_unix_nano
        assert children[-1].end_time_unix_nano == root.end_time_unix_nano
        assert abs(root.end_time_unix_nano * 1e-9 - time.time()) < 600
        waited |= attributes(children[1]).keys()
    assert {"slotwise.waited.no_slot_s", "slotwise.waited.step_under_way_s"} <= waited


def test_the_terminal_view_shows_who_runs_and_who_waits(seen: Seen) -> None:
    assert seen.busy.startswith("slotwise ") and " builtin on cpu " in seen.busy
    assert "continuous batching" in seen.busy and re.search(rf"slots .* \d of {SLOTS}", seen.busy), seen.busy
    idle = top(seen.url, "--api-key", KEY).stdout
    assert f"0 of {SLOTS}" in idle and "no requests wait" in idle, idle


def test_the_terminal_view_is_refreshed_in_place_until_it_is_left(seen: Seen) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "slotwise.cli", "top", seen.url, "--api-key", KEY, "--interval", "0.1"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {
            "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}) as process:
        os.close(theirs)
        drawn = b""
        while drawn.count(b"no requests wait") < 3:
            drawn += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
            while more := os.read(ours, 65536):
                drawn += more
    os.close(ours)
    assert process.returncode == 130
    enters, released_slots = drawn.index(b"\x1b[?1049h"), drawn.rindex(b"\x1b[?1049l")
    assert enters < drawn.index(b"no requests wait") < released_slots, "on a screen of its own"


def test_the_terminal_view_says_why_it_shows_nothing(seen: Seen) -> None:
    for arguments, why in ((("--api-key", "none"), "asks for a key"), ((), "asks for a key")):
        refused = top(seen.url, *arguments)
        assert refused.returncode == 1 and why in refused.stderr and not refused.stdout
    nobody = top("http://127.0.0.1:9")
    assert nobody.returncode == 1 and "cannot be reached" in nobody.stderr
    assert "begins with http" in top("localhost:8000").stderr
