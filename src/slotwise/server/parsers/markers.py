"""Special tokens in a text.

The text of an output leaves special tokens out.  Those that a format is made of stand in it as one character each, a
lone surrogate, which no decoded text has: a text that merely spells a special token is not taken for it.  Where a
tokenizer has no such special token, a format is made of the spelling itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

FIRST, MOST = 0xDC00, 256  # lone surrogates in use
ANY = f"{chr(FIRST)}-{chr(FIRST + MOST - 1)}"  # of them, in a class of a regular expression


class Markers:
    """The special tokens that formats are made of.

    Args:
        special: ids of the tokenizer's special tokens, by their spelling.
        spellings: of the tokens that are wanted.
    """

    def __init__(self, special: Mapping[str, int] | None = None, spellings: Iterable[str] = ()) -> None:
        found = [spelling for spelling in dict.fromkeys(spellings) if spelling in (special or {})][:MOST]
        self._stand_ins = {spelling: chr(FIRST + number) for number, spelling in enumerate(found)}
        self._spelled = {ord(character): spelling for spelling, character in self._stand_ins.items()}
        self.by_id = {(special or {})[spelling]: character for spelling, character in self._stand_ins.items()}

    def __contains__(self, spelling: str) -> bool:
        return spelling in self._stand_ins

    @property
    def spellings(self) -> Collection[str]:
        """Those of the special tokens."""
        return self._stand_ins.keys()

    def of(self, spelling: str) -> str:
        """What stands in a text for a token: a character, or the spelling where the token is not special."""
        return self._stand_ins.get(spelling, spelling)

    def spelled(self, text: str) -> str:
        """The text with its special tokens spelled out."""
        return text if not self._spelled or text.isascii() else text.translate(self._spelled)
