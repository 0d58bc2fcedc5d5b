"""One workload against one real server under discipline after discipline, measured at its clients.

The server runs in processes of its own and is reconfigured over HTTP (`PUT /admin/scheduling`).  What happens in its
slots is not visible here: that a client waited, not why.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import subprocess
import tempfile
import urllib.error
import urllib.request
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, NamedTuple

from slotwise.measure.bench.accounting import thinned
from slotwise.measure.bench.load_generator import (
    CHAT,
    BenchTarget,
    LoadResult,
    Phrasing,
    Watch,
    ignore,
    measure,
    resolve,
)
from slotwise.measure.bench.measures import COMPLETED, RequestOutcome, summary
from slotwise.measure.workload.workloads import Workload
from slotwise.platform import child

GREETING = re.compile(r" on \w+ \((\w+)[,)]")  # dtype of the weights
READY = re.compile(r"Ready after .* on (http://\S+)")
EXIT_SECONDS = 20.0  # seconds for the server to end
ADMIN_SECONDS = 30.0  # seconds for a change of scheduling
NO_QUEUE_BOUND = ("--max-num-queued-reqs", "1000000", "--max-num-queued-tokens", "1000000000")  # measure all
WARM_UPS = 4  # requests before each run


class BenchServer(NamedTuple):
    """A server that is ready."""

    target: BenchTarget
    dtype: str


@contextlib.contextmanager
def serving(arguments: Sequence[str]) -> Iterator[BenchServer]:
    """A `slotwise serve` of its own on a free port, with a secret key.

    Args:
        arguments: of the command line, after `serve`; paths must be absolute.

    Raises:
        RuntimeError: it ended before it was ready; the message is its last line of output.
    """
    key = secrets.token_urlsafe(16)
    options = [*NO_QUEUE_BOUND, *arguments, "--port", "0"]
    command = child.python("slotwise.cli", "serve", *options)
    environment = child.environment() | dict.fromkeys(child.KEYS, key)  # other users can read a command line
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=environment,
            cwd=child.HOME) as process:
        try:
            url, dtype = _greeting(process, log)
            yield BenchServer(BenchTarget(url, api_key=key), dtype)
        finally:
            process.terminate()
            try:
                process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _greeting(process: subprocess.Popen[str], log: IO[str]) -> tuple[str, str]:
    """The server's address and the dtype of its weights."""
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        if found := READY.search(line):
            url = found[1]
        elif url and (found := GREETING.search(line)):
            return url, found[1]
    log.seek(0)
    said = log.read().strip().splitlines()
    raise RuntimeError(f"the server ended before it was ready: {said[-1] if said else 'it wrote nothing'}")


def reschedule(target: BenchTarget, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Change the server's scheduling settings; returns all settings then in force.

    Raises:
        RuntimeError: the server refused; the message is its answer.
    """
    request = urllib.request.Request(
        f"{target.base_url}/admin/scheduling", json.dumps(dict(settings)).encode(), method="PUT",
        headers={**target.headers, "Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ADMIN_SECONDS) as response:
            scheduling: dict[str, Any] = json.load(response)
            return scheduling
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode(errors="replace")
        raise RuntimeError(f"the server refuses {dict(settings)}: {said}") from error


class OnlineRun(NamedTuple):
    """The measured part of a run in the result, and the tokens of each output in the order of requests."""

    entry: dict[str, Any]
    lengths: list[int]


def run_online(
    target: BenchTarget, workload: Workload, settings: Mapping[str, Any], watch: Watch = ignore,
) -> OnlineRun:
    """Run the workload under one discipline.

    Raises:
        KeyboardInterrupt: interrupted, even if part was measured.
        RuntimeError: the server refused the discipline, or did not complete every request.
    """
    scheduling = reschedule(target, settings)
    target, vocab_size = resolve(replace(target, endpoint=CHAT) if workload.conversations else target)
    measured = measure(
        target, workload, Phrasing(
            vocab_size, ignore_eos=not workload.ends_by_itself, hidden_lengths=not workload.ends_by_itself),
        num_warmups=WARM_UPS, watch=watch)
    if measured.interrupted:
        raise KeyboardInterrupt
    lost = next((outcome for outcome in measured.outcomes if outcome.status != COMPLETED), None)
    if lost is not None:
        raise RuntimeError(f"request {lost.number} {lost.status}: {lost.error}")
    ordered = sorted(measured.outcomes, key=lambda outcome: outcome.number)
    return OnlineRun({"num_slots": scheduling["max_num_seqs"], **_entry(measured)},
                     [outcome.num_output for outcome in ordered])


def _entry(measured: LoadResult) -> dict[str, Any]:
    """As `Accounts.entry`, with null for what a client cannot measure."""
    outcomes, seconds = measured.outcomes, measured.duration
    output_tokens = sum(outcome.num_output for outcome in outcomes)
    ttft = array("d", [outcome.ttft for outcome in outcomes])
    itl = array("d", [gap for outcome in outcomes for gap in outcome.itls])
    unseen = ("steps", "decode_steps", "occupancy", "mean_rows", "max_rows", "preemptions", "waste", "chart")
    return {
        "seconds": seconds, "output_tokens": output_tokens, "output_throughput": output_tokens / seconds,
        "request_throughput": len(outcomes) / seconds,
        "ttft": summary(ttft), "itl": summary(itl), "e2e": summary(outcome.e2el for outcome in outcomes),
        "ttft_values": thinned(sorted(ttft)), "itl_values": thinned(sorted(itl)),
        "cumulative": thinned(_cumulative(outcomes)), **dict.fromkeys(unseen),
    }


def _cumulative(outcomes: Sequence[RequestOutcome]) -> list[list[float]]:
    """Seconds and output tokens received by then; an answer's tokens are spread evenly over its events."""
    events = sorted(
        (at, outcome.num_output / len(times))
        for outcome in outcomes for times in (outcome.token_times or (outcome.ended,),) for at in times)
    points, received = [[0.0, 0.0]], 0.0
    for at, tokens in events:
        received += tokens
        points.append([round(at, 6), round(received, 3)])
    return points
