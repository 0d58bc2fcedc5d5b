"""Every field of a checkpoint's descriptions, given hostile values: it loads, or is refused in one line."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import edit_config, make
from support.live import cli, serving

from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import load_model, read_config
from slotwise.engine.config import ConfigError
from slotwise.errors import MOST_CHARACTERS, CheckpointError, OneLineError, one_line
from slotwise.text.chat_source import MAX_SOURCE
from slotwise.text.chat_template import ChatTemplateError, load_chat_template
from slotwise.text.tokenizer import Tokenizer, TokenizerError

REFUSALS = (CheckpointError, ConfigError, TokenizerError, ChatTemplateError)
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 2**24, 2**31, 2**63, 2**70, -(2**70), 10**400, 0.0, -0.0, 0.5, 5e-324, 1e-300,
    1e30, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), "", "x", "1", "\ud800", "a\nb\x1b[31m\x00",
    "x" * 10_000, [], [[]], [1, "a"], ["a", "b"], [2**70], [None], {}, {"content": 3}, {"content": "\ud800"},
    {"name": 1}, [{}], [{"name": "default", "template": 7}], {"rope_type": "yarn", "factor": 4.0},
    json.loads("[" * 400 + "]" * 400),
]  # fmt: skip
ROPE = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
        "beta_fast", "beta_slow", "attention_factor", "truncate", "type", "partial_rotary_factor")
READ = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "dtype",
        "eos_token_id", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "quantization_config",
        "attention_bias", "mlp_bias", "torch_dtype", "sliding_window", "use_sliding_window", "max_window_layers",
        "layer_types", "original_max_position_embeddings", "partial_rotary_factor")
OF_QWEN = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_bias")
OTHERS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_bias", "mlp_bias",
          "torch_dtype", "partial_rotary_factor")  # not every family reads them, or another field comes first
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "model_max_length")
MODEL = ("config.json", "generation_config.json", "model.safetensors.index.json")
GIB = 1 << 30
ROOM = 3 * GIB  # of addresses, for what one of these may ask for; the greatest rotary table takes two


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: make(
        family, tmp_path_factory.mktemp(family) / "model", shard_size="300KB", tokenizer=True))


@pytest.fixture(params=["llama2", "qwen2"])
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(request.param)


@pytest.fixture
def bounded() -> Iterator[None]:
    """What takes gigabytes more than there are now fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def opened(folder: Path, file: str = "") -> str:
    """Opens what a start opens, for the sake of `file` or all of it: why it was refused, "" if it was not."""
    try:
        if "token" not in file:
            load_model(folder, kernels=ReferenceKernels())
        if file in MODEL:
            return ""
        tokenizer = Tokenizer.load(folder)
        template = load_chat_template(folder, tokenizer.special_tokens)
        if template is not None:
            template.render([{"role": "user", "content": "hi"}])
    except REFUSALS as error:
        message = str(error)
        assert 0 < len(message) <= MOST_CHARACTERS and message.isprintable()
        message.encode()
        return message
    return ""


def mutated(path: Path, name: tuple[str, ...], value: Any) -> str:
    """`path` with one field, perhaps a nested one, set to `value`: why that is refused."""
    before = path.read_text() if path.exists() else ""
    fields = json.loads(before or "{}")
    inner = fields
    for part in name[:-1]:
        inner = inner.setdefault(part, {})
    inner[name[-1]] = value
    try:
        path.write_text(json.dumps(fields))
        return opened(path.parent, path.name)
    finally:
        path.write_text(before) if before else path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "name"), [
    *(("llama2", name) for name in READ), *(("qwen2", name) for name in OF_QWEN)], indirect=["folder"])
def test_a_field_of_the_models_description(folder: Path, name: str, bounded: None) -> None:
    told = [mutated(folder / "config.json", (name,), value) for value in VALUES]
    assert any(told) or name in OTHERS, f"nothing that {name} may be is refused"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["llama2"], indirect=True)  # one reader for all families
@pytest.mark.parametrize(("kind", "name"), [
    *(("default", name) for name in ("rope_type", "rope_theta", "type", "partial_rotary_factor")),
    ("linear", "factor"), *(("llama3", name) for name in ROPE[:6]), *(("yarn", name) for name in ROPE)])
def test_a_field_of_the_rotary_embedding(folder: Path, kind: str, name: str, bounded: None) -> None:
    path = folder / "config.json"
    sound, before = {
        "rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256}, path.read_text()
    try:
        edit_config(folder, rope_parameters=sound, rope_theta=..., rope_scaling=...)
        assert opened(folder) == ""
        told = [mutated(path, ("rope_parameters", name), value) for value in VALUES]
        assert any(told), f"nothing that {name} may be is refused"
    finally:
        path.write_text(before)


def test_a_field_of_the_generations_description(folder: Path) -> None:
    path = folder / "generation_config.json"
    told = {str(value)[:40]: mutated(path, ("eos_token_id",), value) for value in VALUES}
    assert "below 2147483648" in told[str(2**70)] and "eos_token_id" in told["x"]
    assert not mutated(path, ("temperature",), "\ud800"), "what is not read is not judged"


@pytest.mark.parametrize("folder", ["llama2"], indirect=True)  # one reader for all families
@pytest.mark.parametrize("name", NAMED)
def test_a_field_of_the_tokenizers_description(folder: Path, name: str) -> None:
    for value in VALUES:
        mutated(folder / "tokenizer_config.json", (name,), value)
        mutated(folder / "special_tokens_map.json", (name,), value)


def test_an_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    for value in (*VALUES, "..", ".", "/etc/passwd", "a/../b", "x\0.safetensors", "\u202e.safetensors"):
        for name in (("weight_map",), ("weight_map", "lm_head.weight"), ("weight_map", "\ud800")):
            mutated(index, name, value)
    assert "must map each tensor to a file in its folder" in mutated(index, ("weight_map", "x"), "\ud800.safetensors")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json",
                                  "special_tokens_map.json", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [
    b"", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"null", b"[]",
    b'"\\ud800"', b'{"a":' * 5000 + b"1" + b"}" * 5000, "{\u2028}".encode()])  # fmt: skip
def test_a_file_that_is_no_description(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    before = path.read_bytes() if path.exists() else b""
    try:
        path.write_bytes(content)
        assert opened(folder)
    finally:
        path.write_bytes(before) if before else path.unlink()


@pytest.mark.parametrize(("template", "told"), [
    (["a", "b"], "a text, or a list of objects with name and template"), (7, "must be a text"),
    ({"a": 1}, "must be a text"),
    ([{"name": "tool", "template": "x"}], "is named 'default'"), ([{"name": "default"}], ""),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"), ("x" * (MAX_SOURCE + 1), "more than"),
    ("{% for %}", "does not compile"), ("{{ 'a'\n.\n }}\x1b", "does not compile")])
def test_templates(folder: Path, template: object, told: str, bounded: None) -> None:
    assert told in mutated(folder / "tokenizer_config.json", ("chat_template",), template)


def test_a_template_computes_nothing_while_it_is_compiled(folder: Path, bounded: None) -> None:
    """Jinja would fold these constants: gigabytes, and powers without end."""
    path = folder / "chat_template.jinja"
    for source in ("{{ 'x' * 40000000000 }}", "{% if 9 ** 9 ** 9 ** 9 %}{% endif %}", "{{ 'x' | center(9000000000) }}",
                   "{% set a = 9 ** 9 ** 9 ** 9 %}", "{{ ['x'] * 9000000000 }}"):
        path.write_text(source)
        try:
            load_chat_template(folder, {})
        finally:
            path.unlink()


FILES = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
         "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def test_a_link_to_a_file_of_the_machine_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """Each file would be fine as a copy: what it says is not what is refused."""
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (copy / "special_tokens_map.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    assert opened(copy) == ""
    for name in (*FILES, *[path.name for path in copy.glob("*.safetensors")]):
        (copy / name).rename(tmp_path / "elsewhere" / name)
        (copy / name).symlink_to(tmp_path / "elsewhere" / name)
        told = opened(copy)
        assert name in told and "outside of the checkpoint" in told, told
        (copy / name).unlink()
        (tmp_path / "elsewhere" / name).rename(copy / name)
    assert opened(copy) == ""


@pytest.mark.parametrize("name", [
    "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_a_file_that_may_be_missing_and_cannot_be_read_is_not_taken_for_missing(
        folder: Path, name: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    path = copy / name
    for broken in (lambda: path.symlink_to("nowhere"), lambda: path.symlink_to(name), lambda: os.mkfifo(path)):
        path.unlink(missing_ok=True)
        assert opened(copy) == ""
        broken()
        assert name in opened(copy)


def test_links_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--owner--name" / "blobs", tmp_path / "models--owner--name" / "snapshots" / "1"
    shutil.copytree(folder, blobs)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    assert opened(snapshot) == ""


def test_ends_that_a_model_cannot_produce_are_left_out(folder: Path) -> None:
    before = (folder / "config.json").read_text()
    try:
        edit_config(folder, eos_token_id=[5, 1023, 1024, 2**30, -7])
        assert {5, 1023} <= set(read_config(folder).eos_token_ids) <= set(range(1024))
    finally:
        (folder / "config.json").write_text(before)


@pytest.mark.parametrize("message", ["", "a\nb", "\ud800", "\x1b[2J", "x" * 10_000, "\x00" * 600, "ä日本", "\u202e"])
def test_every_message_can_be_shown_and_sent(message: str) -> None:
    line = one_line(message)
    assert line.isprintable() and len(line) <= MOST_CHARACTERS and line.encode().decode() == line
    assert str(OneLineError(message)) == line


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["llama2"], indirect=True)  # a server says it alike, whatever is refused
@pytest.mark.parametrize(("file", "fields", "told"), [
    ("config.json", {"eos_token_id": 2**70}, "eos_token_id must be at most 1024 token ids below"),
    ("config.json", {"architectures": ["\ud800\n\x1b"]}, r"architecture \ud800 \x1b is not supported"),
    ("config.json", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}}, "must be above 1 with"),
    ("model.safetensors.index.json", {"weight_map": {"a": "\ud800"}}, "weight_map must map each tensor to a file"),
    ("tokenizer_config.json", {"eos_token": {"content": "\ud800"}}, "eos_token must be a text"),
])
def test_a_server_says_in_one_line_what_is_wrong(
        folder: Path, tmp_path: Path, file: str, fields: dict[str, Any], told: str) -> None:
    spoilt = Path(shutil.copytree(folder, tmp_path / "model"))
    (spoilt / file).write_text(json.dumps(json.loads((spoilt / file).read_text()) | fields))
    assert told in opened(spoilt)
    if "architectures" in fields or file == "tokenizer_config.json":  # what is refused first, and last
        done = cli("serve", str(spoilt), "--port", "0")
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("slotwise serve: ") and told in line


@pytest.mark.slow
def test_a_model_of_very_many_positions_takes_no_memory_for_them(tmp_path: Path) -> None:
    folder = make("llama2", tmp_path / "model", tokenizer=True, max_position_embeddings=2**24)
    with serving(str(folder), "--kv-cache-memory", str(1 << 30), log=tmp_path / "log") as live:
        answer = live.client.post("/v1/completions", json={"prompt": "def", "max_tokens": 4, "ignore_eos": True})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        children = Path(f"/proc/{live.process.pid}/task/{live.process.pid}/children").read_text().split()
        peak = max(_peak(int(pid)) for pid in children)
    assert peak < 1 << 30, "the whole rotary table has two gigabytes"


def _peak(pid: int) -> int:
    """Bytes that a process held at most."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
