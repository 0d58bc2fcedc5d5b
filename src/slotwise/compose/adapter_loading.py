"""The thread of an engine process that loads adapters during its steps.

It has the lowest priority, as the helpers of the kernels have, and one compute thread: the engine's own thread is
preferred wherever both want a core, and the interpreter's lock is free while tensors are read and packed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from slotwise.engine.executor import AdapterStore
from slotwise.engine.messages import AdapterLoaded, LoadAdapter
from slotwise.errors import OneLineError, one_line

NICE = 19

logger = logging.getLogger(__name__)


class AdapterLoading:
    """Loads adapters one after another; the thread starts with the first.

    Args:
        adapters: None where the engine has none.
        report: receives what became of each; called on that thread.
    """

    def __init__(self, adapters: AdapterStore | None, report: Callable[[AdapterLoaded], None]) -> None:
        self._adapters = adapters
        self._report = report
        self._commands: queue.SimpleQueue[LoadAdapter] = queue.SimpleQueue()
        self._is_started = False

    def load(self, command: LoadAdapter) -> None:
        """Begins to load an adapter, when those before it are loaded."""
        self._commands.put(command)
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run, name="adapters", daemon=True).start()

    def _run(self) -> None:
        _yield_to_steps()
        while True:
            self._report(self._loaded(self._commands.get()))

    def _loaded(self, command: LoadAdapter) -> AdapterLoaded:
        from slotwise.compute.model.checkpoint import fingerprint

        try:
            if self._adapters is None:
                raise ValueError("this engine has no adapters")
            folder = Path(command.path)
            if not folder.is_dir():
                raise ValueError(f"there is no folder {command.path!r:.200}: adapters are read from local folders")
            digest = fingerprint(folder)  # first: what changes meanwhile is seen by the next engine
            self._adapters.load(command.number, folder)
        except (OneLineError, OSError, ValueError) as error:
            return AdapterLoaded(command.number, one_line(str(error)))
        except Exception as error:  # whatever the file made of the loader, the engine and its streams go on
            logger.exception("an adapter could not be loaded")
            return AdapterLoaded(command.number, one_line(f"{type(error).__name__}: {error}"))
        return AdapterLoaded(command.number, digest=digest)


def _yield_to_steps() -> None:
    """Lets the calling thread run on any core, with one compute thread, at the lowest priority."""
    import torch

    from slotwise.compute.kernels.cpu.threads import roam

    roam()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # not permitted: it keeps its priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
