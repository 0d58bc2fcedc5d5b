"""Limits of the scheduler: capacities, budgets and service tiers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from slotwise.core.cache_groups import CacheGroups
from slotwise.core.setting_fields import LIVE, check_settings, real, setting, whole

PRIORITIES = range(-1000, 1001)
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1e6


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives of one request.  Raises ValueError for values out of range."""

    tenant: str = ""  # the unit of fairness: the holder of an API key, or the `user` of a request
    tier: str = ""  # name of one of the limits' tiers; "": none
    priority: int = 0  # lower is earlier
    ttft: float | None = None  # seconds from arrival to the first token
    tpot: float | None = None  # seconds between two output tokens

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority must be between {PRIORITIES[0]} and {PRIORITIES[-1]}, not {self.priority}")
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 86_400:
                raise ValueError(f"{name} must be positive and less than a day, not {value}")


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of service.  Raises ValueError for values out of range."""

    name: str
    ttft: float | None = None  # seconds, as in SLO; the default of its requests
    tpot: float | None = None
    priority: int = 0  # the default of its requests
    weight: float = 1.0  # share of the service, under a policy that shares
    slots: int = 0  # slots reserved for it, even while they are free

    def __post_init__(self) -> None:
        SLO("", self.name, self.priority, self.ttft, self.tpot)
        if not self.name:
            raise ValueError("a tier needs a name")
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ValueError(f"tier {self.name}: weight must be between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, not "
                             f"{self.weight}")
        if self.slots < 0:
            raise ValueError(f"tier {self.name}: slots must not be negative")


RECOMPUTE = "recompute"  # a preempted request waits, and is recomputed
ERROR = "error"  # it ends with an error
PRESSURES = (RECOMPUTE, ERROR)
CACHE = "cache"  # a heading
LRU, COST, HINTED, PREDICTED = "lru", "cost", "hinted", "predicted"  # orders of eviction (`core/eviction.py`)
EVICTION_POLICIES = (LRU, COST, HINTED, PREDICTED)
OBEYING = (HINTED, PREDICTED)  # those that obey retention

SLOTS = 1 << 16
TOKENS = 1 << 24  # of a sequence or a step
LEAST_MS, MOST_MS = 0.001, 3_600_000.0  # milliseconds; range of all time limits
ADAPTERS = "LoRA adapters"  # a heading

LOADS = 4  # tokens a step may load from host memory per token of its budget; computing one takes several times as long


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLimits:
    """Limits that may change between two steps."""

    max_num_seqs: int = setting(
        64, "slots of the batch: requests that may run at once", range=whole(1, SLOTS), phase=LIVE, is_common=True)
    max_num_batched_tokens: int = setting(
        1024, "token budget of a step", unit="tokens", range=whole(1, TOKENS), phase=LIVE)
    max_step_ms: float | None = setting(
        None, "predicted time that a step may take: prompts are chunked to fit, without the exceptions of "
        "{max_stall_ms}", unit="ms", range=real(LEAST_MS, MOST_MS), otherwise="no limit", phase=LIVE)
    max_stall_ms: float | None = setting(
        None, "predicted time by which prompts may delay running rows; up to four times as long if the requests that "
        "start exceed half of those that run, and up to twice the time of the running rows alone", unit="ms",
        range=real(LEAST_MS, MOST_MS), otherwise="no limit", phase=LIVE)
    eviction_policy: str = setting(
        LRU, "which cached prefix is evicted first, from the device, host memory and disk: the least recently used, "
        "the cheapest to compute again, one without retention, or one whose session is not expected back",
        choices=EVICTION_POLICIES, phase=LIVE, group=CACHE)
    tenant_cache_share: float = setting(
        0.5, "share of the cache that one tenant's retention may claim", unit="share", range=real(0, 1), phase=LIVE,
        group=CACHE)
    tiers: tuple[Tier, ...] = ()  # service tiers; a request may belong to none


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLimits(LiveLimits):
    """Limits that an operator chooses; the others follow from the model and the machine."""

    enable_prefix_caching: bool = setting(default=False, help="compute common prefixes of requests once", group=CACHE)
    on_pressure: str = setting(
        RECOMPUTE, "what becomes of a request that is preempted because the cache is full: it is recomputed, or ends "
        "with an error", choices=PRESSURES, group=CACHE)
    max_loras: int = setting(
        1, "adapters among the rows of one step; a request beyond them waits", range=whole(1, SLOTS), group=ADAPTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits(ChosenLimits):
    """Capacities and budgets.  Raises ValueError for numbers that no request could run under."""

    max_model_len: int  # tokens of one sequence, prompt and output
    num_blocks: int  # KV cache blocks in the pool
    block_size: int  # tokens a block holds
    watermark_blocks: int = 0  # blocks left free by admission while other requests run
    max_passes: int = 0  # later arrivals admitted before a request that waits for blocks
    num_host_blocks: int = 0  # blocks in host memory for evicted device blocks
    windows: tuple[int, ...] = (0,)  # by cache group, tokens that its layers look back on; 0: all
    max_chunk: int = 1024  # tokens of a prompt that a step computes at most, where a cache group has a window
    stages: int = 1  # that a model's layers are divided into, each of which computes another step
    whole_prompts: bool = False  # a prompt is computed in one step, as its tokens attend to later ones

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("max_model_len", "num_blocks", "block_size", "max_chunk", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("watermark_blocks", "max_passes", "num_host_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, and is {getattr(self, name)}")
        if not self.windows or min(self.windows) < 0:
            raise ValueError(f"windows must name the tokens of each cache group, or 0, and are {self.windows}")
        self._check_tiers()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                             f"({self.max_num_seqs}), so that every running request gets a token at every step")

    def _check_tiers(self) -> None:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"two tiers have the same name: {', '.join(names)}")
        if self.tiers and sum(tier.slots for tier in self.tiers) >= self.max_num_seqs:
            raise ValueError(f"tiers keep all of the {self.max_num_seqs} slots: leave one to requests of any tier")

    @property
    def fixed(self) -> tuple[object, ...]:
        """The limits that cannot change after the start."""
        return (self.num_blocks, self.block_size, self.max_model_len, self.enable_prefix_caching, self.num_host_blocks,
                self.windows, self.max_chunk, self.stages, self.whole_prompts)

    @property
    def max_in_flight(self) -> int:
        """Uncommitted steps that may exist when another is planned.

        One hides planning behind the forward pass; with a second each request that stops would compute one more token
        for nothing.  Stages need as many steps as there are.
        """
        return max(1, self.stages - 1)

    @property
    def max_loads(self) -> int:
        """Blocks that one step may load from host memory."""
        return max(1, LOADS * self.max_num_batched_tokens // self.block_size)

    @property
    def groups(self) -> CacheGroups:
        """What the cache groups keep."""
        return CacheGroups(self.windows, self.block_size, self.max_chunk)

    @property
    def cache_tokens(self) -> int:
        """Tokens of the longest sequence that the cache holds."""
        most = max(self.num_blocks, -(-self.max_model_len // self.block_size))
        return _longest(self.windows, self.block_size, self.max_chunk, self.num_blocks, most)

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens of short sequences that `num_blocks` blocks hold: each takes a place in every group."""
        return num_blocks // len(self.windows) * self.block_size

    def longest(self, num_prompt: int, max_tokens: int | None) -> int:
        """Returns the maximum length of a sequence, in tokens."""
        limit = self.max_model_len
        return limit if max_tokens is None else min(limit, num_prompt + max_tokens)

    def objection(self, num_prompt: int, max_tokens: int | None) -> str:
        """Returns why such a request can never run, with the numbers; "" if it can.

        Args:
            max_tokens: 0: the prompt is all that is computed; None: as many as fit.
        """
        if num_prompt < 1:
            return "the prompt has no tokens"
        if num_prompt + (max_tokens != 0) > self.max_model_len:
            return (f"the prompt has {num_prompt} tokens; this model takes at most {self.max_model_len}"
                    + ", output included" * (max_tokens != 0))
        if max_tokens == 0:
            return "" if num_prompt <= self.cache_tokens else (
                f"the prompt has {num_prompt} tokens, and the cache has {self.cache_tokens} places; start with a "
                "larger kv_cache_memory")
        # The last token sampled is never computed, so it needs no position in the cache.
        needed = self.longest(num_prompt, max_tokens) - 1
        if needed > self.cache_tokens:
            return (f"{num_prompt} prompt tokens and up to {needed + 1 - num_prompt} output tokens need {needed} "
                    f"places in a cache of {self.cache_tokens}; ask for fewer max_tokens or start with a larger "
                    "kv_cache_memory")
        return ""


@cache  # every request asks
def _longest(windows: tuple[int, ...], block_size: int, max_chunk: int, num_blocks: int, most: int) -> int:
    return CacheGroups(windows, block_size, max_chunk).longest(num_blocks, most)
