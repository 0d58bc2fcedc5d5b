"""Owns the tokens that a model's weights are rounded for: the model writes them itself, and is then packed again.

Rounding to few bits costs less where it is known which inputs are large, and which ones move together
(`compute/kernels/cpu/products/quantize.py`).  Published methods take that from a text; but a text has a language and a
subject, and must not be the one by which the result is judged.  Tokens that the model samples need no text and suit
every model: Williams, Chrysostomou and Aletras, "Self-calibration for language model quantization and pruning", 2025.

    read in int8, recording    ->  ROWS sequences of LENGTH tokens, sampled by the model  ->  moments of all inputs
    read again in few bits         with these moments

The second read is the one that is served.  Both are needed, because a matrix is rounded as soon as it is read; int8
takes at most twice the memory of the result, and is freed before.

Where the inputs of products are rounded, a few random tokens show where these are centered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from slotwise.compute.kernels.interface import RaggedBatch
from slotwise.compute.model.decoder import Decoder, DecoderSizes, HeadStage

if TYPE_CHECKING:
    from slotwise.compute.kernels.cpu.products.packing import Packing

ROWS, LENGTH = 128, 64
CENTERED_ROWS, CENTERED_LENGTH = 4, 16
SEED = 1


def read_calibrated(packing: Packing, read: Callable[[], Decoder], advance: Callable[[int, int], None]) -> Decoder:
    """`read()`, with weights rounded for the inputs that they will have.

    Args:
        packing: of the kernels of the model that `read` returns.
        advance: is told of the positions sampled so far, and of their number.
    """
    with packing.recording() as moments:
        decoder = read()
        write(decoder, advance)
        del decoder
    with packing.compensating(moments):
        return read()


@torch.inference_mode()
def center(decoder: Decoder, packing: Packing, max_positions: int) -> None:
    """Centers the inputs of products (`Packing.centering`) by what random tokens give them; the same at every call.

    All ranks of a model do so at the same time.

    Args:
        max_positions: of a sequence.
    """
    config, stage = decoder.config, decoder.group.pipe.stage
    if config.quantization is None and not packing.quantizes:
        return
    length = min(CENTERED_LENGTH, max_positions, config.max_position_embeddings)
    caches = [decoder.kernels.allocate_cache(CENTERED_ROWS, LENGTH, shape, config.dtype)
              for shape in decoder.layer_shapes]
    tokens = torch.randint(config.vocab_size, (length, CENTERED_ROWS), generator=_draw())
    is_alone = stage.total == decoder.group.size == 1
    with packing.centering():
        for some in [tokens] if is_alone else tokens.split(1, dim=1):  # what ranks exchange has a bound
            batch = _step(some, 0)
            hidden = decoder.hidden(batch, caches)
            if stage.is_first:
                hidden = hidden if stage.total == 1 else HeadStage(decoder).hidden(batch, [])
                for rows in hidden.split(CENTERED_LENGTH) if config.has_head else ():  # logits take most memory
                    decoder.logits(rows)


def needed_bytes(sizes: DecoderSizes) -> int:
    """Bytes of memory that `write` needs, the weights included."""
    caches = [sizes.kernels.cache_bytes_per_block(LENGTH, shape, sizes.config.dtype) for shape in sizes.layer_shapes]
    return sizes.weight_bytes + ROWS * sum(caches) + sizes.workspace_bytes(ROWS, ROWS)


def _draw() -> torch.Generator:
    """Returns a generator that draws the same numbers at every call.

    An engine's process imports torch without what torch needs to make a new one (`lazy_imports`), and copies one.
    """
    return torch.default_generator.clone_state().manual_seed(SEED)


@torch.inference_mode()
def write(decoder: Decoder, advance: Callable[[int, int], None]) -> torch.Tensor:
    """Runs the decoder over `ROWS` sequences, `[positions, ROWS]` int64, and returns them; the same at every call.

    Their first tokens are random, and the others are sampled at temperature 1; a model that does not generate reads
    random tokens.
    """
    config, draw = decoder.config, _draw()
    length = min(LENGTH, config.max_position_embeddings)
    caches = [decoder.kernels.allocate_cache(ROWS, LENGTH, shape, config.dtype) for shape in decoder.layer_shapes]
    if not (config.is_causal and config.has_head):
        tokens = torch.randint(config.vocab_size, (length, ROWS), generator=draw)
        decoder.hidden(_step(tokens, 0), caches)
        return tokens
    written = torch.randint(config.vocab_size, (1, ROWS), generator=draw)
    for position in range(length):
        advance(position, length)
        logits = decoder.logits(decoder.hidden(_step(written[position:], position), caches))
        sums = logits.float().softmax(-1).cumsum(-1)  # one random number a row; torch.multinomial draws one a token
        drawn = torch.searchsorted(sums, torch.rand(ROWS, 1, generator=draw) * sums[:, -1:])
        written = torch.cat((written, drawn.clamp_max(config.vocab_size - 1).t()))
    advance(length, length)
    return written[:length]


def _step(tokens: torch.Tensor, first: int) -> RaggedBatch:
    """The tokens `[positions, sequences]` of all sequences from a position on; each has a block of the cache."""
    count, rows = len(tokens), torch.arange(tokens.shape[1])
    positions = torch.arange(first, first + count).repeat(len(rows))
    return RaggedBatch(
        token_ids=tokens.t().flatten(), positions=positions,
        slot_mapping=rows.repeat_interleave(count) * LENGTH + positions,
        query_starts=torch.arange(0, len(positions) + 1, count, dtype=torch.int32),
        context_lens=torch.full((len(rows),), first + count, dtype=torch.int32), block_tables=rows[:, None].int(),
        sample_at=torch.arange(len(positions)), max_query_len=count, max_context_len=first + count)
