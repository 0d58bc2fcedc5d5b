"""Settings of an engine and their validation.  The one place where defaults are resolved.

Names are vLLM's where vLLM has the setting.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from slotwise.batching import settings as batching_settings
from slotwise.batching.settings import Batching
from slotwise.core.cache_groups import CacheGroups
from slotwise.core.limits import PRESSURES, RECOMPUTE, SchedulerLimits
from slotwise.core.settings import Range, real, whole
from slotwise.core.slo import Tier
from slotwise.engine.scheduling import Scheduling
from slotwise.errors import OneLineError
from slotwise.policies import settings as policy_settings
from slotwise.policies.settings import Ordering
from slotwise.speculation.settings import DRAFT_MODEL, Speculation
from slotwise.transfer.settings import HOW, KVTransferConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # vLLM's; a config has the longer ones
QUANTIZATIONS = ("none", "int8", "int4")  # besides none, those of kernels/cpu/quantize.py, which is not imported here
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
DEVICES = ("auto", "cpu", "cuda", "reference")
STEP_TOKENS = 512  # a chunk this long reaches most of the product rate on any device
STALL_MS = 70.0  # a gap that a reader does not notice; shorter ones need more steps, each of which reads all weights
WATERMARK = 100  # one block in so many stays free for running requests when another is admitted
MAX_PASSES = 16  # smaller requests that may start before one that waits for blocks
DAY = 86_400.0  # seconds
SLOTS = 1 << 16
MOST_RANKS = 16
TOKENS = 1 << 24  # of a sequence or a step
LEAST_TOKENS = 2  # of the longest sequence: a prompt's and an output's
BYTES = 1 << 50
ENGINE: dict[str, Range] = {  # the numbers of `EngineConfig`
    **batching_settings.RANGES,
    **policy_settings.RANGES,
    "max_model_len": whole(LEAST_TOKENS, TOKENS),
    "max_num_seqs": whole(1, SLOTS),
    "max_num_batched_tokens": whole(1, TOKENS),
    "max_step_ms": real(0.001, 3_600_000),
    "max_stall_ms": real(0, 3_600_000),
    "max_step_context": whole(0),
    "block_size": whole(1, 1 << 16),
    "kv_cache_memory": whole(1, BYTES),
    "gpu_memory_utilization": real(0.001, 1),
    "kv_offloading_size": real(0, (1 << 20) - 1),  # GiB
    "packed_weights_cache": real(0, (1 << 20) - 1),  # GiB
    "max_loras": whole(1, SLOTS),
    "max_lora_rank": whole(1, 4096),
    "max_cpu_loras": whole(1, 4096),
    "seed": whole(-(2**63), 2**63 - 1),
    "overlap": whole(0, 1),
    "tensor_parallel_size": whole(1, MOST_RANKS),
    "pipeline_parallel_size": whole(1, MOST_RANKS),
}
RETIRED = frozenset({"max_step_context"})  # accepted for one release, without effect

logger = logging.getLogger(__name__)


class ConfigError(OneLineError, ValueError):
    """Settings that are invalid or contradict each other; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings as given.  None means: decide from the model and the machine.

    Raises:
        ConfigError: a value out of range.
    """

    model: str  # a checkpoint's folder, a GGUF file, or a hub id
    device: str = "auto"
    dtype: str = "auto"  # the checkpoint's
    quantization: str = "none"  # type to which the weights of products are converted as they are loaded
    packed_weights_cache: float = 0.0  # GiB of disk for quantised weights as they are repacked; 0: none
    kv_cache_dtype: str = "auto"  # of keys and values: auto, as computed; int8 (CPU) or fp8 (GPU)
    batch_invariant: bool = False  # no start unless a request's tokens depend neither on its batch nor on its chunks
    max_model_len: int | None = None  # tokens of a sequence; None: the model's own, if the cache holds it
    max_num_seqs: int = 64  # slots
    max_num_batched_tokens: int | None = None  # of a step; None: by its time (compose/sizes.py), one for each slot
    batching: str = "continuous"  # how a batch is formed: see batching.settings, as for the next four
    prefill: str | None = None
    batch_size: int | None = None
    max_wait_ms: float | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"  # order of the queue: see policies.settings, as for the next six
    ageing: float | None = None
    preemption_gap: int | None = None
    length_quantile: float | None = None
    length_oracle: bool = False
    default_ttft_ms: float | None = None
    shed_late: bool = False
    max_step_ms: float | None = None  # milliseconds a step may take, as predicted; None: as long as its tokens take
    max_stall_ms: float = STALL_MS  # milliseconds prompts may delay decode rows, as predicted; 0: unbounded
    tiers: tuple[Tier, ...] = ()  # classes of service
    block_size: int | None = None  # tokens of a cache block; None: the best size for the device's kernels
    kv_cache_memory: int | None = None  # bytes; None: what the slots can use, within a share of free memory
    gpu_memory_utilization: float | None = None  # share of all memory for weights, workspace and cache; None: decide
    enable_prefix_caching: bool = True  # shared prefixes of requests are computed once
    kv_offloading_size: float = 0.0  # GiB of host memory for blocks that the cache evicts, to be copied back; 0: none
    on_pressure: str = RECOMPUTE  # what happens to a victim when blocks run out: recomputed later, or ended in "error"
    generation_config: str = "auto"  # whose end tokens count: auto or vllm, the checkpoint's; else a file or its folder
    speculative_config: Speculation | None = None  # drafts of decoding rows, or a mapping of its fields; None: none
    enable_lora: bool = False  # requests may name adapters (docs/lora.md), as the next three say
    max_loras: int = 1  # adapters among the rows of a step
    max_lora_rank: int = 16
    max_cpu_loras: int = 16  # adapters in memory
    seed: int = 0  # of the requests without one
    overlap: int | None = None  # steps in flight while the next is planned, 0 or 1; None: 1 where a GPU computes
    tensor_parallel_size: int = 1  # processes of this host that share every layer (docs/parallel.md)
    pipeline_parallel_size: int = 1  # stages that the layers are divided into, each of so many processes
    kv_transfer_config: KVTransferConfig | None = None  # prompts travel to or from other engines; None: they do not
    enable_expert_parallel: bool = False  # a rank holds some experts whole, in place of a share of each

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):
            try:
                object.__setattr__(self, "speculative_config", Speculation.of(self.speculative_config))
            except ValueError as error:
                raise ConfigError(f"speculative_config: {error}") from error
        self._check_kinds()
        object.__setattr__(self, "dtype", DTYPE_NAMES.get(self.dtype, self.dtype))
        if self.device not in DEVICES:
            raise ConfigError(f"device must be one of {', '.join(DEVICES)}, not {self.device!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, not {self.quantization!r}")
        if self.quantization != "none" and self.device == "reference":
            raise ConfigError(f"quantization {self.quantization} needs device cpu: the reference computes exactly")
        if self.quantization != "none" and self.device == "cuda":
            raise ConfigError(f"quantization {self.quantization} needs device cpu, not cuda")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, not {self.kv_cache_dtype!r}")
        try:
            self.scheduling()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.gpu_memory_utilization is not None and self.kv_cache_memory is not None:
            raise ConfigError("kv_cache_memory and gpu_memory_utilization both size the cache: give one of them")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError("kv_offloading_size needs enable_prefix_caching: who comes back finds its blocks by it")
        if self.num_ranks > 1:
            self._check_ranks()
        if self.kv_transfer_config is not None:
            self._check_transfers(self.kv_transfer_config)
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError("enable_expert_parallel divides experts over tensor_parallel_size ranks: give 2 or more")
        if self.enable_lora and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras {self.max_cpu_loras} must be at least max_loras {self.max_loras}")
        if self.on_pressure not in PRESSURES:
            raise ConfigError(f"on_pressure must be one of {', '.join(PRESSURES)}, not {self.on_pressure!r}")

    def _check_transfers(self, transfer: KVTransferConfig) -> None:
        """Raises ConfigError for what is not supported beside transfers."""
        drafts = self.speculative_config
        for name, is_set in (("several ranks", self.num_ranks > 1), ("enable_lora", self.enable_lora),
                             ("a draft model", drafts is not None and drafts.method == DRAFT_MODEL),
                             (f"batching {self.batching}", self.batching != "continuous")):
            if is_set:
                raise ConfigError(f"kv_transfer_config is not supported with {name}: leave one of them out")
        if not transfer.secret:
            raise ConfigError(f"kv_transfer_config needs a secret that its peers have, too: {HOW}")

    def _check_ranks(self) -> None:
        """Raises ConfigError for what is not supported with several ranks."""
        for name in ("overlap", "kv_offloading_size", "packed_weights_cache"):
            if getattr(self, name):
                raise ConfigError(f"{name} is not supported with {self._ranks}: leave one of them out")
        if self.num_ranks > MOST_RANKS:
            raise ConfigError(f"{self._ranks} are {self.num_ranks} processes: at most {MOST_RANKS} are supported")

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def _ranks(self) -> str:
        """The settings of ranks, as text."""
        sizes = {name: getattr(self, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        return " and ".join([f"{name} {size}" for name, size in sizes.items() if size > 1])

    def _check_kinds(self) -> None:
        """Raises ConfigError for a number out of range or a value of the wrong type."""
        for field in fields(self):
            value, name = getattr(self, field.name), field.name
            if name in ENGINE:
                wrong = "" if value is None and field.default is None else ENGINE[name].objection(value)
            elif isinstance(field.default, bool):
                wrong = "" if isinstance(value, bool) else f"must be true or false, not {value!r:.40}"
            elif name == "speculative_config":
                wrong = "" if value is None or isinstance(value, Speculation) else f"must be a dict, not {value!r:.40}"
            elif name == "kv_transfer_config":
                good = value is None or isinstance(value, KVTransferConfig)
                wrong = "" if good else f"must be a KVTransferConfig, not {value!r:.40}"
            elif name == "tiers":
                good = isinstance(value, (tuple, list)) and all(isinstance(tier, Tier) for tier in value)
                wrong = "" if good else f"must be a tuple of tiers, not {value!r:.40}"
            else:
                good = isinstance(value, str) or (value is None and field.default is None)
                wrong = "" if good else f"must be a text, not {value!r:.40}"
            if wrong:
                raise ConfigError(f"{name} {wrong}")

    @classmethod
    def of(cls, **settings: object) -> EngineConfig:
        """Returns the configuration; drops RETIRED settings with a warning.  Raises ConfigError for an unknown name."""
        known = [field.name for field in fields(cls)]
        for name in RETIRED & settings.keys():
            if settings.pop(name):
                logger.warning("%s has no effect any more: prompts are cut by max_stall_ms and max_step_ms", name)
        for name in settings:
            if name not in known:
                raise ConfigError(f"there is no setting {name!r}; there are {', '.join(known)}")
        return cls(**settings)  # type: ignore[arg-type]

    def sized(self, step_tokens: int) -> EngineConfig:
        """Returns the settings with steps of `step_tokens` and one token for each slot, unless given.

        Prompts often have round lengths: with the extra tokens, one of 512 beside decode rows needs no second step,
        which would read all weights again for its last few tokens.
        """
        return self if self.max_num_batched_tokens else replace(
            self, max_num_batched_tokens=step_tokens + self.max_num_seqs)

    @property
    def offloading_bytes(self) -> int:
        """Bytes of host memory for evicted blocks."""
        return int(self.kv_offloading_size * 2**30)

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step, with the default resolved."""
        return self.max_num_batched_tokens or STEP_TOKENS + self.max_num_seqs

    @property
    def bounds_stalls(self) -> bool:
        """True if prefills are chunked to bound the delay of decode rows."""
        return self.max_stall_ms > 0 and self.batching == "continuous" and self.prefill in (None, "chunked")

    def largest_step(self, longest: int) -> int:
        """Most tokens that a step can have with sequences of up to `longest` tokens."""
        if self.batching in ("static", "dynamic"):
            return (self.batch_size or self.max_num_seqs) * longest
        if self.batching == "continuous" and self.prefill in (None, "chunked"):
            return self.step_tokens
        return self.step_tokens + longest  # prompts run whole, and the last of a step may exceed its budget

    def scheduling(self) -> Scheduling:
        """Returns the initial values of the settings that may change while the engine runs."""
        batching = Batching(
            self.batching, self.prefill, self.batch_size, self.max_wait_ms, self.long_prefill_token_threshold)
        ordering = Ordering(
            self.scheduling_policy, self.ageing, self.preemption_gap, self.length_quantile, self.length_oracle,
            self.default_ttft_ms, self.shed_late)
        return Scheduling(
            batching, self.max_num_seqs, self.step_tokens, ordering, self.max_step_ms,
            self.max_stall_ms or None, self.tiers)

    def limits(
        self, model_tokens: int, num_blocks: int, block_size: int, bytes_per_block: int, num_host_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
    ) -> SchedulerLimits:
        """Returns the scheduler's limits for a model and a cache size.

        Args:
            model_tokens: the longest sequence that the model supports.
            bytes_per_block: of the cache, for messages.
            windows: of the cache groups.

        Raises:
            ConfigError: the limits contradict each other.
        """
        groups = CacheGroups(windows, block_size, self.step_tokens)
        cache_tokens = groups.longest(num_blocks, max(num_blocks, -(-model_tokens // block_size)))
        longest = self.max_model_len or min(model_tokens, cache_tokens)
        if longest < LEAST_TOKENS:
            limit = ("the model was made for sequences of 1 token: serve one with more positions"
                     if model_tokens < LEAST_TOKENS else "the cache holds sequences of 1 token: raise kv_cache_memory")
            raise ConfigError(f"{limit}; the shortest has a prompt and an output")
        if longest > model_tokens:
            raise ConfigError(f"max_model_len {longest} exceeds the {model_tokens} positions the model was made for")
        if longest > cache_tokens + 1:
            raise ConfigError(f"a sequence of max_model_len {longest} does not fit the cache of {cache_tokens} tokens: "
                              f"lower max_model_len, or raise kv_cache_memory to "
                              f"{groups.most_blocks(longest - 1) * bytes_per_block:,} bytes")
        try:
            return self.scheduling().limits(SchedulerLimits(
                max_model_len=longest, num_blocks=num_blocks, block_size=block_size, max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.step_tokens, enable_prefix_caching=self.enable_prefix_caching,
                watermark_blocks=num_blocks // WATERMARK, max_passes=MAX_PASSES, on_pressure=self.on_pressure,
                max_step_ms=self.max_step_ms, max_stall_ms=self.max_stall_ms or None,
                tiers=self.tiers, num_host_blocks=num_host_blocks, max_loras=self.max_loras, windows=windows,
                max_chunk=self.step_tokens, stages=self.pipeline_parallel_size))
        except ValueError as error:
            raise ConfigError(str(error)) from error
