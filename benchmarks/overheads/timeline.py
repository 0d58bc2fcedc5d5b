"""Measures the frame time of the timeline page over pans and zooms of a full batch.

usage: python -m benchmarks.overheads timeline [--slots 64] [--steps 2000] [--moves 100] [--out FILE]

A real scheduler plans the steps over an executor that computes nothing; a headless Chromium of the system draws them,
in software.  A frame lasts from the move that requests it to the moment at which the next one may begin.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.commands import parser_of

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler import Scheduler
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, EngineInfo
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.recorder import Recorder
from slotwise.observe.timeline import page_builder as page

BROWSERS = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
STEP_NS, TOKEN_NS = 2_000_000, 40_000
MOVE = """(moves) => new Promise((done) => {
  const { view } = slotwise, times = [];
  let began = null;
  view.fit();
  const move = (number) => {
    const now = performance.now();
    if (began !== null) times.push(now - began);
    if (number === moves) return done(times);
    began = now;
    if (number % 2) view.pan((number % 4 < 2 ? 1 : -1) * 120);
    else view.zoom(number % 20 < 10 ? 1.5 : 1 / 1.5, 300 + 7 * number);
    slotwise.draw();
    requestAnimationFrame(() => setTimeout(move, 0, number + 1));
  };
  slotwise.draw();
  requestAnimationFrame(() => setTimeout(move, 0, 0));
})"""


class _Sink:
    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.lines.append(line)


def full_batch(slots: int, steps: int, seed: int = 0) -> list[bytes]:
    """Returns the event log of `steps` steps with nearly full slots and waiting requests of mixed lengths."""
    limits = SchedulerLimits(
        max_model_len=1024, num_blocks=slots * 64, block_size=16, max_num_seqs=slots, max_num_batched_tokens=16 * slots)
    now = [0]
    scheduler = Scheduler(limits, Batching().discipline(slots), FirstComeFirstServed())
    executor = FakeExecutor(limits.block_size, lambda context: len(context) % 97)
    engine = Engine(scheduler, executor, lambda: now[0])
    recorder, sink = Recorder(clock=lambda: now[0]), _Sink()
    recorder.write_to(sink)
    scheduling = Scheduling(Batching(), max_num_seqs=slots, max_num_batched_tokens=limits.max_num_batched_tokens)
    recorder.started(EngineInfo("toy", "none", "float32", 97, limits, scheduling, ()))
    arriving = _requests(seed)
    for _ in range(steps):
        while scheduler.num_waiting < slots // 2:
            request = next(arriving)
            recorder.commanded(request, now[0])
            engine.handle(request)
        record = engine.step()
        now[0] += STEP_NS + TOKEN_NS * sum(record.plan.counts)
        recorder.stepped(record)
    return sink.lines


def _requests(seed: int) -> Iterator[Add]:
    draw = random.Random(seed)
    number = 0
    while True:
        prompt = [draw.randrange(1, 97) for _ in range(min(300, 4 + int(draw.lognormvariate(3, 1))))]
        output = min(200, 4 + int(draw.lognormvariate(3.2, 0.8)))
        params = SamplingSpec(max_tokens=output, ignore_eos=True)
        yield Add(number, RequestSpec(prompt, params, number), name=f"request-{number}")
        number += 1


def measure(lines: list[bytes], moves: int) -> dict[str, Any]:
    """Returns the milliseconds of each frame."""
    from playwright.sync_api import sync_playwright

    found = next(path for path in BROWSERS if Path(path).exists())
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder) / "page.html"
        path.write_bytes(page.saved("a full batch", lines))
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        opened = browser.new_page(viewport={"width": 1280, "height": 860})
        opened.goto(path.as_uri())
        steps = sum(line.startswith(b'{"kind":"step"') for line in lines)
        opened.wait_for_function("(steps) => window.slotwise?.history.steps.length === steps", arg=steps)
        opened.wait_for_timeout(1000)
        times = opened.evaluate(MOVE, moves)
        version = browser.version
        browser.close()
    return {"chromium": version, "median_ms": round(statistics.median(times), 1),
            "p95_ms": round(sorted(times)[int(0.95 * len(times))], 1), "worst_ms": round(max(times), 1)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--slots", type=int, default=64, help="slots of the batch drawn")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the log drawn")
    parser.add_argument("--moves", type=int, default=100, help="pans and zooms")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    asked = parser.parse_args()
    lines = full_batch(asked.slots, asked.steps)
    result = {"machine": platform.processor() or platform.machine(), "slots": asked.slots, "steps": asked.steps,
              "moves": asked.moves} | measure(lines, asked.moves)
    print(json.dumps(result, indent=2))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=2) + "\n")
