"""Damaged, hostile and mislabeled files: an error of one line that names file and field, and nothing worse."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch
from support.gguf_files import write
from support.ragged import Driver

from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.generation_config import read_generation
from slotwise.compute.model.loading import load_model, read_config
from slotwise.engine.config import ConfigError
from slotwise.errors import CheckpointError, OneLineError
from slotwise.platform.gguf_file import open_gguf, open_model
from slotwise.text.chat_source import ChatTemplateError, find_chat_template
from slotwise.text.tokenizer import Tokenizer, TokenizerError

REFUSALS = (CheckpointError, ConfigError, TokenizerError, ChatTemplateError)
ROOM = 1 << 30  # bytes that opening a file may take
MUTATIONS = 200
HUGE = (0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def opened(path: Path) -> str:
    """Opens what a start opens, and computes a step: why it was refused; "" if it was not."""
    try:
        decoder = load_model(path, kernels=ReferenceKernels(), dtype="float32", max_positions=64)
        read_generation(path)
        Tokenizer.load(path)
        find_chat_template(path)
        Driver(decoder).greedy([[3, 4, 5]], 2)
    except REFUSALS as error:
        assert isinstance(error, OneLineError) and str(path) in str(error), error
        return str(error)
    return ""


def header_bytes(path: Path) -> int:
    return min(tensor.start for tensor in open_gguf(path).tensors.values())


def truncated(data: bytes, header: int, draw: random.Random) -> bytes:
    return data[: draw.choice((draw.randrange(header), draw.randrange(len(data))))]


def flipped(data: bytes, header: int, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(header)] = draw.randrange(256)
    return bytes(changed)


def inflated(data: bytes, header: int, draw: random.Random) -> bytes:
    """A length, count, size or offset with another value."""
    changed = bytearray(data)
    at = draw.randrange(4, header - 8)
    changed[at : at + 8] = struct.pack("<Q", draw.choice(HUGE))
    return bytes(changed)


def mislabeled(data: bytes, header: int, draw: random.Random) -> bytes:
    """The name of a key or a tensor in place of another, or another type."""
    names = [b"llama.block_count", b"llama.embedding_length", b"attention.head_count", b"token_embd.weight", b"attn_q",
             b"ffn_up", b"output_norm", b"blk.0", b"tokenizer.ggml.tokens", b"general.architecture", b"llama", b"rope"]
    name = draw.choice(names)
    place = data.find(name, draw.randrange(header)) % header
    if data[place : place + len(name)] != name:
        place = data.find(name)
    other = draw.choice(names)[: len(name)].ljust(len(name), b"x")
    return data[:place] + other + data[place + len(name) :]


@pytest.mark.parametrize("mutate", [truncated, flipped, inflated, mislabeled])
def test_mutated_files_are_refused_or_served(
    mutate: Callable[[bytes, int, random.Random], bytes], file: Path, tmp_path: Path,
) -> None:
    data, header = file.read_bytes(), header_bytes(file)
    path, refused = tmp_path / "mutated.gguf", 0
    draw = random.Random(mutate.__name__)
    for _ in range(MUTATIONS):
        mutated = mutate(data, header, draw)
        path.write_bytes(mutated)
        message = opened(path)
        refused += bool(message)
        assert message or mutated == data or len(mutated) == len(data), "a file with another size was served"
    assert refused > MUTATIONS // 3


def test_every_truncation_of_the_header_is_refused(file: Path, tmp_path: Path) -> None:
    data, header = file.read_bytes(), header_bytes(file)
    path = tmp_path / "short.gguf"
    for length in {*range(200), *range(200, header, 997), header, len(data) - 1}:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"short\.gguf"):
            open_model(path)


EDITS: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "layers": (lambda w: w.add_block_count(10**6), "llama.block_count must be a whole number from 1 to 1024"),
    "context": (lambda w: w.add_context_length(1), "llama.context_length must be a whole number from 2 to"),
    "no layers": (lambda w: w.add_block_count(0), "llama.block_count must be"),
    "fewer layers": (lambda w: w.add_block_count(2), "its metadata leaves no room for: tensor blk.2."),
    "heads": (lambda w: w.add_head_count(0), "llama.attention.head_count must be"),
    "heads of no group": (lambda w: w.add_head_count_kv(3), "llama.attention.head_count .* multiple of head_count_kv"),
    "heads by layer": (lambda w: w.add_head_count([4, 4, 2]), "llama.attention.head_count gives 3 layers 2 sizes"),
    "other width": (lambda w: w.add_embedding_length(128), "llama.embedding_length is 128, but token_embd.weight"),
    "odd heads": (lambda w: w.add_key_length(31), "(value_length|rope.dimension_count|key_length)"),
    "eps": (lambda w: w.add_layer_norm_rms_eps(float("nan")), "layer_norm_rms_epsilon must be a number"),
    "theta": (lambda w: w.add_rope_freq_base(float("inf")), "rope.freq_base must be a number"),
    "theta below 1": (lambda w: w.add_rope_freq_base(0.5), "rope.freq_base must be a number"),
    "rope": (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "rope.scaling.type 'longrope' is not"),
    "experts": (lambda w: w.add_expert_count(8), "llama.expert_used_count is missing"),
    "architecture": (lambda w: w.add_string("general.architecture", "rwkv7"), "architecture 'rwkv7' is not supported"),
    "type of a value": (lambda w: w.add_string("llama.context_length", "2048"), "llama.context_length must be"),
    "adapter": (lambda w: w.add_string("general.type", "adapter"), "general.type is 'adapter'"),
    "alignment": (lambda w: w.add_uint32("general.alignment", 48), "general.alignment must be a power of two"),
    "split": (lambda w: w.add_uint16("split.count", 3), "split.count is 3"),
    "table": (lambda w: w.add_vocab_size(77), "llama.vocab_size is 77"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_values_are_checked_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    edit, message = EDITS[name]

    def replace(writer: gguf.GGUFWriter) -> None:
        other = gguf.GGUFWriter(None, "llama")
        other.kv_data[0].clear()
        edit(other)
        writer.kv_data[0].update(other.kv_data[0])
        if name == "alignment":
            writer.data_alignment = 64

    path = write(folder, tmp_path / "edited.gguf", edit=replace)
    with pytest.raises(CheckpointError, match=rf"edited\.gguf.*{message}"):
        load_model(path, kernels=ReferenceKernels())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_numbers_that_are_none_are_refused(kind: str, value: float, folder: Path, tmp_path: Path) -> None:
    """Also as the scale of a block."""
    path = write(folder, tmp_path / "model.gguf", kind)
    entry = open_gguf(path).tensors["blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(entry.start)
        file.write(struct.pack("<f" if kind == "F32" else "<e", value))
    assert "tensor blk.1.ffn_up.weight holds NaN or infinite" in opened(path)


@pytest.mark.parametrize("kind", [2, 3, 6, 7, 12, 39])
def test_a_tensor_with_another_type_is_noticed(kind: int, folder: Path, tmp_path: Path) -> None:
    """Each has other sizes than Q8_0."""
    path = write(folder, tmp_path / "model.gguf", "Q8_0")
    name = b"blk.1.ffn_down.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (8,)
    struct.pack_into("<I", data, at, kind)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor .*(type|block of)"):
        open_gguf(path)


def test_bytes_behind_the_last_tensor_are_noticed(file: Path, tmp_path: Path) -> None:
    (tmp_path / "long.gguf").write_bytes(file.read_bytes() + bytes(4096))
    with pytest.raises(CheckpointError, match=r"long\.gguf: the last tensor ends at byte"):
        open_gguf(tmp_path / "long.gguf")


def test_a_part_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    first = write(folder, tmp_path / "model.gguf", parts=2)
    second = first.with_name(first.name.replace("00001-of", "00002-of"))
    data = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"split\.no is 0, and must be 1"):
        read_config(first)
    second.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"goes beyond the end of the file"):
        read_config(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*00002-of-00002"):
        read_config(first)


def test_unsupported_types_are_named(folder: Path, tmp_path: Path) -> None:
    path = write(folder, tmp_path / "model.gguf")
    with path.open("r+b") as file:
        data = file.read()
        at = data.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4 + 8
        file.seek(at)
        file.write(struct.pack("<I", 26))  # I32, as large as F32
    assert "tensor blk.0.attn_norm.weight is stored as I32, which is not supported" in opened(path)
    assert torch.float32 == read_config(path).dtype
