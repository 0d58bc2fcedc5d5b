"""slotwise timeline: a log becomes a page, and what is no log is refused in one line."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import stat
from dataclasses import replace

import pytest
from support.timeline_logs import everything

from slotwise.cli import main
from slotwise.observe import event_log


def unpacked(page):
    """The log in a page."""
    packed = re.search(r'id="log" data-name="run.jsonl">([^<]+)<', page.read_text())[1]
    return gzip.decompress(base64.b64decode(packed))


def test_a_log_becomes_a_page_without_its_prompts(tmp_path, capsys):
    entries = everything()
    path = tmp_path / "run.jsonl"
    path.write_bytes(event_log.encode_lines(entries))
    assert main(["timeline", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}.html\n"
    lines = unpacked(tmp_path / "run.jsonl.html").splitlines()
    assert len(lines) == len(entries)
    for line, entry in zip(lines, entries, strict=True):
        told = json.loads(event_log.encode(entry))
        if isinstance(entry, event_log.RequestEntry):
            assert told["add"]["spec"]["prompt"]
            told["add"]["spec"]["prompt"] = []
        assert json.loads(line) == told


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_page_is_read_by_whom_its_log_is_and_names_no_tenant_and_no_salt(tmp_path, mode):
    request = next(entry for entry in everything() if isinstance(entry, event_log.RequestEntry))
    others = [entry for entry in everything() if not isinstance(entry, event_log.RequestEntry)]
    secret = request.replace_spec(replace(
        request.spec, salt="pepper", slo=replace(request.spec.slo, tenant="alice", priority=3)))
    path, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    path.write_bytes(event_log.encode_lines([others[0], secret]))
    path.chmod(mode)
    page.write_text("of an earlier run")
    before = os.umask(0o022)
    try:
        assert main(["timeline", str(path), "--output", str(page)]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(page.stat().st_mode) == mode
    lines = unpacked(page)
    assert b"pepper" not in lines and b"alice" not in lines and b'"priority":3' in lines


def test_a_log_is_not_replaced_by_its_page(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_bytes(event_log.encode_lines(everything()))
    before = path.read_bytes()
    (tmp_path / "other").hardlink_to(path)
    for output in (path, tmp_path / "other", tmp_path / ".." / tmp_path.name / "run.jsonl"):
        assert main(["timeline", str(path), "--output", str(output)]) == 1
        assert "is the log itself" in capsys.readouterr().err and path.read_bytes() == before


def test_what_is_no_log_is_refused_and_nothing_is_written(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("not a log\n")
    assert main(["timeline", str(path), "--output", str(tmp_path / "page.html")]) == 1
    assert main(["timeline", str(tmp_path / "nothing")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("slotwise timeline: line 1: this is not an entry") and "nothing" in second
    assert list(tmp_path.iterdir()) == [path]
