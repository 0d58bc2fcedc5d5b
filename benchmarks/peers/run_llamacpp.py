"""A llama-server, of llama.cpp or ik_llama.cpp: python benchmarks/peers/run_llamacpp.py FILE --server PATH."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

from same_requests import SLOTS, Engine, main
from served import Served, free_port, running

CONTEXT = 1600  # tokens of a slot, enough for these requests


@contextlib.contextmanager
def start(asked: argparse.Namespace) -> Iterator[Engine]:
    port, threads = free_port(), str(os.cpu_count())
    command = [asked.server, "-m", asked.model, "--port", str(port), "-t", threads, "-tb", threads, "-np", str(SLOTS),
               "-c", str(SLOTS * CONTEXT), "-a", "model", "--cache-ram", "0"]
    with running(Served(asked.name, asked.release, port, {"cache_prompt": False}), command) as server:
        yield server


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", required=True, help="the path of llama-server")
    parser.add_argument("--name", default="llamacpp", help="of the engine, in the table")
    parser.add_argument("--release", default="", help="the version of its sources, in the table")


if __name__ == "__main__":
    main(start, __doc__, add_options)
