"""Finds a checkpoint: a folder, a GGUF file, or either on the Hugging Face hub; and digests of its files.

A folder with config.json and safetensors weights is a checkpoint, whatever else it contains: many published ones hold
the same weights in several formats.  For any other folder or file the error says which format it is in.  Does not
import torch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from slotwise.compute.model.fields import read_json
from slotwise.errors import CheckpointError
from slotwise.platform.files import check_part
from slotwise.platform.gguf_file import SUFFIX, is_gguf, models_among, parts_of

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
BELOW = "onnx"  # a folder whose files are looked at, too
MOST_ENTRIES = 4096  # of a folder that are looked at
SHOWN = 3  # folders that a message names
ORIGINAL = "serve the Hugging Face checkpoint that it was made from"


class FileFormat(NamedTuple):
    """A format that is not read, recognized by names."""

    what: str
    advice: str
    patterns: tuple[str, ...]  # of files and folders


FORMATS = (  # in the order in which they are looked for
    FileFormat("a diffusers pipeline, which makes images", "give the folder of a language model",
               ("model_index.json",)),
    FileFormat("a GGML file, older than GGUF", "download the model in GGUF", ("*.ggml",)),
    FileFormat("an OpenVINO model", ORIGINAL, ("openvino_*.xml", "openvino_*.bin")),
    FileFormat("an ONNX model", ORIGINAL, ("*.onnx", "*.onnx_data")),
    FileFormat("an MLX model in NumPy's format", ORIGINAL, ("*.npz",)),
    FileFormat("a Core ML model", ORIGINAL, ("*.mlpackage", "*.mlmodelc", "*.mlmodel")),
    FileFormat("a TensorRT engine", ORIGINAL, ("*.engine",)),
    FileFormat("a TensorFlow or Flax model", "serve its PyTorch version", ("*.h5", "*.msgpack", "*.tflite", "*.pb")),
    FileFormat("weights in their maker's own layout", "serve the version for transformers", ("consolidated*",)),
    FileFormat("pickled weights, which can run code when opened", "load them with transformers if you trust them, "
               "write safetensors with save_pretrained, and serve those",
               ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")),
    FileFormat("a part of a training state", "export the model with save_pretrained", ("*.distcp", "global_step*")),
)  # fmt: skip
TOKENIZER = FileFormat("a tokenizer without a model", "give the folder of the model",
                   ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"))


def file_error(path: Path) -> CheckpointError:
    """The error for a file that is not in GGUF."""
    if path.name.endswith(SUFFIX):
        return CheckpointError(f"{path} does not begin as a GGUF file does: it is damaged, or something else")
    if known := _recognized([path.name]):
        return CheckpointError(_not_read(f"{path} is", known))
    if path.name in (CONFIG, WEIGHTS, INDEX):
        return CheckpointError(f"{path} is a file of a checkpoint: give the folder that holds it")
    return CheckpointError(f"{path} is not a model: give a GGUF file, or the folder that holds {CONFIG} and {WEIGHTS}")


def checkpoint_in(folder: Path) -> Path:
    """The folder, if it is a Hugging Face checkpoint, or the path of the one model in GGUF in it.

    Raises CheckpointError, with what the folder holds instead, where it holds no checkpoint that can be read.
    """
    has_config, has_weights = (folder / CONFIG).is_file(), any((folder / name).is_file() for name in (WEIGHTS, INDEX))
    if (folder / ADAPTER).is_file():
        raise CheckpointError(_adapter(folder, is_beside_weights=has_config and has_weights))
    if has_config and has_weights:
        return folder
    names, inner = _entries(folder)
    if models_among(names):
        return gguf_in(folder)
    if known := _recognized(names):
        raise CheckpointError(_not_read(f"{folder} holds", known))
    if has_config:
        read_json(folder / CONFIG)  # else this error would come after a long download
        raise CheckpointError(f"{folder} has no {WEIGHTS} and no {INDEX}: download its weights")
    if inner:
        raise CheckpointError(f"{folder} has no {CONFIG}, but folders in it do: give one of them ({inner})")
    if not has_weights and _matches(names, TOKENIZER):
        raise CheckpointError(f"{folder} holds {TOKENIZER.what}: {TOKENIZER.advice}")
    raise CheckpointError(f"{folder} has no {CONFIG} and no GGUF file: it is not a checkpoint, or not all of one")


def gguf_in(folder: Path, patterns: Sequence[str] = ("*.gguf",)) -> Path:
    """The path of the one model in GGUF whose files match a pattern, the first file of a split one.

    Raises CheckpointError when there is none, or several.
    """
    found = sorted({path.relative_to(folder).as_posix() for pattern in patterns
                    for path in islice(folder.glob(pattern), MOST_ENTRIES)})
    models = [name for name in found if models_among([Path(name).name])]
    if not models:
        raise CheckpointError(f"{folder} has no GGUF file {' or '.join(patterns[:2])}")
    if len(models) > 1:
        more = f" and {len(models) - SHOWN} more" if len(models) > SHOWN else ""
        raise CheckpointError(f"{folder} holds {len(models)} models in GGUF: give the path of one "
                              f"({', '.join(models[:SHOWN])}{more})")
    path = folder / models[0]
    try:
        check_part(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return path


def _not_read(found: str, known: FileFormat) -> str:
    return f"{found} {known.what}, and Slotwise reads safetensors checkpoints and GGUF files only: {known.advice}"


def _adapter(folder: Path, *, is_beside_weights: bool) -> str:
    """The message for an adapter; transformers applies it to its base model, whatever else the folder has."""
    base = ""
    with suppress(CheckpointError):  # the file is damaged or names none
        base = f" for {read_json(folder / ADAPTER).text('base_model_name_or_path'):.100}"
    other = f", or remove {ADAPTER} to serve the other weights in the folder" if is_beside_weights else ""
    return (f"{folder} holds a LoRA adapter{base} and no model: serve its base model with --enable-lora "
            "--lora-modules NAME=FOLDER, or merge it into its base model with peft (merge_and_unload, then "
            f"save_pretrained) and serve the result{other}")


def _entries(folder: Path) -> tuple[list[str], str]:
    """Names in a folder and in its folder `BELOW`; and the first folders in it that have a config, for a message."""
    try:
        entries = sorted(islice(os.scandir(folder), MOST_ENTRIES), key=lambda entry: entry.name)
        names = [entry.name for entry in entries]
        if BELOW in names and (folder / BELOW).is_dir():
            names += [entry.name for entry in islice(os.scandir(folder / BELOW), MOST_ENTRIES)]
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    return names, ", ".join([entry.path for entry in entries if Path(entry, CONFIG).is_file()][:SHOWN])


def _recognized(names: Iterable[str]) -> FileFormat | None:
    return next((known for known in FORMATS if _matches(names, known)), None)


def _matches(names: Iterable[str], known: FileFormat) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in known.patterns)


_HUB_ID = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<quantization>[\w.-]+))?")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_SKIPPED = ("*/*", "consolidated*")  # other formats of the same weights


def is_hub_id(model: str) -> bool:
    """Whether `locate` looks for this model on the hub: it is an id, and not a path on this machine."""
    return _HUB_ID.fullmatch(model) is not None and not Path(model).expanduser().exists()


def locate(model: str | Path) -> Path:
    """A checkpoint's folder, or its GGUF file, the first of a split one.

    A folder that holds one model in GGUF, and no other checkpoint, stands for its file.  A hub id that is not a folder
    here is downloaded, or found in the hub's cache; `owner/name:Q4_K_M` is the GGUF file of this quantization.

    Raises CheckpointError when there is no such folder or file, it is not a checkpoint, or the hub
    cannot be reached or has no such model.
    """
    given = Path(model).expanduser()
    if given.is_dir():
        return checkpoint_in(given)
    if given.exists():
        if not is_gguf(given):
            raise file_error(given)
        return parts_of(given)[0]
    found = _HUB_ID.fullmatch(str(model))
    if not found:
        raise CheckpointError(f"no folder and no file {model}: give a checkpoint's folder, a GGUF file, or a hub id "
                              "such as owner/name")
    repository, quantization = found["repository"], found["quantization"]
    if not quantization:
        folder = _download(repository, _HUB_FILES, _HUB_SKIPPED)
        if not any(folder.glob("*.safetensors")):
            raise CheckpointError(f"the hub's {repository} has no safetensors weights: if it holds models in GGUF, "
                                  f"name one by its quantization, as {repository}:Q4_K_M")
        return checkpoint_in(folder)
    names = sorted({quantization, quantization.upper(), quantization.lower()})
    patterns = tuple(pattern for name in names for pattern in (
        f"*[-.]{name}.gguf", f"*[-.]{name}-*-of-*.gguf", f"{name}.gguf", f"{name}/*.gguf"))
    return gguf_in(_download(repository, patterns, ()), patterns)


def _download(name: str, patterns: tuple[str, ...], skipped: tuple[str, ...]) -> Path:
    # Imported here: it costs a tenth of a second that a folder does not need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(skipped)))
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"the hub has no model {name}, or it needs a login (HF_TOKEN)") from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise CheckpointError(
            f"no folder {name} here, and the hub cannot be reached to download it: give a folder, or connect"
        ) from error
    except (HFValidationError, OSError) as error:
        raise CheckpointError(f"cannot download {name} from the hub: {error!s:.200}") from error


CONFIGS = ("config.json", "generation_config.json", "model.safetensors.index.json", "adapter_config.json")
HEADER_BYTES = 64 << 10  # of a weights' file: the beginning of its table of tensors
MAX_CONFIG_BYTES = 64 << 20


def fingerprint(checkpoint: Path, *, is_timed: bool = True) -> str:
    """Returns a digest of the configs, and of name, size, time of change and header of each weights' file.

    Args:
        is_timed: times of change count; without them copies of a checkpoint have one digest.

    Raises:
        OSError: a file cannot be read.
    """
    configs, weights = _digested_files(checkpoint)
    digest = hashlib.blake2b(digest_size=16)
    for path in [*configs, *weights]:
        if not path.is_file():
            continue
        is_config = path in configs
        with path.open("rb") as file:
            about = path.stat()
            changed = about.st_mtime_ns if is_timed and not is_config else 0
            digest.update(repr((path.name, about.st_size, changed)).encode())
            digest.update(file.read(MAX_CONFIG_BYTES if is_config else HEADER_BYTES))
    return digest.hexdigest()


def content_digest(checkpoint: Path) -> str:
    """Returns a digest of all that the configs and the weights' files hold, at the speed of SHA-256.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in itertools.chain(*_digested_files(checkpoint)):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _digested_files(checkpoint: Path) -> tuple[list[Path], list[Path]]:
    """Configs, which may be missing, and weights."""
    weights = parts_of(checkpoint) if checkpoint.is_file() else sorted(checkpoint.glob("*.safetensors"))
    return [checkpoint / name for name in CONFIGS], weights
