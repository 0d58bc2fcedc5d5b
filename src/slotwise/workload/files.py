"""Workloads as JSON lines, a header and one line per request: any run can be repeated from its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from slotwise.files import write_output
from slotwise.workload import forms
from slotwise.workload.requests import MAX_REQUESTS, Workload, WorkRequest

VERSION = 1
MAX_LINE = 65_536  # characters
HEADER: dict[str, type | tuple[type, ...]] = {
    "slotwise_workload": int, "num_requests": int, "max_tokens": int, "users": int, "seed": int, "description": dict}
REQUEST: dict[str, type | tuple[type, ...]] = {
    field.name: (int, float, type(None)) if field.name == "arrives_at" else int for field in fields(WorkRequest)}


def save(workload: Workload, path: Path | str) -> None:
    """Writes a workload; raises OSError when the file cannot be written."""
    header = {
        "slotwise_workload": VERSION, "num_requests": len(workload.requests), "max_tokens": workload.max_tokens,
        "users": workload.users, "seed": workload.seed, "description": workload.description}
    lines = (header, *map(asdict, workload.requests))
    write_output(path, "".join([json.dumps(line, allow_nan=False) + "\n" for line in lines]).encode())


def load(path: Path | str) -> Workload:
    """Returns a saved workload.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a workload; the message names the line.
    """
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        requests: list[WorkRequest] = []
        header: dict[str, Any] = {}
        try:
            header = _header(file)
            while len(requests) < header["num_requests"]:
                requests.append(WorkRequest(**_object(file, REQUEST)))
            if file.readline(1):
                raise ValueError(f"more lines than the {len(requests)} requests of the header")
        except ValueError as error:
            line = len(requests) + (2 if header else 1)
            raise ValueError(f"{path}, line {line}: {error}") from None
    try:
        return Workload(
            tuple(requests), header["max_tokens"], header["users"], header["seed"], header["description"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _header(file: TextIO) -> dict[str, Any]:
    header = _object(file, HEADER)
    if header["slotwise_workload"] != VERSION:
        raise ValueError(f"a workload of version {header['slotwise_workload']}; this Slotwise reads {VERSION}")
    forms.require_within("num_requests", header["num_requests"], 1, MAX_REQUESTS)
    forms.require_within("users", header["users"], 0, MAX_REQUESTS)
    if not all(isinstance(text, str) for text in header["description"].values()):
        raise ValueError("description must hold texts")
    return header


def _object(file: TextIO, shape: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Returns the next line, which must be an object with exactly these keys."""
    line = file.readline(MAX_LINE + 1)
    if not line:
        raise ValueError("the file ends here, too early")
    if len(line) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} characters")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON") from None
    if not isinstance(found, dict) or found.keys() != shape.keys():
        raise ValueError(f"must be an object of {', '.join(shape)}")
    for name, kinds in shape.items():
        if isinstance(found[name], bool) or not isinstance(found[name], kinds):
            raise ValueError(f"{name} has the wrong type")
    return found
