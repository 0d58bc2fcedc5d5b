"""Measures the memory that steps and their graphs take, by running the largest ones before the cache is allocated."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slotwise.kernels.interface import LayerCache, RaggedBatch
from slotwise.kernels.reference import Draw
from slotwise.model.decoder import Decoder
from slotwise.runner.prompt_logprobs import rows_at_a_time
from slotwise.runner.sampling.gpu import logprobs_of
from slotwise.runner.staging import sender

CAPTURES = 16  # a device gives memory in pieces larger than a small graph


@torch.inference_mode()
def measured_workspace(decoder: Decoder, draw: Draw, block_size: int, shapes: list[tuple[int, int, int]]) -> int:
    """Bytes of the device that steps of these shapes need at most, together.

    Each is run twice over a cache of one block.  That also compiles what they need.  They are added up, for captured
    steps keep a workspace of their own.

    Args:
        shapes: tokens, rows and the longest context of each.
    """
    device, caches, total = decoder.kernels.device, _caches(decoder, block_size), 0
    for num_tokens, num_rows, context in shapes:
        batch = batch_of_nothing(num_tokens, num_rows, context, block_size, device)
        for _ in range(2):  # the first may need more, to compile and to autotune
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            logits = decoder.logits(decoder.hidden(batch, caches)).float()  # the sampler edits copies
            controls = torch.ones(num_rows, 4, device=device)
            zeros = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
            draw(logits, controls, *zeros)
            few = min(num_rows, rows_at_a_time(num_rows))
            logprobs_of(range(few), [1] * few, logits[:few], zeros[0, :few])
            torch.cuda.synchronize(device)
            largest = torch.cuda.max_memory_allocated(device) - before
            del logits
        total += largest
    torch.cuda.empty_cache()
    return total


@torch.inference_mode()
def measured_graph(decoder: Decoder, block_size: int, num_rows: int, longest: int) -> int:
    """Bytes of the device that one captured decode step takes, beside the workspace that all of them share.

    A step is captured `CAPTURES` times.  Graphs of other sizes have as many kernels, and so take as much.  0 where
    nothing is captured.

    Args:
        longest: tokens of context.
    """
    kernels, caches = decoder.kernels, _caches(decoder, block_size)
    batch = batch_of_nothing(num_rows, num_rows, longest, block_size, kernels.device)

    def step() -> Tensor:
        return decoder.logits(decoder.hidden(batch, caches))

    graphs = [kernels.record(step)]  # the first takes the workspace, and loads what they share
    if graphs[0] is None:
        return 0
    before = bytes_beside_torch(kernels.device)
    graphs += [kernels.record(step) for _ in range(CAPTURES)]
    taken = bytes_beside_torch(kernels.device) - before
    graphs.clear()
    torch.cuda.empty_cache()
    return max(0, -(-taken // CAPTURES))


def bytes_beside_torch(device: torch.device) -> int:
    """Bytes of a device that are in use and not torch's: those of graphs, kernels, libraries and other processes."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _caches(decoder: Decoder, block_size: int) -> list[LayerCache]:
    """A cache of one block for each layer."""
    return [decoder.kernels.allocate_cache(1, block_size, shape, decoder.config.dtype)
            for shape in decoder.layer_shapes]


def batch_of_nothing(
    num_tokens: int, num_rows: int, longest: int, block_size: int, device: torch.device
) -> RaggedBatch:
    """A step whose tokens all lie in block 0, spread over rows that all sample.

    Args:
        longest: tokens of context that kernels are to allocate for.
    """
    counts = np.full(num_rows, num_tokens // num_rows)
    counts[: num_tokens % num_rows] += 1
    starts = np.zeros(num_rows + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(num_tokens) - np.repeat(starts[:-1], counts)
    longest = max(longest, int(counts.max()))
    tables = np.zeros((num_rows, -(-longest // block_size)), np.int32)
    zeros, contexts = np.zeros(num_tokens, np.int64), counts.astype(np.int32)
    ids, positions_, places, sample_at, query_starts, context_lens, block_tables = sender(device)(
        (zeros, positions, positions % block_size, starts[1:].astype(np.int64) - 1), (starts, contexts, tables))
    return RaggedBatch(ids, positions_, places, query_starts, context_lens, block_tables, sample_at,
                       max_query_len=int(counts.max()), max_context_len=longest)
