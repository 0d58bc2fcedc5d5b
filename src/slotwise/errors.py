"""Errors with a message of one printable line, whatever a damaged file or a library put into it."""

from __future__ import annotations

MOST_CHARACTERS = 500  # of a message


def printable(text: str) -> str:
    """Returns `text` with control characters, lone surrogates and all else that is not printable escaped."""
    return text if text.isprintable() else "".join(
        [c if c.isprintable() else c.encode("unicode_escape").decode() for c in text])


def one_line(message: str) -> str:
    """Returns `message` as one line of at most `MOST_CHARACTERS`, without control characters or lone surrogates."""
    line = " ".join(message[: 8 * MOST_CHARACTERS].split())
    shown = printable(line[:MOST_CHARACTERS + 1])
    return shown if len(shown) <= MOST_CHARACTERS else shown[: MOST_CHARACTERS - 4] + " ..."


def described(error: BaseException) -> str:
    """Returns what an error says, without a bare error number, and never nothing."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) and not str(error):
        return "there is not enough memory"
    return str(error) or type(error).__name__


class OneLineError(Exception):
    """The message is one line, and can be printed and sent between processes."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class CheckpointError(OneLineError):
    """The checkpoint cannot be served.  The message is one line, fit for a command line or an API error."""
