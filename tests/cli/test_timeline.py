"""slotwise timeline: a log becomes a page, and what is no log is refused in one line."""

from __future__ import annotations

import base64
import gzip
import json
import re

from observe.timeline.logs import everything

from slotwise.cli import main
from slotwise.observe import event_log


def test_a_log_becomes_a_page_without_its_prompts(tmp_path, capsys):
    entries = everything()
    path = tmp_path / "run.jsonl"
    path.write_bytes(event_log.encode_lines(entries))
    assert main(["timeline", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}.html\n"
    packed = re.search(r'id="log" data-name="run.jsonl">([^<]+)<', (tmp_path / "run.jsonl.html").read_text())[1]
    lines = gzip.decompress(base64.b64decode(packed)).splitlines()
    assert len(lines) == len(entries)
    for line, entry in zip(lines, entries, strict=True):
        told = json.loads(event_log.encode(entry))
        assert ("prompt" in told) == isinstance(entry, event_log.Request)
        told.pop("prompt", None)
        assert json.loads(line) == told


def test_what_is_no_log_is_refused_and_nothing_is_written(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("not a log\n")
    assert main(["timeline", str(path), "--output", str(tmp_path / "page.html")]) == 1
    assert main(["timeline", str(tmp_path / "nothing")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("slotwise timeline: line 1: this is not an entry") and "nothing" in second
    assert list(tmp_path.iterdir()) == [path]
