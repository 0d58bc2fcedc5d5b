"""Ragged steps on the tested device, beside the reference on the CPU."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from slotwise.compute.kernels.cuda import attention
from slotwise.compute.kernels.cuda.attention import CudaCache
from slotwise.compute.kernels.cuda.configs import DecodeConfig, PrefillConfig, Tuning
from slotwise.compute.kernels.interface import RaggedBatch
from slotwise.compute.kernels.reference import PagedCache, ReferenceKernels
from support.cuda_device import DEVICE, KERNELS
from support.paged import Layer, distance

REFERENCE = ReferenceKernels()
SMALL = Tuning(PrefillConfig(16, 16, 4, 2), DecodeConfig(16, 4, 2), segment=32)
"""Tiles and splits so small that short contexts have many."""


def moved(batch: RaggedBatch) -> RaggedBatch:
    """The same step on the device."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return RaggedBatch(**{k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in values.items()})


def caches(layer: Layer, poison: float = float("nan")) -> tuple[CudaCache, PagedCache]:
    """Both hold every row's context, rounded alike, and `poison` in every place that belongs to nobody."""
    theirs = layer.filled_cache(REFERENCE, poison)
    ours = KERNELS.allocate_cache(layer.num_blocks, layer.block_size, layer.shape, layer.kind)
    ours.storage.copy_(torch.stack((theirs.keys, theirs.values), 1).transpose(2, 3))
    return ours, theirs


def attend(layer: Layer, batch: RaggedBatch, query: Tensor, cache: CudaCache, tuning: Tuning = SMALL) -> Tensor:
    """Attention on the device, back on the CPU."""
    options = [None if option is None else option.to(DEVICE) for option in (layer.sinks, layer.biases)]
    return attention.attend(query.to(DEVICE), cache, moved(batch), layer.shape, tuning, *options).cpu()


def apart(layer: Layer, tuning: Tuning = SMALL) -> float:
    """Distance from the reference."""
    batch = layer.batch()
    query, (ours, theirs) = layer.query(batch), caches(layer)
    expected = REFERENCE.attention(query, theirs, batch, layer.shape, layer.sinks, layer.biases)
    return distance(attend(layer, batch, query, ours, tuning), expected)
