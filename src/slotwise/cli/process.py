"""The process of a command: its standard streams, its interrupts, and Numba's configuration.

*Streams.*  Where a command was started without one, what it opens next would take the stream's number.

*Interrupts.*  Ctrl-C while a command loads is one line, exit status 130, and no process left.  Importing libraries and
building an engine take seconds, in code that an exception from a signal may find anywhere: a library turns it into
another error, or a thread that still compiles aborts the process.  So until the engine is ready the signal ends the
process at once.  Children do not see it (`spawn.start`): they are killed here.

*Numba* looks for `.numba_config.yaml` in the current folder, which may be a checkpoint's, when it is imported and again
at every compilation, if it can import yaml.  A command's process imports Numba's configuration without yaml, and then
without the file's name.  The variables NUMBA_* of the environment hold as ever.  Children have another current folder
(`child.HOME`), and other programs keep their file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FrameType, ModuleType
from typing import NoReturn


def open_missing() -> None:
    """Opens the null device in the place of standard input, output and error that are closed, also for children."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number, this one
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


INTERRUPTED = 130  # exit status


def end_at_once(form: Callable[[str], str] = str) -> None:
    """From here on an interrupt ends this process with one line, unless interrupts are ignored or handled already.

    Args:
        form: makes the line of what it says.
    """
    if _handler() is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Ending(form))


def raise_again() -> None:
    """From here on an interrupt raises KeyboardInterrupt again.  Does nothing unless `end_at_once` is in force."""
    if isinstance(handler := _handler(), _Ending):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        handler.close()


@contextlib.contextmanager
def ending_at_once(form: Callable[[str], str] = str) -> Iterator[None]:
    """Within this context an interrupt ends the process with one line, as `end_at_once`; it may stand in another."""
    if isinstance(_handler(), _Ending):
        yield
        return
    end_at_once(form)
    try:
        yield
    finally:
        raise_again()


def end(status: int) -> NoReturn:
    """Ends this process once its threads have, but leaves libraries standing.

    Some abort where the interpreter takes them down next to a daemon, once all output is written.

    Raises:
        BrokenPipeError: the output is not read.
    """
    sys.stdout.flush()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all threads but daemons
    leave(status)


def leave(status: int) -> NoReturn:
    """Ends this process after a failure or an interrupt; waits for no thread and no child that still compiles."""
    if _handler() is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what follows is short, and would print a traceback
    _kill_children()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(status)


def _handler() -> object:
    """The handler of SIGINT; None in a thread, which may not set one."""
    return signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None


class _Ending:
    """The handler that ends this process.  It keeps the present stderr: a tokenizer loads while that is discarded."""

    def __init__(self, form: Callable[[str], str]) -> None:
        self._form = form
        try:
            self._stderr = os.dup(2)
        except OSError:  # it is closed
            self._stderr = os.open(os.devnull, os.O_WRONLY)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _kill_children()
        with contextlib.suppress(OSError):
            line = interruption(_command(), os.isatty(self._stderr), self._form)
            os.write(self._stderr, f"{line}\n".encode())
        os._exit(INTERRUPTED)

    def close(self) -> None:
        os.close(self._stderr)


def _kill_children() -> None:
    if kill_all := getattr(sys.modules.get("slotwise.platform.spawn"), "kill_all", None):  # there with the first child
        kill_all()


def interruption(command: str, is_terminal: bool, form: Callable[[str], str]) -> str:
    """Returns the last line of an interrupted command; on a terminal it begins below what is shown."""
    return "\n" * is_terminal + form(f"slotwise{command}: interrupted")


def _command() -> str:
    return f" {sys.argv[1]}" if len(sys.argv) > 1 and sys.argv[1].isalpha() else ""


CONFIG = "numba.core.config"
PARSER = "yaml"


def ignore_numba_file() -> None:
    """From here on an import of Numba reads no file of the current folder.  Does nothing where it is imported."""
    if CONFIG not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds that one module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != CONFIG:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Executes the module without its parser of files."""

    def exec_module(self, module: ModuleType) -> None:
        parser = sys.modules.get(PARSER)
        sys.modules[PARSER] = None  # type: ignore[assignment]  # makes its import fail
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says that it cannot read the file
                super().exec_module(module)
        finally:
            if parser is None:
                del sys.modules[PARSER]
            else:
                sys.modules[PARSER] = parser
        module._config_fname = ""  # type: ignore[attr-defined]  # what it looks for when it compiles
