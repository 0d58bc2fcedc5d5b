"""The unit for systemd agrees with the server, and systemd's own tools accept it."""

from __future__ import annotations

import argparse
import configparser
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slotwise.api.http_server import FLUSH
from slotwise.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "slotwise.service"
EXAMPLE = ROOT / "deploy" / "slotwise.env"
ANALYZE = shutil.which("systemd-analyze")
MOST_EXPOSED = 20  # tenths: systemd calls 20 and less "OK"; a unit without a sandbox has 96
DOCUMENTED = ROOT / "docs" / "deployment.md"
COUNTED = """
accept4 access arch_prctl bind brk chdir clock_gettime clock_nanosleep clone3 close close_range dup2
epoll_create1 epoll_ctl epoll_pwait eventfd2 execve fadvise64 fcntl fstat fsync futex getcwd getdents64
geteuid getpeername getpid getpriority getrandom getsockname getsockopt gettid io_uring_enter io_uring_setup
ioctl kill link listen lseek madvise mbind mkdir mmap mprotect mremap munmap newfstatat open openat pipe2 poll
prctl pread64 prlimit64 read readlink recvfrom rename rmdir rseq rt_sigaction rt_sigprocmask rt_sigreturn
sched_getaffinity sched_setaffinity sendto set_robust_list set_tid_address setitimer setpriority setsockopt
socket socketpair statfs statx sysinfo uname unlink unlinkat utimensat vfork wait4 write
"""  # by strace, in a server that compiled its kernels, answered both routes, and drained


def unit() -> dict[str, str]:
    """The settings of the section [Service]."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    assert set(parser) == {"DEFAULT", "Unit", "Service", "Install"}
    return dict(parser["Service"])


def variables(text: str) -> dict[str, str]:
    """The variables of an environment file, or of a line of `Environment=`."""
    words = [word for line in text.splitlines() if not line.startswith("#") for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words)


def asked(arguments: str) -> argparse.Namespace:
    """What the parser makes of the unit's command with these `SLOTWISE_ARGS`."""
    program, *words = shlex.split(unit()["ExecStart"].replace("$SLOTWISE_ARGS", arguments))
    assert program == "/opt/slotwise/bin/slotwise"
    return build_parser("serve").parse_args(words)


def test_the_example_is_a_command_on_this_machine_only() -> None:
    given = asked(variables(EXAMPLE.read_text())["SLOTWISE_ARGS"])
    assert (given.host, given.port, given.model) == ("127.0.0.1", 8000, None)


def test_the_documented_arguments_are_the_parsers() -> None:
    (line,) = [line for line in DOCUMENTED.read_text().splitlines() if line.startswith("SLOTWISE_ARGS=")]
    given = asked(variables(line)["SLOTWISE_ARGS"])
    assert (given.host, given.model, given.log_format) == ("0.0.0.0", "/srv/models/SmolLM2-135M", "json")


def test_without_a_key_the_service_ends(tmp_path: Path) -> None:
    given = variables(unit()["Environment"]) | variables(EXAMPLE.read_text())
    assert given["SLOTWISE_API_KEY"] == "", "the example holds no key that a reader could forget to change"
    done = subprocess.run([sys.executable, "-m", "slotwise.cli", "serve", *shlex.split(given["SLOTWISE_ARGS"])],
                          env=os.environ | given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "SLOTWISE_API_KEY is set, but holds no key" in done.stderr


def test_stopping_leaves_time_for_running_requests() -> None:
    assert float(unit()["TimeoutStopSec"]) > asked("").shutdown_timeout + FLUSH
    assert unit()["KillMode"] == "mixed", "a signal to the engine itself would end running requests"


def test_caches_are_where_the_unit_may_write() -> None:
    settings = unit()
    assert variables(settings["Environment"])["XDG_CACHE_HOME"] == f"/var/cache/{settings['CacheDirectory']}"
    assert settings["DynamicUser"] == "yes" and settings["ProtectSystem"] == "strict"


def test_a_kernel_may_be_compiled_and_memory_may_be_read() -> None:
    """Settings of a sandbox that would keep Slotwise from what it does at its start."""
    settings = unit()
    assert "MemoryDenyWriteExecute" not in settings and "ProcSubset" not in settings


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "slotwise.service"  # with a program that exists here
    copy.write_text(UNIT.read_text().replace("/opt/slotwise/bin/slotwise", "/bin/true"))
    done = subprocess.run([str(ANALYZE), "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "slotwise" not in done.stderr, done.stderr
    copy.write_text(copy.read_text().replace("TasksMax=4096", "TasksMax=many\nNoSuchSetting=1"))
    done = subprocess.run([str(ANALYZE), "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60)
    assert "NoSuchSetting" in done.stderr and "many" in done.stderr


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_little_is_exposed() -> None:
    done = subprocess.run([str(ANALYZE), "security", "--offline=yes", f"--threshold={MOST_EXPOSED}", "--no-pager",
                           str(UNIT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_the_system_calls_of_a_server_are_allowed() -> None:
    shown = subprocess.run([str(ANALYZE), "syscall-filter", "--no-pager"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    sets: dict[str, list[str]] = {}
    for line in shown.stdout.splitlines():
        word = line.split("#")[0].strip()
        if line.startswith("@"):
            sets[word] = []
        elif word and sets:
            sets[list(sets)[-1]].append(word)

    def within(group: str) -> set[str]:
        return {each for word in sets[group] for each in (within(word) if word.startswith("@") else {word})}

    allowed = within("@default") | within(unit()["SystemCallFilter"])
    assert not set(COUNTED.split()) - allowed
    assert "reboot" not in allowed
