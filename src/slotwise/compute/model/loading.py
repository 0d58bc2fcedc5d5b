"""Loads a decoder: reads the config of a checkpoint, checks its files against it, and packs the weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from slotwise.compute.kernels.group import SINGLE_RANK, Group, PipelineStage, UnconnectedRank
from slotwise.compute.kernels.interface import Kernels, StateShape
from slotwise.compute.kernels.matrix import Format, Weight
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.checkpoint import CONFIG, locate
from slotwise.compute.model.decoder import Decoder, DecoderSizes
from slotwise.compute.model.family_table import adaptable, compose, configure, family_of, tensor_shapes
from slotwise.compute.model.fields import read_json
from slotwise.compute.model.generation_config import read_generation
from slotwise.compute.model.gguf.gguf_config import read_gguf_config
from slotwise.compute.model.layers.embedding_and_head import HEAD, HEAD_ACTIVATIONS, TABLE
from slotwise.compute.model.layers.rank_weights import NO_CUTS, Listing
from slotwise.compute.model.lora_weights import AdaptableProduct, LoraWeights
from slotwise.compute.model.model_config import OF_TOKENIZER, ModelConfig
from slotwise.compute.model.sentence_modules import DenseFields, read_modules, read_separator
from slotwise.compute.model.stored_tensors import Cuts
from slotwise.compute.model.weights import CheckpointWeights, Progress
from slotwise.errors import CheckpointError


def read_config(checkpoint: Path, generation: Path | None = None) -> ModelConfig:
    """The config of a folder or a GGUF file, with the further end tokens of its generation_config.json.

    `generation` is a generation_config.json to be read instead of the checkpoint's.

    Raises CheckpointError when the config is missing, malformed or describes an unsupported model, and for the other
    file when it is malformed or, given as `generation`, missing.
    """
    if checkpoint.is_file():
        config = read_gguf_config(checkpoint)
    else:
        config = replace(configure(read_json(checkpoint / CONFIG)), dense=_dense_modules(checkpoint),
                         max_seq_length=read_modules(checkpoint).max_seq_length)
        if config.separator == OF_TOKENIZER:
            config = replace(config, separator=read_separator(checkpoint))
    return _ending(config, read_generation(checkpoint, generation).token_ids("eos_token_id"))


def _dense_modules(folder: Path) -> tuple[DenseFields, ...]:
    """The products that vectors pass.  Raises CheckpointError for one that is not supported."""
    modules = read_modules(folder).dense
    for module in modules:
        if module.activation not in HEAD_ACTIVATIONS:
            raise CheckpointError(f"{folder / module.folder}: activation_function {module.activation:.40} is not "
                                  f"supported: {', '.join(filter(None, HEAD_ACTIVATIONS))} are")
    return modules


def _ending(config: ModelConfig, more: tuple[int, ...]) -> ModelConfig:
    """Add `more` end tokens, except duplicates and ids outside the vocabulary."""
    ends = dict.fromkeys(config.eos_token_ids + more)
    return replace(config, eos_token_ids=tuple([token for token in ends if token < config.vocab_size]))


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

UNREAD = "k_proj", "v_proj", "k_norm", "v_norm"  # of layers that read the keys and values of others

logger = logging.getLogger(__name__)


def load_model(
    model: str | Path, *, kernels: Kernels, dtype: str = "auto", max_positions: int | None = None,
    progress: Progress | None = None, adapters: tuple[int, int] | None = None, group: Group = SINGLE_RANK,
) -> Decoder:
    """Load a checkpoint: a folder, a GGUF file, or a hub id.

    `dtype` is one of `DTYPES`, or `auto`: as stored.  float16 becomes bfloat16 where the kernels do not compute in it,
    which a warning says; the decoder's `config.dtype` is the result.  The other arguments are those of
    `UnreadModel` and its `read`.

    Raises CheckpointError, with one line that says what to do, for any fault of the checkpoint.
    """
    folder = locate(model)
    unread = UnreadModel(folder, describe(folder, dtype, kernels), dtype, kernels, group, adapters)
    return unread.read(max_positions, progress)


class UnreadModel:
    """A checkpoint whose files have all that its config asks for, in the right shapes and types; no weight is read.

    Args:
        described: its config, as `describe` has it for these kernels and this `dtype`.
        group: of the rank that holds the model, or a part of it.
        adapters: how many may be loaded, and their largest rank.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing or not as the config says.
    """

    def __init__(
        self, folder: Path, described: ModelConfig, dtype: str, kernels: Kernels, group: Group = SINGLE_RANK,
        adapters: tuple[int, int] | None = None,
    ) -> None:
        self._kernels, self._group, self._adapters = kernels, group, adapters
        self._weights = weights = CheckpointWeights(folder, [module.folder for module in described.dense])
        weights.transpose(family_of(described).transposed)
        config = _with_stored_head(described, weights, folder)
        generates = config.is_causal and config.has_head and not config.num_labels
        self.config = config = replace(
            config, has_head=generates and (config.tie_word_embeddings or not weights.lack_head))
        weights.leave_out([f"model.layers.{layer}.self_attn.{part}." for layer, read in enumerate(config.kv_layers)
                           if layer != read for part in UNREAD])
        self._wanted, self._shapes = tensor_shapes(config, group), tensor_shapes(config)
        weights.assemble(config.quantization, self._shapes)
        weights.check(self._shapes)
        if torch.float16 not in kernels.kinds:
            _tell_of_float16(dtype, config, weights, kernels)
        _widen(weights, weights.formats(self._shapes), kernels, config.dtype, folder)
        self._formats = weights.formats(self._shapes)

    @property
    def sizes(self) -> DecoderSizes:
        """What the decoder will take.  Raises CheckpointError for a model whose products adapters cannot change."""
        config, group = self.config, self._group
        adapters = self._loadable(ReferenceKernels())
        network = compose(config, Listing(config.dtype, self._kernels, self._formats, group, adapters))
        return DecoderSizes(config, self._kernels, network, adapters, group, self._formats)

    def read(self, max_positions: int | None = None, progress: Progress | None = None) -> Decoder:
        """Reads and packs the weights.

        `max_positions` (tokens) bounds the rotary table.

        Raises CheckpointError for weights that are not numbers.
        """
        config, kernels, group = self.config, self._kernels, self._group
        read = self._weights.reader(self._shapes, config.dtype, progress, self._wanted)
        device = kernels.device
        longest = config.max_position_embeddings

        def read_to_device(*names: str, cuts: Cuts = NO_CUTS, kind: torch.dtype = config.dtype) -> Weight:
            weight = read(*names, cuts=cuts, kind=kind)
            return weight.to(device) if isinstance(weight, torch.Tensor) else weight  # kernels unpack to their device

        return Decoder(config, read_to_device, kernels, min(max_positions or longest, longest), self._loadable(kernels),
                       group, self._formats)

    def _loadable(self, kernels: Kernels) -> LoraWeights | None:
        """Places for adapters; None: there are none."""
        config, asked = self.config, self._adapters
        return asked and LoraWeights(kernels, *asked, config.dtype, _elsewhere(config, self._group))


def _elsewhere(config: ModelConfig, group: Group) -> list[AdaptableProduct]:
    """The products of other stages that adapters may change."""
    own = group.pipe.stage
    stages = [PipelineStage(number, own.total) for number in range(own.total) if number != own.number]
    return [product for stage in stages for product in adaptable(config, UnconnectedRank(group.size, stage))]


def _widen(
    weights: CheckpointWeights, formats: Mapping[str, Format], kernels: Kernels, dtype: torch.dtype, folder: Path,
) -> None:
    """Reads 8-bit floats as plain numbers, with a warning, where the kernels have no products with them.

    Raises CheckpointError for other formats that the kernels do not support.
    """
    refused = {kind: why for kind in dict.fromkeys(formats.values()) if (why := kernels.format_refusal(kind, dtype))}
    for kind, why in refused.items():
        if not kind.are_floats:
            raise CheckpointError(f"{folder}: {why}")
    if refused:
        logger.warning("%s: weights in FP8 are widened as they are read, to at least twice the memory: %s", folder,
                       next(iter(refused.values())))
        weights.widen([name for name, kind in formats.items() if kind in refused])


def _with_stored_head(config: ModelConfig, weights: CheckpointWeights, folder: Path) -> ModelConfig:
    """A config that ties a head which the file stores, and differently, unties it: as transformers, with a warning."""
    tied = config.tie_word_embeddings and weights.holds(HEAD) and weights.holds(TABLE)
    if not tied or weights.are_equal(HEAD, TABLE, config.dtype):
        return config
    logger.warning("%s: config.json ties the head to the embedding (tie_word_embeddings), but %s is stored and differs "
                   "from %s: the stored head is used", folder, HEAD, TABLE)
    return replace(config, tie_word_embeddings=False)


def describe(folder: Path, dtype: str, kernels: Kernels, generation: Path | None = None) -> ModelConfig:
    """A checkpoint's config, with the `dtype` that the weights will be loaded as for these kernels.

    Raises CheckpointError when the config is missing, malformed or describes a model that is unsupported, in general
    or by these kernels.
    """
    config = read_config(folder, generation)
    for shape in dict.fromkeys(map(config.layer_shape, range(config.num_layers))):
        refusal = kernels.state_refusal if isinstance(shape, StateShape) else kernels.refusal(shape)
        if refusal:
            raise CheckpointError(f"{folder}: {refusal}")
    if config.mixture and kernels.mixture_refusal:
        raise CheckpointError(f"{folder}: {kernels.mixture_refusal}")
    return replace(config, dtype=_resolve(dtype, config.dtype, kernels))


def _resolve(asked: str, stored: torch.dtype, kernels: Kernels) -> torch.dtype:
    if asked != "auto" and asked not in DTYPES:
        raise CheckpointError(f"dtype must be auto, {' or '.join(DTYPES)}, not {asked!r:.40}")
    wanted = DTYPES.get(asked, stored)
    return wanted if wanted in kernels.kinds else torch.bfloat16 if wanted.itemsize == 2 else torch.float32


def _tell_of_float16(asked: str, config: ModelConfig, weights: CheckpointWeights, kernels: Kernels) -> None:
    """Warn, for kernels without float16, where it is asked for, or stored and to be rounded."""
    if asked == "float16" or (asked == "auto" and config.dtype == torch.bfloat16 and weights.are_stored_as("F16")):
        logger.warning("device %s computes in bfloat16 and not in float16: weights stored in float16 are rounded, from "
                       "11 significant bits to 8 (dtype float32 keeps them, in twice the memory)", kernels.name)
