"""How large an engine is made on a GPU, told by a GPU that is not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slotwise.compose import default_sizes
from slotwise.compose.default_sizes import sized, step_tokens
from slotwise.compute.kernels.group import SINGLE_RANK
from slotwise.compute.kernels.interface import AttentionShape
from slotwise.compute.runner import kv_blocks, memory_budget
from slotwise.compute.runner.decode_graphs import MAX_GRAPHS, MAX_TOKENS
from slotwise.core.drafting import MAX_STEP_DRAFTS
from slotwise.engine.config import ConfigError, EngineConfig

GIB = 1 << 30
SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, scale=1.0)


def decoder(device: str, rate: float, layer_weights: int = 7_000_000_000) -> SimpleNamespace:
    kernels = SimpleNamespace(
        name=device, device=torch.device(device), records_drafts=True, operations_per_second=lambda kind: rate,
        graph_size=lambda rows, context: (-(-rows // 8) * 8, 1 << 17),
        library_bytes=lambda kind: 0,
        cache_bytes_per_block=lambda block_size, shape, kind: 4096 * block_size)
    config = SimpleNamespace(
        dtype=torch.bfloat16, layer_weights=layer_weights, longest=131_072, num_layers=32,
        is_causal=True, kv_layers=(), doubled_layers=())
    return SimpleNamespace(
        kernels=kernels, config=config, group=SINGLE_RANK, layer_shapes=[SHAPE] * 32, weight_bytes=16 * GIB)


@pytest.mark.parametrize(("device", "rate", "tokens"), [
    ("cuda", 8e14, 4096), ("cuda", 2e15, 8192), ("cuda", 1e13, 2048), ("cpu", 8e14, 512), ("cpu", 1e12, 128)])
def test_a_step_has_room_for_a_tenth_of_a_second(device, rate, tokens):
    assert step_tokens(decoder(device, rate), stalls_are_bounded=False) == tokens


@pytest.mark.parametrize(("device", "rate", "tokens"), [("cuda", 3e14, 8192), ("cpu", 8e12, 256), ("cpu", 1e12, 128)])
def test_where_streams_are_not_held_up_it_has_room_for_half_a_second(device, rate, tokens):
    assert step_tokens(decoder(device, rate), stalls_are_bounded=True) == tokens


def test_a_small_encoder_has_larger_steps_than_a_model_whose_streams_wait():
    small = decoder("cpu", 2e11, layer_weights=10_000_000)
    assert step_tokens(small, stalls_are_bounded=True) == 512
    small.config.is_causal = False
    assert step_tokens(small, stalls_are_bounded=True) == 1024


def test_beside_all_slots_a_prompt_of_a_round_length_still_fits_into_a_step():
    assert EngineConfig.of(model="", max_num_seqs=24).sized(512).step_tokens == 512 + 24
    assert EngineConfig.of(model="", max_num_seqs=24, max_num_batched_tokens=512).sized(256).step_tokens == 512


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 140 GiB, in a host that has 64 GiB to spare."""
    monkeypatch.setattr(default_sizes, "measured_workspace", lambda model, draw, block_size, shapes: 4 * GIB)
    monkeypatch.setattr(default_sizes, "measured_graph", lambda model, block_size, rows, longest: 0)
    monkeypatch.setattr(default_sizes, "draw_for", lambda kernels: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120 * GIB, 140 * GIB))
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 64 * GIB)


def test_host_memory_is_asked_for_beside_the_gpus(gpu):
    asked = {"model": "any", "max_num_seqs": 250, "max_model_len": 100_000}
    without, _ = sized(EngineConfig.of(**asked), decoder("cuda", 8e14))
    limits, used = sized(EngineConfig.of(**asked, kv_offloading_size=40.0), decoder("cuda", 8e14))
    block = 32 * 4096 * 64
    assert without.num_host_blocks == 0 and limits.num_host_blocks == 40 * GIB // block
    assert used.host == limits.num_host_blocks * block and used.workspace == 4 * GIB + kv_blocks.STAGING
    assert without.num_blocks - limits.num_blocks == kv_blocks.STAGING // block, "copies pass through the GPU"
    with pytest.raises(MemoryError, match=r"65\.00 GiB of host memory .* 64\.00 GiB that are free"):
        sized(EngineConfig.of(**asked, kv_offloading_size=65.0), decoder("cuda", 8e14))


def test_the_cpu_needs_no_second_tier():
    with pytest.raises(ConfigError, match="raise kv_cache_memory instead"):
        sized(EngineConfig.of(model="any", kv_offloading_size=1.0), decoder("cpu", 8e14))


@pytest.mark.parametrize(("settings", "objection"), [
    ({"kv_offloading_size": -1.0}, "from 0 to 1048575"), ({"kv_offloading_size": float("nan")}, "from 0 to 1048575"),
    ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "needs enable_prefix_caching")])
def test_what_makes_no_sense_is_refused(settings, objection):
    with pytest.raises(ConfigError, match=objection):
        EngineConfig.of(model="any", **settings)


def test_a_gpus_cache_is_what_weights_and_measured_steps_leave(gpu, monkeypatch):
    seen = []

    def measured(model, draw, block_size, shapes):
        seen.extend(shapes)
        return 4 * GIB

    monkeypatch.setattr(default_sizes, "measured_workspace", measured)
    config = EngineConfig.of(model="any", max_num_seqs=250, max_num_batched_tokens=8192, max_model_len=10_000)
    limits, used = sized(config, decoder("cuda", 8e14))
    assert seen == [(8192, 250, 10_000), (256, 256, 10_000)], "a whole step of prompts, and a recorded one that decodes"
    budget = int(140 * GIB * 0.9) - 20 * GIB - 4 * GIB
    assert limits.num_blocks == budget // (32 * 4096 * 64)
    assert used.weights == 16 * GIB and used.workspace == 4 * GIB and used.cache <= budget + 32 * 4096 * 64
    with pytest.raises(MemoryError, match=r"120\.00 GiB of its 140\.00 GiB are free"):
        sized(EngineConfig.of(model="any", kv_cache_memory=118 * GIB), decoder("cuda", 8e14))


def test_a_step_with_drafts_has_room_for_their_logits(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(default_sizes, "measured_workspace",
                        lambda model, draw, block_size, shapes: asked.append(shapes) or 0)
    for speculation in (None, {"method": "none"}, {"method": "ngram"}):
        sized(EngineConfig.of(model="any", max_num_seqs=16, max_model_len=1000, max_num_batched_tokens=512,
                              speculative_config=speculation), decoder("cuda", 8e14))
    assert [shapes[0][:2] for shapes in asked] == [(512, 16), (512, 16), (512, 16 + MAX_STEP_DRAFTS)]
    assert [shapes[1][:2] for shapes in asked] == [(16, 16), (16, 16), (MAX_TOKENS, MAX_TOKENS)], "of a captured step"


def test_a_gpus_cache_leaves_room_for_all_graphs(gpu, monkeypatch):
    """Rows in eights, one length: 32 sizes; with adapters twice as many, and with drafts as many as are kept."""
    asked = {"model": "any", "max_num_seqs": 250, "max_model_len": 10_000, "speculative_config": None}
    without, _ = sized(EngineConfig.of(**asked), decoder("cuda", 8e14))
    captured = []

    def measured(model, block_size, rows, longest):
        captured.append((block_size, rows, longest))
        return 1 << 20

    monkeypatch.setattr(default_sizes, "measured_graph", measured)
    drafts = {"speculative_config": {"method": "ngram"}}
    for more, number in (({}, 32), ({"enable_lora": True}, 64), (drafts, MAX_GRAPHS)):
        limits, used = sized(EngineConfig.of(**asked | more), decoder("cuda", 8e14))
        assert used.graphs == number << 20
        assert without.num_blocks - limits.num_blocks == -(-used.graphs // (32 * 4096 * 64)) or more
    assert set(captured) == {(default_sizes.BLOCK_SIZE, 256, 10_000)}


@pytest.mark.parametrize("asked", [{"kv_cache_memory": 30 * GIB}, {"gpu_memory_utilization": 0.6}])
def test_of_the_memory_that_was_asked_ended_requests_keep_what_no_slot_can_use(gpu, monkeypatch, asked):
    few = {"model": "any", "max_num_seqs": 1, "max_model_len": 1024}
    model = decoder("cuda", 8e14)
    useful, _ = sized(EngineConfig.of(**few), model)
    kept, used = sized(EngineConfig.of(**few, **asked), model)
    assert useful.num_blocks == 1024 // 64
    assert kept.num_blocks > 100 * useful.num_blocks and 25 * GIB < used.cache < 70 * GIB
    if "gpu_memory_utilization" in asked:  # before weights are read, nothing is known of what the GPU will have left
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        model.formats, model.adapters = {}, None
        assert default_sizes.check_sizes(EngineConfig.of(**few, **asked), [model])[0].num_blocks == useful.num_blocks
    for capped in ({"enable_prefix_caching": False}, {}):
        model.config.is_causal = bool(capped)
        assert sized(EngineConfig.of(**few, **asked, **capped), model)[0].num_blocks == useful.num_blocks
