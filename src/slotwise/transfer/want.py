"""What a consumer asks a producer for: the payload of its first frame, a JSON object."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

from slotwise.transfer.interface import TransferError


@dataclass(frozen=True, slots=True)
class Want:
    transfer_id: str
    prompt: str  # digest of its tokens
    layout: str  # of the consumer's blocks
    first: int  # block of the prompt

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Want:
        """Raises TransferError: this is none."""
        try:
            want = cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError) as error:
            raise TransferError("a consumer has not said what it wants") from error
        texts = (want.transfer_id, want.prompt, want.layout)
        if not all(isinstance(text, str) for text in texts) or not isinstance(want.first, int) or want.first < 0:
            raise TransferError("a consumer has not said what it wants")
        return want


def prompt_digest(tokens: Sequence[int]) -> str:
    """The same for equal prompts, whatever their salts; 128 bits."""
    return blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()
