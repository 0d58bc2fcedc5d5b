"""Memory sizes of an engine, decided before allocation: weights, workspace of the largest step, cache.

    what this process may take
    |■ weights ■|■ workspace ■|■■■■■■■■■■■ cache ■■■■■■■■■■■|      others      |

On a GPU the workspace is measured: the largest steps run before the cache is allocated.  Host memory for blocks evicted
from a device's cache is separate, where an option sets it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slotwise.compute.kernels.interface import LayerCache, RaggedBatch
from slotwise.compute.kernels.reference import Draw
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.runner.prompt_results import rows_at_a_time
from slotwise.compute.runner.sampling.gpu_sampler import logprobs_of
from slotwise.compute.runner.staging import sender

GPU_SHARE = 0.9  # of a GPU's memory, where no option says how much
SHARE = 0.4  # of what is free once the weights are loaded goes to the cache, where no option says how much

STEPS_LEAVE = 20_000_000  # bytes of graphs, samplers and heap fragmentation: 15 to 30 MB were measured

UNLIMITED = 1 << 62  # bytes

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Memory this process may still take: the machine's, or that of a control group above it where that is less."""
    return min(_machine_available(), *map(_free_of, _groups()))


def loadable_bytes() -> int:
    """Memory that loading may take, with what the system can swap out; `UNLIMITED` where it does not say.

    Idle programs may be swapped out while weights are read, so a model can fit that exceeds `available_bytes`.
    """
    available = _meminfo("MemAvailable")
    if available is None:
        return UNLIMITED
    swap = _meminfo("SwapFree") or 0
    return min(available + swap, *[_free_of(group) + min(swap, _swap_of(group)) for group in _groups()])


def check_weights(weights: int, free: int, where: str, adapters: int = 0) -> None:
    """Checks, before reading, that the weights fit: otherwise the system would kill this process without a message.

    Args:
        weights: bytes of the weights, as packed.
        free: bytes that are free for them.
        where: the memory, for the message.
        adapters: bytes among them of as many adapters as fit.

    Raises:
        MemoryError: they do not fit.
    """
    if weights > free:
        of_adapters = f", {gib(adapters)} of them for adapters" if adapters else ""
        fewer = "lower max_cpu_loras or max_lora_rank, " if adapters else ""
        raise MemoryError(
            f"the weights take {gib(weights)}{of_adapters}, and {gib(free)} of {where} are free for them: {fewer}serve "
            "a smaller model, store weights in fewer bits (on a CPU quantization int8 or int4; dtype bfloat16 instead "
            "of float32), or end what else uses the memory")


def give_back() -> None:
    """Return freed memory to the system, as far as the C library can: what loading and compiling freed."""
    with contextlib.suppress(AttributeError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Resident memory of this process in bytes, shared memory included; 0 where the system does not report it."""
    for line in Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else ():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def cache_budget(weights: int, workspace: int, asked: int | None, share: float | None, freed: int = 0) -> int:
    """Bytes the cache may take.

    Args:
        weights: bytes of the weights, already loaded.
        workspace: bytes of the largest step's activations.
        asked: bytes of cache, as set; None: decide.
        share: of all this process may take, for weights, workspace and cache together; None: decide.
        freed: bytes that will be free in addition to those that are.

    Raises:
        MemoryError: it does not fit.
    """
    free = available_bytes() + freed
    if asked is not None:
        budget = asked
    elif share is not None:
        budget = int((free + weights) * share) - weights - workspace
    else:
        budget = min(int(free * SHARE), free - workspace)
    if budget + workspace > free or budget < 1:
        raise MemoryError(
            f"a cache of {gib(max(budget, 0))} and {gib(workspace)} of workspace for a step do not fit the "
            f"{gib(max(free, 0))} that are free next to {gib(weights)} of weights: change kv_cache_memory or "
            "gpu_memory_utilization, "
            "or make steps smaller with max_num_batched_tokens (static batches: batch_size, max_model_len)")
    return budget


def gpu_cache_budget(free: int, total: int, workspace: int, asked: int | None, share: float | None) -> int:
    """Bytes of a GPU that the cache may take, with the weights already loaded.

    Args:
        free, total: bytes of the device.
        workspace: bytes that steps and their graphs take.
        asked: bytes of cache, as set; None: what is left of `share`.
        share: of the device, for everything on it; None: GPU_SHARE.

    Raises:
        MemoryError: it does not fit.
    """
    share = GPU_SHARE if share is None else share
    budget = asked if asked is not None else int(total * share) - (total - free) - workspace
    if budget < 1 or budget + workspace > free:
        raise MemoryError(
            f"a cache of {gib(max(budget, 0))} next to {gib(workspace)} for steps and graphs does not fit the GPU: "
            f"{gib(free)} of its {gib(total)} are free once the weights are loaded, and gpu_memory_utilization is "
            f"{share:g}: change it or kv_cache_memory, make steps smaller with max_num_batched_tokens or max_num_seqs, "
            "or end what else uses the GPU")
    return budget


def num_blocks(bytes_per_block: int, useful_blocks: int, budget: int, *, is_capped: bool = True) -> int:
    """Blocks the cache gets.

    Args:
        bytes_per_block: over all layers.
        useful_blocks: the most that requests can hold at once.
        budget: bytes.
        is_capped: blocks beyond those are of no use.

    Raises:
        MemoryError: not even one block fits.
    """
    blocks = budget // bytes_per_block
    if is_capped:
        blocks = min(blocks, useful_blocks)
    if blocks < 1:
        raise MemoryError(
            f"a cache of {budget:,} bytes holds no block: raise kv_cache_memory to at least the {bytes_per_block:,} "
            f"bytes of one; the slots can use {useful_blocks * bytes_per_block:,}")
    return blocks


def num_host_blocks(bytes_per_block: int, asked: int, others: int) -> int:
    """Blocks in the host-memory tier of the cache.

    Args:
        bytes_per_block: over all layers.
        asked: bytes of host memory, as set.
        others: bytes of it that are about to be allocated for other uses.

    Raises:
        MemoryError: they do not fit.
    """
    free = max(0, available_bytes() - others)
    if asked > free:
        raise MemoryError(
            f"{gib(asked)} of host memory for blocks do not fit the {gib(free)} that are free: lower "
            "kv_offloading_size")
    return asked // bytes_per_block


def gib(count: int) -> str:
    """Bytes as text, in MiB where GiB would have no digit left."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _machine_available() -> int:
    available = _meminfo("MemAvailable")
    return _guess() if available is None else available


def _guess() -> int:
    """A modest guess of free memory on systems without /proc: half of the memory, if known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError):
        return 4 << 30


def _meminfo(name: str) -> int | None:
    """Bytes of an entry of the machine's memory statistics; None: there is none."""
    for line in _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _groups() -> list[Path]:
    """The control group of this process and its visible ancestors: a container sees its own root."""
    try:
        named = [line.removeprefix("0::") for line in _MEMBERSHIP.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        named = []
    parts = [part for part in (named[0] if named else "/").split("/") if part]
    if ".." in parts:  # a group outside of what can be seen
        parts = []
    return [_CGROUP.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _free_of(group: Path) -> int:
    """Bytes that a control group may still take."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return UNLIMITED
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return UNLIMITED  # no memory control group
    files = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))  # page cache: reclaimed on demand
    return max(0, int(limit) - used + files)


def _swap_of(group: Path) -> int:
    """Bytes that a control group may still swap out."""
    try:
        limit = (group / "memory.swap.max").read_text().strip()
        used = int((group / "memory.swap.current").read_text())
        return UNLIMITED if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return UNLIMITED  # no control of swap: the machine's is the bound


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
    """Bytes of the device that one captured decode step takes, in addition to the workspace that they share.

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
    """Bytes of a device in use outside torch: by graphs, kernels, libraries and other processes."""
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
