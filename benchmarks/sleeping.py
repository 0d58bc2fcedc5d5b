"""A server of which only the computing is left out: the scheduler, its prefix cache and the loop, and steps that sleep.

    submit ─► queue ─► Engine.step: schedule ─► sleep as long as the step-time model says ─► commit ─► first, end

A step takes what `simulate.pace` says of its work, and tokens are fillers, so many servers share two cores.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from slotwise.core.scheduler import Scheduler
from slotwise.core.step import StepPlan, StepResult
from slotwise.engine.admission_control import AdmissionControl
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add, EngineInfo, StepRecord
from slotwise.observe.prefix_index import PrefixIndex
from slotwise.routing.prompt import PIECE
from slotwise.server.replica_state import ReplicaState
from slotwise.simulate.pace import LearnedPace, PaceStepTimes
from slotwise.simulate.simulator import Setup
from slotwise.simulate.virtual_machine import Verifier, VirtualMachine

IDLE = 60.0  # seconds that the loop waits for a request before it looks again


class SleepingExecutor:
    """Takes the time of each step by sleeping."""

    def __init__(self, setup: Setup) -> None:
        self._machine = VirtualMachine(setup.pace, None, Verifier(None, 0))
        self.asked = self.slept = 0.0  # seconds

    def submit(self, plan: StepPlan) -> None:
        self._machine.submit(plan)

    def collect(self) -> StepResult:
        before, began = self._machine.now, time.perf_counter()
        result = self._machine.collect()
        seconds = self._machine.now - before
        time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
        self.asked += seconds
        self.slept += time.perf_counter() - began
        return result


class SleepingServer:
    """Runs an engine on a thread of its own.

    Args: on_output: called there with the id of a request at its first output, and at its end with True.
    """

    def __init__(self, setup: Setup, on_output: Callable[[str, bool], None]) -> None:
        self._setup = setup
        self._on_output = on_output
        times = PaceStepTimes(setup.pace)
        limits = setup.scheduling.limits(setup.limits)
        scheduler = Scheduler(limits, setup.scheduling.discipline(), setup.scheduling.policy(times), times)
        self._executor = SleepingExecutor(setup)
        self._engine = Engine(scheduler, self._executor, time.monotonic_ns, scheduling=setup.scheduling)
        self._index, self._admission = PrefixIndex(), AdmissionControl(limits)
        info = EngineInfo("sleeping", "none", "", 0, limits, setup.scheduling, ())
        for observer in (self._index, self._admission):
            observer.started(info)
        self._limits = limits
        self._counts = (0, 0)  # running and waiting requests after the last step
        self._lock = threading.Lock()  # of the observers
        self._inbox: queue.SimpleQueue[Add] = queue.SimpleQueue()
        self._without_output: set[str] = set()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, command: Add, prefix: tuple[int, tuple[int, ...]]) -> None:
        """Args: prefix: the bytes of its prompt, and the digests of its pieces."""
        with self._lock:
            self._admission.commanded(command, time.monotonic_ns())
            self._index.expect(command.request_id, prefix, len(command.spec.prompt), PIECE)
        self._inbox.put(command)

    def state(self) -> ReplicaState:
        """What `GET /replica` of a server tells."""
        assert isinstance(self._setup.pace, LearnedPace)
        with self._lock:
            changes, rate = self._index.changes("", 0), self._admission.rate
            running, waiting = self._counts
            return ReplicaState(
                self._index.instance, changes.version, True, changes.added, [], True, self._limits.max_num_seqs,
                self._limits.max_num_batched_tokens, running, waiting, rate.requests if rate.measured else 0.0,
                self._index.piece_tokens, self._setup.pace.times.prediction(), ())

    @property
    def lateness(self) -> float:
        """Seconds that its steps took for each second that they were to take."""
        return self._executor.slept / self._executor.asked if self._executor.asked else 1.0

    def _run(self) -> None:
        while True:
            try:
                while True:
                    command = self._inbox.get(block=not self._engine.has_work, timeout=IDLE)
                    self._without_output.add(command.request_id)
                    self._engine.handle(command)
            except queue.Empty:
                pass
            if self._engine.has_work:
                self._told(self._engine.step())

    def _told(self, record: StepRecord) -> None:
        with self._lock:
            self._index.stepped(record)
            self._admission.stepped(record)
            self._counts = record.num_running, record.num_waiting
        for request_id, tokens in zip(record.request_ids, record.token_ids, strict=False):
            if tokens and request_id in self._without_output:
                self._without_output.discard(request_id)
                self._on_output(request_id, False)
        for end in record.ended:
            self._without_output.discard(end.request_id)
            self._on_output(end.request_id, True)
