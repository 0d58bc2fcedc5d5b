"""Settings of the batching discipline: validated together, then turned into a Discipline."""

from __future__ import annotations

from dataclasses import dataclass

from slotwise.core.disciplines.disciplines import Chunked, Dynamic, Inline, OneAtATime, Orca, PromptsAlone, Static
from slotwise.core.interfaces import Discipline
from slotwise.core.setting_fields import LIVE, check_settings, real, setting, whole

KINDS = ("continuous", "orca", "dynamic", "static", "one_at_a_time")
PREFILLS = ("chunked", "inline", "alone")
MAX_WAIT_MS = 50.0  # default of `dynamic`


@dataclass(frozen=True, slots=True)
class Batching:
    """Settings of a discipline.  None is the default, so that a setting which does not belong to `kind` can be refused.

    Raises:
        ValueError: one line that says which settings contradict each other.
    """

    kind: str = setting("continuous", "discipline of the batch: docs/batching.md compares them", choices=KINDS,
                        phase=LIVE, name="batching")
    prefill: str | None = setting(
        None, "continuous: prompts run in chunks next to rows that decode, whole next to them, or alone while those "
        "pause", choices=PREFILLS, otherwise="chunked", phase=LIVE)
    batch_size: int | None = setting(
        None, "static, dynamic: most requests of a batch", range=whole(1), otherwise="as many as there are slots",
        phase=LIVE)
    max_wait_ms: float | None = setting(
        None, "dynamic: how long the first request of a batch waits for others", unit="ms",
        range=real(0, 3_600_000), otherwise=f"{MAX_WAIT_MS:g}", phase=LIVE)
    long_prefill_token_threshold: int = setting(
        0, "chunked: most tokens of one prompt in a step", unit="tokens", range=whole(0),
        otherwise="0, what the budget leaves", phase=LIVE)

    def __post_init__(self) -> None:
        check_settings(self)
        self._belongs("prefill", given=self.prefill is not None, kinds=("continuous",))
        self._belongs("batch_size", given=self.batch_size is not None, kinds=("static", "dynamic"))
        self._belongs("max_wait_ms", given=self.max_wait_ms is not None, kinds=("dynamic",))
        self._belongs("long_prefill_token_threshold", given=bool(self.long_prefill_token_threshold),
                      kinds=("continuous",))
        if self.long_prefill_token_threshold and self.prefill not in (None, "chunked"):
            raise ValueError(f"long_prefill_token_threshold cuts prompts, and prefill {self.prefill} does not")

    def _belongs(self, name: str, *, given: bool, kinds: tuple[str, ...]) -> None:
        if given and self.kind not in kinds:
            raise ValueError(f"{name} belongs to batching {' and '.join(kinds)}, not to {self.kind}")

    @property
    def is_chunked(self) -> bool:
        """Whether prompts are cut into chunks."""
        return self.kind == "continuous" and self.prefill in (None, "chunked")

    def discipline(self, max_num_seqs: int) -> Discipline:
        """Returns the discipline for a scheduler of `max_num_seqs` slots.

        Raises:
            ValueError: the batch is larger than `max_num_seqs`.
        """
        batch_size = self.batch_size or max_num_seqs
        if batch_size > max_num_seqs:
            raise ValueError(f"a batch_size of {batch_size} needs as many slots, and max_num_seqs is {max_num_seqs}")
        if self.kind == "continuous":
            return self._continuous()
        if self.kind == "orca":
            return Orca()
        if self.kind == "one_at_a_time":
            return OneAtATime()
        if self.kind == "static":
            return Static(batch_size)
        wait_ms = MAX_WAIT_MS if self.max_wait_ms is None else self.max_wait_ms
        return Dynamic(batch_size, wait_ms / 1000)

    def _continuous(self) -> Discipline:
        if self.prefill == "inline":
            return Inline()
        if self.prefill == "alone":
            return PromptsAlone()
        return Chunked(self.long_prefill_token_threshold)
