"""LoRA adapters (Hu et al., 2021): their files, the products that they may change, and the adapters in memory.

    layers   Linear ─► LoraWeights.register   its parts by their names in the checkpoint
    load     an adapter's file ─► checked ─► factors of each product, packed in host memory
    step     place of each row's adapter ─► AdapterProducts.assign

Files are in the format of Hugging Face's PEFT: `adapter_config.json`, and `adapter_model.safetensors` with
`base_model.model.NAME.lora_A.weight [rank, inputs]`, `.lora_B.weight [outputs, rank]`, a trained bias `NAME.bias` and,
with `lora_bias`, `.lora_B.bias`.  A field of the config that asks for something else is an error that names it.

A file is read whole, and never mapped: adapters are loaded while others serve, and one that its writer truncates in the
meantime must fail alone.  What is parsed at once is bounded, because no step runs during that time.

A rank of several loads its part of an adapter's factors, as it holds its part of the product: the outputs of `b`, or
the inputs of `a`, whose terms are summed with the product itself.

An adapter gets a *place*, where kernels find its factors, with its first row.  So `load` changes nothing that a step
reads, and may run on another thread during steps; the other methods belong to the thread of the steps.
"""

from __future__ import annotations

import errno
import hashlib
import io
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import AddedProduct, Kernels, LowRank, LowRankPart, PackedFactors
from slotwise.compute.model.checkpoint import ADAPTER
from slotwise.compute.model.fields import Fields, read_json
from slotwise.compute.model.names import canonical
from slotwise.compute.model.stored_tensors import WHOLE, Cuts, TableEntry, damaged, read_table
from slotwise.errors import CheckpointError
from slotwise.platform.files import read_part

FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTORS = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_B.bias": "added", ".base_layer.bias": "bias",
           ".bias": "bias"}
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_TABLE = 2 << 20  # bytes: some 15,000 tensors
MAX_CONFIG = 1 << 20  # bytes
MAX_PATTERNS = 4096

FREE = {  # fields without effect, or read below
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "r",
    "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "lora_bias", "lora_dropout", "task_type",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "runtime_config",
    "qalora_group_size", "fan_in_fan_out", "ensure_weight_tying", "init_lora_weights", "megatron_core", "eva_config",
}
INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # values that leave the base weights unchanged
NEUTRAL: tuple[object, ...] = (None, False, {}, [], "")


class AdapterTensor(NamedTuple):
    """A tensor in the bytes of a file."""

    data: bytes
    entry: TableEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    def values(self) -> Tensor:
        """Its numbers in memory of their own, as float32."""
        first, number = self.entry.at, math.prod(self.shape)
        raw = bytearray(self.data[first : first + self.entry.nbytes])
        return torch.frombuffer(raw, dtype=DENSE[self.entry.kind], count=number).float().reshape(self.shape)


class PeftAdapter(NamedTuple):
    """An adapter's config, checked, and the tensors of its file by product and by sort (`FACTORS`)."""

    where: str
    alpha: float
    alphas: dict[str, float]  # by the end of a product's name
    is_rank_stabilized: bool
    tensors: dict[str, dict[str, AdapterTensor]]

    def scale(self, name: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski, 2023)."""
        alpha = next((value for key, value in self.alphas.items() if f".{name}".endswith(f".{key}")), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_adapter(folder: Path, most: int) -> PeftAdapter:
    """Reads an adapter's config and its file, of at most `most` bytes in addition to its table.

    Raises CheckpointError, with one line, for what is missing, damaged or not supported.
    """
    if not (folder / ADAPTER).is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER}: it is not a LoRA adapter in the format of PEFT")
    fields = read_json(folder / ADAPTER, MAX_CONFIG)
    _check_config(fields)
    if not (folder / FILE).is_file():
        raise CheckpointError(f"{folder} has no {FILE}: adapters are read from safetensors only")
    patterns = fields.section("alpha_pattern")
    if len(patterns.values) > MAX_PATTERNS:
        raise fields.error("alpha_pattern", f"may have at most {MAX_PATTERNS} entries")
    for key in patterns.values:
        if not all(part.replace("_", "a").isalnum() for part in key.split(".")):
            raise fields.error("alpha_pattern", f"has {key!r:.60}: only names of modules are supported")
    return PeftAdapter(
        str(folder), fields.number("lora_alpha"), {canonical(key): patterns.number(key) for key in patterns.values},
        fields.flag("use_rslora"), _tensors(folder / FILE, most))


def _check_config(fields: Fields) -> None:
    """Raises CheckpointError for a config that asks for something else than LoRA."""
    if fields.text("peft_type") != "LORA":
        raise fields.error("peft_type", f"must be LORA, not {fields.text('peft_type')!r:.40}")
    fields.integer("r")
    if fields.text("bias", default="none") not in ("none", "all", "lora_only"):
        raise fields.error("bias", f"must be none, all or lora_only, not {fields.text('bias')!r:.40}")
    if (init := fields.values.get("init_lora_weights")) not in INITS:
        raise fields.error("init_lora_weights", f"{init!r:.40} is not supported: it changes the base weights")
    for name, value in fields.values.items():
        if name not in FREE and value not in NEUTRAL:
            raise fields.error(name, f"{value!r:.40} is not supported")


def _read_file(path: Path, most: int) -> tuple[bytes, dict[str, TableEntry]]:
    """The bytes of a file, and its table."""
    try:
        data = read_part(path, most + MAX_TABLE)
        return data, read_table(io.BytesIO(data), len(data), MAX_TABLE)
    except OSError as error:
        hint = ", the most that an adapter of max_lora_rank has for this model" * (error.errno == errno.EFBIG)
        raise CheckpointError(f"cannot read {path}: {error.strerror}{hint}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(path, error) from error


def _tensors(path: Path, most: int) -> dict[str, dict[str, AdapterTensor]]:
    data, table = _read_file(path, most)
    found: dict[str, dict[str, AdapterTensor]] = {}
    for name, entry in table.items():
        kind = entry.kind
        ending = next((each for each in FACTORS if name.endswith(each)), None)
        if ending is None or not name.startswith(PREFIX):
            raise CheckpointError(f"{path}: {name!r:.120} is not supported: it is neither a factor nor a bias of a "
                                  "product")
        if kind not in DENSE:
            raise CheckpointError(f"{path}: {name:.120} is stored as {kind:.20}; supported are {', '.join(DENSE)}")
        if entry.nbytes != math.prod(entry.shape) * DENSE[kind].itemsize:
            raise damaged(path, ValueError(f"{name:.120} has {entry.nbytes} bytes for {list(entry.shape)}"))
        module, sort = canonical(name[len(PREFIX) : -len(ending)]), FACTORS[ending]
        if sort in found.setdefault(module, {}):
            raise CheckpointError(f"{path}: {name:.120} is there twice, under names that mean the same")
        found[module][sort] = AdapterTensor(data, entry)
    if not found:
        raise CheckpointError(f"{path} holds no tensors")
    return found


WHOLE_RANKS = 16  # to which packed factors are filled up


@dataclass(frozen=True, slots=True)
class AdaptableProduct:
    """A product that adapters may change.

    Args:
        parts: outputs of each weight, by its name in the checkpoint.
        cuts: the part of each weight that this rank holds.
        order: the output of all parts together at each place, of some or all of them; None: as in the checkpoint.
        bias: the base model's, `[outputs]` as packed; None: it has none.
        adds_biases: this rank does; of those whose results are summed, one does.

    Raises ValueError for an `order` that scatters the outputs of a part: adapters add to ranges.
    """

    parts: Mapping[str, int]
    inputs: int
    cuts: Cuts
    order: Tensor | None
    bias: Tensor | None
    adds_biases: bool

    def __post_init__(self) -> None:
        for name, places in self.places.items():
            if len(places) and int(places[-1] - places[0]) + 1 != len(places):
                raise ValueError(f"the outputs of {name} are not next to each other")

    @property
    def outputs(self) -> int:
        """Outputs of the product on this rank."""
        return sum(outputs for outputs, _ in self.kept.values()) if self.order is None else len(self.order)

    @property
    def places(self) -> dict[str, Tensor]:
        """Where the outputs of each weight are, `[places]` int64, in their order; a weight may have none here."""
        first, places = 0, {}
        for name, (kept, _) in self.kept.items():
            end = first + kept
            places[name] = torch.arange(first, end) if self.order is None else (
                (self.order >= first) & (self.order < end)).nonzero().flatten()
            first = end
        return places

    @property
    def kept(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of this rank's part of each weight."""
        sizes = {name: self.cuts.get(name, WHOLE).size((outputs, self.inputs)) for name, outputs in self.parts.items()}
        return {name: (outputs, inputs) for name, (outputs, inputs) in sizes.items()}


class LoraWeights:
    """The adapters of a model: loads and forgets them, under numbers that are never reused.

    Args:
        num_places: adapters in memory at the same time.
        max_rank: of an adapter's factors.
        elsewhere: products of the model's other stages.
    """

    def __init__(self, kernels: Kernels, num_places: int, max_rank: int, kind: torch.dtype,
                 elsewhere: Sequence[AdaptableProduct] = ()) -> None:
        self.rows = kernels.adapters(num_places, max_rank, kind)
        self.max_rank = max_rank
        self._kind = kind
        self.products: list[AdaptableProduct] = []
        self._added: list[AddedProduct] = []  # to each of them
        self._elsewhere = elsewhere
        self.num_places = num_places
        self._loading = threading.Lock()  # one adapter is loaded at a time
        self._loaded: dict[int, str] = {}  # digests of what was read, by number
        # The factors of each product, of adapters without a place.
        self._unplaced: dict[int, list[PackedFactors | None]] = {}
        self._places: dict[int, int] = {}  # by number
        self._free = list(range(num_places))

    @property
    def bytes(self) -> int:
        """The most bytes of all adapters that fit, as packed, on this rank."""
        return self._packed_bytes(self.products)

    @property
    def bytes_of_stages(self) -> int:
        """The same on a rank of every stage together."""
        return self._packed_bytes([*self.products, *self._elsewhere])

    def _packed_bytes(self, products: Sequence[AdaptableProduct]) -> int:
        ranks = -(-self.max_rank // WHOLE_RANKS) * WHOLE_RANKS
        numbers = sum(sum(size) for product in products for size in product.kept.values())
        return self.num_places * numbers * ranks * self._kind.itemsize

    @property
    def _most_bytes(self) -> int:
        """Bytes of the largest adapter's file, of float32, without its table."""
        numbers = 0
        for product in (*self.products, *self._elsewhere):
            outputs = sum(product.parts.values())
            numbers += self.max_rank * (len(product.parts) * product.inputs + outputs) + 2 * outputs  # and biases
        return numbers * torch.float32.itemsize

    @property
    def is_full(self) -> bool:
        return len(self._loaded) >= self.num_places

    def register(self, product: AdaptableProduct) -> AddedProduct:
        """Returns what adapters add to a product."""
        sizes = [*product.kept.values()]
        added = self.rows.product(product.outputs, sizes[0][1], len(sizes))
        self.products.append(product)
        self._added.append(added)
        return added

    def place(self, number: int) -> int:
        """The place of a loaded adapter, which has one from now on."""
        if number not in self._places:
            place = self._places[number] = self._free.pop()
            for added, packed in zip(self._added, self._unplaced.pop(number), strict=True):
                added.set(place, packed)
        return self._places[number]

    def load(self, number: int, folder: Path) -> None:
        """Read and pack an adapter.

        Raises CheckpointError, with one line, when it cannot be read, does not fit this model, or is one too many.
        """
        with self._loading:
            if self.is_full:
                raise CheckpointError(f"{self.num_places} adapters are in memory, those included that unfinished "
                                      "requests still need, and max_cpu_loras allows no more: unload one")
            try:
                self._unplaced[number], self._loaded[number] = self._packed(folder)
            except MemoryError as error:
                raise CheckpointError(f"{folder} does not fit memory") from error

    def digest(self, number: int) -> str:
        """Returns a digest of the factors of a loaded adapter; "" if the adapter is not loaded."""
        return self._loaded.get(number, "")

    def unload(self, number: int) -> None:
        """Forget an adapter that no unfinished request uses."""
        del self._loaded[number]
        self._unplaced.pop(number, None)
        if (place := self._places.pop(number, None)) is not None:
            for added in self._added:
                added.set(place, None)
            self._free.append(place)

    def _packed(self, folder: Path) -> tuple[list[PackedFactors | None], str]:
        """An adapter's factors of each product, and a digest of all of them.

        Its files may be replaced while they are read, so the digest is one of the factors, not of the files.
        """
        adapter = read_adapter(folder, self._most_bytes)
        left = dict(adapter.tensors)
        packed, digest = [], hashlib.sha256()
        for product, added in zip(self.products, self._added, strict=True):
            for name in product.parts:  # which several products may have, each some of its outputs
                left.pop(name, None)
            factors = self._factors(product, adapter)
            _update(digest, factors)
            packed.append(None if factors is None else added.pack(factors))
        for product in self._elsewhere:
            for name in product.parts:
                left.pop(name, None)
        if left:
            raise CheckpointError(f"{folder} adapts {next(iter(left))!r:.120}, which this model does not have, or "
                                  "of which adapters are not supported")
        return packed, digest.hexdigest()

    def _factors(self, product: AdaptableProduct, adapter: PeftAdapter) -> LowRank | None:
        """An adapter's factors for this rank's part of one product."""
        first, parts, has_bias, biases = 0, [], False, torch.zeros(product.outputs)
        places = product.places
        for name, (kept, _) in product.kept.items():
            found, cut, outputs = adapter.tensors.get(name, {}), product.cuts.get(name, WHOLE), product.parts[name]
            own = places[name]
            rows = (own if product.order is None else product.order[own]) - first
            part = self._part(name, found, product.inputs, outputs, adapter)
            bias = cut.rows_of(self._bias(name, found, outputs, adapter))[rows]
            if "bias" in found and product.adds_biases:
                if product.bias is None:
                    raise CheckpointError(f"{adapter.where} has a bias of {name}, which has none in this model")
                bias = bias - product.bias[own].float()
            has_bias |= product.adds_biases and bool(found.keys() & {"added", "bias"})
            biases[own] = bias
            if found and len(own):
                parts.append(LowRankPart(int(own[0]), cut.columns_of(part.a), cut.rows_of(part.b)[rows]))
            first += kept
        if not parts:
            return None
        return LowRank(tuple(parts), biases if has_bias else None)

    def _bias(
        self, name: str, found: Mapping[str, AdapterTensor], outputs: int, adapter: PeftAdapter,
    ) -> Tensor:
        """An adapter's bias of one weight: that of its second factor, scaled, and the trained one."""
        bias = torch.zeros(outputs)
        if "added" in found:
            rank = found["a"].shape[0] if "a" in found else 1
            bias += self._read(name, found["added"], (outputs,), adapter) * adapter.scale(name, rank)
        if "bias" in found:
            bias += self._read(name, found["bias"], (outputs,), adapter)
        return bias

    def _part(
        self, name: str, found: Mapping[str, AdapterTensor], inputs: int, outputs: int, adapter: PeftAdapter,
    ) -> LowRankPart:
        """The factors of one weight, scaled; of rank 0 where there are none."""
        if "a" not in found and "b" not in found:
            if "added" in found:
                raise CheckpointError(f"{adapter.where} has a bias of lora_B of {name} and no factors")
            return LowRankPart(0, torch.zeros(0, inputs), torch.zeros(outputs, 0))
        if "a" not in found or "b" not in found:
            raise CheckpointError(f"{adapter.where} has one factor of {name} and not the other")
        rank = found["a"].shape[0] if found["a"].shape else 0
        if not 1 <= rank <= self.max_rank:
            raise CheckpointError(f"{adapter.where} has rank {rank} in {name}; the most is max_lora_rank "
                                  f"{self.max_rank}")
        a = self._read(name, found["a"], (rank, inputs), adapter)
        b = self._read(name, found["b"], (outputs, rank), adapter)
        return LowRankPart(0, a, b * adapter.scale(name, rank))

    def _read(
        self, name: str, tensor: AdapterTensor, shape: tuple[int, ...], adapter: PeftAdapter,
    ) -> Tensor:
        """A tensor of the file as float32, checked before it is read."""
        if tensor.shape != shape:
            raise CheckpointError(f"{adapter.where}: a tensor of {name} is {list(tensor.shape)}; this model needs "
                                  f"{list(shape)}")
        values = tensor.values()
        if not bool(values.isfinite().all()):
            raise CheckpointError(f"{adapter.where}: a tensor of {name} holds numbers that are not finite")
        return values


def _update(digest: hashlib._Hash, factors: LowRank | None) -> None:
    """Updates a digest with an adapter's factors of a product."""
    tensors = [] if factors is None else [
        *(tensor for part in factors.parts for tensor in (part.a, part.b)),
        *([] if factors.bias is None else [factors.bias])]
    firsts = [] if factors is None else [part.first for part in factors.parts]
    digest.update(repr((firsts, [tuple(tensor.shape) for tensor in tensors])).encode())
    for tensor in tensors:
        digest.update(tensor.flatten().numpy().data)
