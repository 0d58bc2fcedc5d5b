"""vLLM's names without an implementation here: the rule that server, command line and offline API share.

A *neutral* name is accepted with the values that change nothing; any other value is refused by name.  A *refused* name
has no such value but None.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

ANY: tuple[Any, ...] = (...,)  # no value changes anything

SAMPLING: dict[str, tuple[Any, ...]] = {  # sampling parameters, with their values that change nothing beside None
    "use_beam_search": (False,), "length_penalty": (1.0,),
    "spaces_between_special_tokens": (True,), "routed_experts_prompt_start": (0,),
    "logits_processors": ([],), "watermarking": (False,),
}


def is_neutral(value: object, accepted: Collection[Any]) -> bool:
    """Whether `value` is None or one of `accepted`: a number never equals true or false."""
    return value is None or accepted is ANY or any(
        isinstance(value, bool) == isinstance(one, bool) and isinstance(value, type(one) | int | float)
        and value == one for one in accepted)


def ignored_key(given: Mapping[str, Any], obeyed: Collection[str], neutral: Mapping[str, Collection[Any]]) -> str:
    """Returns a key of a free-form value that would be ignored though it has a meaning, "" if there is none.

    Args:
        obeyed: the keys that are read.
        neutral: further keys, with the values that change nothing beside None.
    """
    return next((key for key, value in given.items()
                 if key not in obeyed and not is_neutral(value, neutral.get(key, ()))), "")


def nearest(name: str, names: Collection[str]) -> str:
    """Returns the one of `names` that is nearest to `name`, "" where none is near."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, names, 1)), "")
