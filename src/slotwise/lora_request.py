"""`LoRARequest`: the adapter of offline requests, with vLLM's fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, which is loaded with the first request that names it.

    Raises:
        ValueError: a field is not valid.
    """

    lora_name: str
    lora_int_id: int  # at least 1; another adapter, or other contents of its folder, have another
    lora_path: str  # a folder in the format of PEFT

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name must be a text, not {self.lora_name!r:.40}")
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be a whole number from 1 on, not {self.lora_int_id!r:.40}")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise ValueError(f"lora_path must be a folder, not {self.lora_path!r:.40}")
