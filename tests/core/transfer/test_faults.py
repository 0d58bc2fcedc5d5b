"""Transfers fail in every way, hundreds of times: every request ends once with its tokens, and nothing is left."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from support.apart import FAULTS, LIMITS, Chaos, Pair
from support.toy import VOCAB, alone, request

from slotwise.core.transfer.kv_transfer_config import CONNECTORS

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
NUMBER = 250  # faults of each connector
TIMEOUT = 0.15  # seconds


@pytest.mark.parametrize("connector", CONNECTORS)
def test_faults_cost_no_request_and_leave_nothing(connector):
    """In a process of its own, whose connections are counted: what other tests leave open closes when it likes."""
    done = subprocess.run(
        [sys.executable, __file__, connector], capture_output=True, text=True, timeout=240,
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"})
    assert done.returncode == 0, done.stderr


def connections() -> int:
    """Open sockets and shared memory of this process."""
    kinds = ("socket:", "/memfd:", "/dev/shm/")
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the folder itself, or was closed meanwhile
            found += os.readlink(f"/proc/self/fd/{name}").startswith(kinds)
    return found


def transfer_with_faults(connector):
    draw, seen = Random(5), Counter()
    before = connections()
    pair = Pair(connector, TIMEOUT, change=lambda wire: Chaos(
        wire, Random(draw.random()), rate=0.15, longest=1.2 * TIMEOUT, seen=seen))
    expected: dict[str, list[int]] = {}
    while seen.total() < NUMBER:
        for _ in range(12):
            name = f"r{len(expected)}"
            prompt = [3] * draw.choice((0, 10)) + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))]
            expected[name] = alone(request(name, prompt, 8), LIMITS)
            if draw.random() < 0.9:
                pair.prefill(name, prompt)
            pair.decode(name, prompt)
            if draw.random() < 0.1:
                pair.consumer.scheduler.finish(pair.consumer.names.index(name), "abort", time.monotonic())
                expected[name] = []
        pair.run()
    outputs = {name: pair.consumer.tokens.get(name, []) for name in expected}
    assert outputs == expected
    pair.check_nothing_is_left()
    pair.close()
    assert set(seen) == set(FAULTS)
    arrivals = [arrival for record in pair.consumer.records for arrival in record.inputs.arrivals if arrival.is_last]
    assert any(arrival.failure for arrival in arrivals)
    assert any(not arrival.failure for arrival in arrivals)
    end = time.monotonic() + 120.0
    while connections() > before:  # a thread may be about to close its last connection
        assert time.monotonic() < end
        gc.collect()  # of the wires and their faults, which name each other
        time.sleep(0.01)


if __name__ == "__main__":
    transfer_with_faults(sys.argv[1])
