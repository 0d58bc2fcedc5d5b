"""Compressed attention against the reference on ragged steps, over a cache that holds NaN where nothing was written."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_device import DEVICE, EXAMPLES
from support.latent_layer import SHAPE, SHAPES, Layer
from support.paged import distance

from slotwise.compute.kernels.checked import CheckedKernels
from slotwise.compute.kernels.cuda import latent
from slotwise.compute.kernels.cuda.kernels import CudaKernels
from slotwise.compute.kernels.reference import ReferenceKernels

CUDA, REFERENCE = CheckedKernels(CudaKernels(DEVICE)), CheckedKernels(ReferenceKernels(DEVICE))
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@settings(max_examples=4 * EXAMPLES, deadline=None)
@given(SHAPES, st.sampled_from([*CLOSE]), st.sampled_from([1, 16, 48]),
       st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=2), min_size=1, max_size=3))
def test_chunks_of_rows_in_company(shape, kind, block_size, chunks):
    done = [Layer(kernels, shape, kind, block_size).run(chunks) for kernels in (CUDA, REFERENCE)]
    assert distance(*done) < CLOSE[kind]


@pytest.mark.parametrize("most", [0, latent.SPLIT_TOKENS], ids=["walked", "split"])
def test_several_segments(most):
    with patch.object(latent, "SPLIT_TOKENS", most), patch.object(latent, "SEGMENT", 32):
        done = [Layer(kernels, SHAPE, torch.float32, 16).run([[65, 2, 1], [3, 4]]) for kernels in (CUDA, REFERENCE)]
    assert distance(*done) < CLOSE[torch.float32]


def test_a_cache_of_fp8():
    plain, narrow = (Layer(CheckedKernels(CudaKernels(DEVICE, name)), SHAPE, torch.float32, 16).run([[30]])
                     for name in ("auto", "fp8"))
    assert 1e-4 < distance(plain, narrow) < 0.1
