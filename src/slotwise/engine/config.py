"""Settings of an engine and their validation.  The one place where defaults are resolved.

Names are vLLM's where vLLM has the setting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from slotwise.core.cache_groups import CacheGroups
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.scheduler_limits import (
    ADAPTERS,
    CACHE,
    MOST_MS,
    TOKENS,
    ChosenLimits,
    LiveLimits,
    SchedulerLimits,
    Tier,
)
from slotwise.core.setting_fields import (
    check_settings,
    json_object,
    make,
    nested,
    real,
    redeclared,
    setting,
    settings_of,
    whole,
)
from slotwise.core.speculation.speculation_settings import DRAFT_MODEL, Speculation
from slotwise.core.transfer.kv_transfer_config import HOW, KVTransferConfig
from slotwise.engine.scheduling import Scheduling
from slotwise.errors import OneLineError
from slotwise.platform.files import existing_file

DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # vLLM's; a config has the longer ones
# Besides none, those of compute/kernels/cpu/products/quantize.py, which is not imported here.
QUANTIZATIONS = ("none", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
DEVICES = ("auto", "cpu", "cuda", "reference")
STEP_TOKENS = 512  # a chunk this long reaches most of the product rate on any device
STALL_MS = 70.0  # a gap that a reader does not notice; shorter ones need more steps, each of which reads all weights
WATERMARK = 100  # one block in so many stays free for running requests when another is admitted
MAX_PASSES = 16  # smaller requests that may start before one that waits for blocks
DAY = 86_400.0  # seconds
MOST_RANKS = 16
LEAST_TOKENS = 2  # of the longest sequence: a prompt's and an output's
BYTES = 1 << 50
GIBIBYTES = real(0, (1 << 20) - 1)
RETIRED = frozenset({"max_step_context"})  # accepted for one release, without effect
SAMPLING, RANKS, TRANSFERS = "sampling", "ranks", "prefill and decode apart"  # headings of options

logger = logging.getLogger(__name__)


class ConfigError(OneLineError, ValueError):
    """Settings that are invalid or contradict each other; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class EngineConfig(ChosenLimits):
    """The settings as given.  None means: decide from the model and the machine.

    Raises:
        ConfigError: a value out of range.
    """

    model: str = setting(
        help="a name that `slotwise pull` lists, a checkpoint's folder, a GGUF file or a hub id", option="")
    device: str = setting(
        "auto", "what computes", choices=DEVICES, otherwise="auto, a GPU if torch finds one, else the CPU")
    dtype: str = setting(
        "auto", "type of the weights, half and float being float16 and float32", choices=DTYPES,
        otherwise="auto, that of the checkpoint; on a CPU float16 becomes bfloat16", is_common=True,
        read=lambda text: DTYPE_NAMES.get(text, text))
    quantization: str = setting(
        "none", "type to which weights are quantized when they are loaded; activations are quantized to int8 in each "
        "step. docs/performance.md has the perplexities", choices=QUANTIZATIONS,
        is_common=True)
    packed_weights_cache: float | None = setting(
        None, "on a CPU: disk space for quantized weights as they are packed, so that the next start maps them: "
        "docs/gguf.md", unit="GiB", range=GIBIBYTES,
        otherwise="none; with quantization int4 on one rank 4, and the next start copies them")
    kv_cache_dtype: str = setting(
        "auto", "type of cached keys and values; int8 on the CPU and fp8 on a GPU hold about twice the tokens in the "
        "same memory", choices=KV_CACHE_DTYPES, otherwise="auto, the type in which they are computed", group=CACHE)
    batch_invariant: bool = setting(
        default=False, help="start only where a request's tokens depend neither on the requests next to it, nor on how "
        "its prompt is chunked, nor on drafts, in bfloat16 as in float32; on a CPU that holds unless "
        "SLOTWISE_CPU_LINEAR is onednn, on a GPU it does not")
    max_model_len: int | None = setting(
        None, "longest sequence, prompt and output together", unit="tokens", range=whole(LEAST_TOKENS, TOKENS),
        otherwise="the model's", is_common=True)
    max_num_batched_tokens: int | None = redeclared(  # type: ignore[assignment]
        LiveLimits, "max_num_batched_tokens", None, otherwise="what half a second computes, a tenth where stalls are "
        "not bounded; 128 to 512, of an encoder up to 1024, on a GPU up to 8192; and one for each slot")
    batching: Batching = nested(Batching)
    ordering: Ordering = nested(Ordering)
    max_stall_ms: float = redeclared(
        LiveLimits, "max_stall_ms", STALL_MS, range=real(0, MOST_MS), otherwise=f"{STALL_MS:g}; 0: no limit")
    block_size: int | None = setting(
        None, "tokens of a cache block", unit="tokens", range=whole(1, 1 << 16), otherwise="64, or what the device's "
        "kernels need", group=CACHE)
    kv_cache_memory: int | None = setting(
        None, "memory of the cache", unit="bytes", range=whole(1, BYTES), otherwise="what the slots can use, at most "
        "40% of the free memory", group=CACHE, aliases=("kv_cache_memory_bytes",))
    gpu_memory_utilization: float | None = setting(
        None, "share of the memory of the GPU, or of the machine, for weights, workspace and cache together",
        unit="share", range=real(0.001, 1), otherwise="on a GPU 0.9", group=CACHE, is_common=True)
    enable_prefix_caching: bool = redeclared(ChosenLimits, "enable_prefix_caching", default=True)
    kv_offloading_size: float = setting(
        0.0, "on a GPU: host memory for blocks that the prefix cache evicts; they are copied back instead of computed "
        "again", unit="GiB", range=GIBIBYTES, otherwise="0, none", group=CACHE)
    kv_disk: str | None = setting(
        None, "on a CPU: a folder for blocks of the prefix cache, which are found again after an eviction, a sleep or "
        "a restart: docs/reference/kv-disk.md", unit="folder", otherwise="evicted blocks are lost", group=CACHE)
    kv_disk_size: float = setting(
        16.0, "size of all files in {kv_disk}; blocks beyond it are removed in the order of {eviction_policy}",
        unit="GiB", range=real(0.001, (1 << 20) - 1), group=CACHE)
    kv_disk_max_age: float = setting(
        DAY, "age at which blocks in {kv_disk} are removed", unit="seconds", range=real(1, 3650 * DAY), group=CACHE)
    generation_config: str = setting(
        "auto", "where defaults of sampling come from: auto, the model's generation_config.json; vllm, nowhere; else "
        "such a file, or its folder", unit="source", group=SAMPLING)
    speculative_config: Speculation | None = setting(
        None, "drafts of decoding rows, which a step verifies together with the other rows where that is faster, as "
        "{\"method\": \"ngram\", \"num_speculative_tokens\": 8}; docs/speculation.md has all keys", unit="JSON",
        otherwise="no drafts; of serve, {\"method\": \"prediction\"}", read=Speculation.read)
    enable_lora: bool = setting(
        default=False, help="requests may name adapters as their model: docs/lora.md", group=ADAPTERS)
    max_lora_rank: int = setting(16, "the largest rank of an adapter", range=whole(1, 4096), group=ADAPTERS)
    max_cpu_loras: int = setting(16, "adapters in memory", range=whole(1, 4096), group=ADAPTERS)
    seed: int = setting(0, "seed of requests without one", range=whole(-(2**63), 2**63 - 1))
    overlap: int | None = setting(
        None, "steps in flight while the next is planned", range=whole(0, 1), otherwise="1 where a GPU computes",
        option="")
    tensor_parallel_size: int = setting(
        1, "processes of this machine that compute every layer together, each with a share of the weights, the heads "
        "and the threads: docs/parallel.md", range=whole(1, MOST_RANKS), aliases=("-tp",), group=RANKS)
    pipeline_parallel_size: int = setting(
        1, "stages that the model's layers are divided into, which compute different steps at once, each with the "
        "processes of {tensor_parallel_size}: docs/parallel.md", range=whole(1, MOST_RANKS), aliases=("-pp",),
        group=RANKS)
    enable_expert_parallel: bool = setting(
        default=False, help="each process of {tensor_parallel_size} holds some of the experts whole, in place of a "
        "share of each: docs/parallel.md", group=RANKS)
    kv_transfer_config: KVTransferConfig | None = setting(
        None, "prompts are computed by one engine and decoded by another, as {\"kv_connector\": \"TCPConnector\", "
        "\"kv_role\": \"kv_producer\", \"kv_port\": 14579}; docs/disaggregation.md has all keys", unit="JSON",
        otherwise="every engine computes its prompts", read=KVTransferConfig.read, group=TRANSFERS)

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):
            try:
                object.__setattr__(self, "speculative_config", Speculation.of(self.speculative_config))
            except ValueError as error:
                raise ConfigError(f"speculative_config: {error}") from error
        if isinstance(self.kv_disk, str) and self.kv_disk:  # the engine process has another working directory
            object.__setattr__(self, "kv_disk", os.path.abspath(os.path.expanduser(self.kv_disk)))
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", DTYPE_NAMES.get(self.dtype, self.dtype))
        self._check_types()
        try:
            check_settings(self)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.quantization != "none" and self.device == "reference":
            raise ConfigError(f"quantization {self.quantization} needs device cpu: the reference computes exactly")
        if self.quantization != "none" and self.device == "cuda":
            raise ConfigError(f"quantization {self.quantization} needs device cpu, not cuda")
        try:
            self.scheduling()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.gpu_memory_utilization is not None and self.kv_cache_memory is not None:
            raise ConfigError("kv_cache_memory and gpu_memory_utilization both size the cache: give one of them")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError("kv_offloading_size needs enable_prefix_caching: who comes back finds its blocks by it")
        if self.kv_disk is not None:
            self._check_disk()
        if self.num_ranks > 1:
            self._check_ranks()
        if self.kv_transfer_config is not None:
            self._check_transfers(self.kv_transfer_config)
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError("enable_expert_parallel divides experts over tensor_parallel_size ranks: give 2 or more")
        if self.enable_lora and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras {self.max_cpu_loras} must be at least max_loras {self.max_loras}")

    def _check_transfers(self, transfer: KVTransferConfig) -> None:
        """Raises ConfigError for what is not supported together with transfers."""
        drafts = self.speculative_config
        for name, is_set in (("several ranks", self.num_ranks > 1), ("enable_lora", self.enable_lora),
                             ("a draft model", drafts is not None and drafts.method == DRAFT_MODEL),
                             (f"batching {self.batching.kind}", self.batching.kind != "continuous")):
            if is_set:
                raise ConfigError(f"kv_transfer_config is not supported with {name}: leave one of them out")
        if not transfer.secret:
            raise ConfigError(f"kv_transfer_config needs a secret that its peers have, too: {HOW}")

    def _check_disk(self) -> None:
        """Raises ConfigError for settings that are not supported together with blocks on disk."""
        drafts = self.speculative_config
        for name, is_set in (("several ranks", self.num_ranks > 1),
                             ("kv_transfer_config", self.kv_transfer_config is not None),
                             ("a draft model", drafts is not None and drafts.method == DRAFT_MODEL),
                             ("device cuda", self.device == "cuda"),
                             (f"batching {self.batching.kind}", self.batching.kind != "continuous")):
            if is_set:
                raise ConfigError(f"kv_disk is not supported with {name}: leave one of them out")
        if not self.kv_disk:
            raise ConfigError("kv_disk: name a folder")
        if not self.enable_prefix_caching:
            raise ConfigError("kv_disk needs enable_prefix_caching: a prompt finds its blocks by it")

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

    def _check_types(self) -> None:
        """Raises ConfigError for a value of the wrong type, of a setting that is an object."""
        drafts, transfer = self.speculative_config, self.kv_transfer_config
        if drafts is not None and not isinstance(drafts, Speculation):
            raise ConfigError(f"speculative_config must be a dict, not {drafts!r:.40}")
        if transfer is not None and not isinstance(transfer, KVTransferConfig):
            raise ConfigError(f"kv_transfer_config must be a KVTransferConfig, not {transfer!r:.40}")
        if not isinstance(self.tiers, (tuple, list)) or not all(isinstance(tier, Tier) for tier in self.tiers):
            raise ConfigError(f"tiers must be a tuple of tiers, not {self.tiers!r:.40}")

    @classmethod
    def of(cls, **settings: object) -> EngineConfig:
        """Returns the configuration; drops RETIRED settings with a warning.  Raises ConfigError for an unknown name."""
        known = (*settings_of(cls), "tiers")
        for name in RETIRED & settings.keys():
            if settings.pop(name):
                logger.warning("%s no longer has any effect: prompts are cut by max_stall_ms and max_step_ms", name)
        for name in settings:
            if name not in known:
                raise ConfigError(f"there is no setting {name!r}; there are {', '.join(known)}")
        try:
            return make(cls, settings)
        except ConfigError:
            raise
        except ValueError as error:  # of a nested setting
            raise ConfigError(str(error)) from error

    def sized(self, step_tokens: int) -> EngineConfig:
        """Returns the settings with steps of `step_tokens` and one token for each slot, unless given.

        Prompts often have round lengths: with the extra tokens, one of 512 next to decode rows needs no second step,
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
        return self.max_stall_ms > 0 and self.batching.is_chunked

    def largest_step(self, longest: int) -> int:
        """Most tokens that a step can have with sequences of up to `longest` tokens."""
        if self.batching.kind in ("static", "dynamic"):
            return (self.batching.batch_size or self.max_num_seqs) * longest
        if self.batching.is_chunked:
            return self.step_tokens
        return self.step_tokens + longest  # prompts run whole, and the last of a step may exceed its budget

    def scheduling(self) -> Scheduling:
        """Returns the initial values of the settings that may change while the engine runs."""
        return Scheduling(self.batching, self.ordering, **self.chosen_limits(LiveLimits))

    def chosen_limits(self, owner: type[LiveLimits] = ChosenLimits) -> dict[str, Any]:
        """Returns the limits that `owner` declares, by name, with their defaults resolved."""
        return {one.name: getattr(self, one.name) for one in fields(owner)} | {
            "max_num_batched_tokens": self.step_tokens, "max_stall_ms": self.max_stall_ms or None}

    def limits(
        self, model_tokens: int, num_blocks: int, block_size: int, bytes_per_block: int, num_host_blocks: int = 0,
        windows: tuple[int, ...] = (0,), *, whole_prompts: bool = False,
    ) -> SchedulerLimits:
        """Returns the scheduler's limits for a model and a cache size.

        Args:
            model_tokens: the longest sequence that the model supports.
            bytes_per_block: of the cache, for messages.
            windows: of the cache groups.
            whole_prompts: tokens attend to later ones, so that no prompt is divided, and no prefix is shared.

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
                max_model_len=longest, num_blocks=num_blocks, block_size=block_size,
                watermark_blocks=num_blocks // WATERMARK, max_passes=MAX_PASSES, num_host_blocks=num_host_blocks,
                windows=windows, max_chunk=self.step_tokens, stages=self.pipeline_parallel_size,
                whole_prompts=whole_prompts, **self.chosen_limits() | (
                    {"enable_prefix_caching": False} if whole_prompts else {})))
        except ValueError as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What holds for every model that is served, next to how it is computed: its names, template and defaults."""

    served_model_name: tuple[str, ...] = setting(
        (), "what clients call the model, by any of several names; responses and metrics have the first", unit="name",
        otherwise="the name in its GGUF file, that of its file or folder, or its hub id",
        takes_many=True, is_common=True)
    chat_template: str | None = setting(
        None, "a Jinja file instead of the model's own template", unit="file", read=existing_file)
    override_generation_config: Mapping[str, Any] = setting(
        factory=dict, help="fields that replace those defaults, as {\"temperature\": 0.6}; null stands for the neutral "
        "value", unit="JSON", read=json_object, group=SAMPLING)
    pooler_config: Mapping[str, Any] = setting(
        factory=dict, help="how vectors are made, as {\"pooling_type\": \"MEAN\", \"normalize\": true}; the type is "
        "LAST, CLS, MEAN, MAX, WEIGHTEDMEAN or MEAN_SQRT_LEN_TOKENS", otherwise="as the checkpoint's "
        "1_Pooling/config.json says, else CLS for models like BERT and LAST for others", unit="JSON",
        read=json_object)
