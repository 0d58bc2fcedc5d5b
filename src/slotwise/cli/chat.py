"""A conversation in the terminal: its messages, what may be typed in addition, and how an answer is shown.

    > a message ─► the model ─► parts of an answer, shown as they come ─► the conversation
    > /command  ─► a method of `Chat`

Ctrl-C ends an answer and keeps what came of it; twice at the prompt, it ends the chat.  A conversation that a model
cannot answer is a line, and the chat goes on without the message.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from slotwise.api.parsers.base_parser import CallName, Content, Part, Reasoning
from slotwise.cli.chat_models import ChatModel, Usage
from slotwise.cli.process import INTERRUPTED
from slotwise.cli.remote import ServerError
from slotwise.errors import described, one_line, printable
from slotwise.platform.files import write_output
from slotwise.platform.terminal import duration

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyPressEvent

    from slotwise.cli.chat_models import Message

BLOCK = '"""'
MORE = "... "  # the prompt of further lines
PROMPT = "> "
FORCED = 3  # presses of Ctrl-C after which an answer ends wherever it is
FILE_WIDTH = 100  # columns of remarks where there is no terminal
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


# -- what is typed -----------------------------------------------------------------------------------------------------


def is_open(text: str) -> bool:
    """Whether more lines belong to a message: it ends in a backslash, or a block has begun and not ended."""
    if text.lstrip().startswith(BLOCK):
        return text.count(BLOCK) % 2 == 1
    return text.endswith("\\")


def message_of(text: str) -> str:
    """Returns the message that was typed, without the marks of its lines and its block."""
    text = text.strip()
    if text.startswith(BLOCK) and text.endswith(BLOCK) and text.count(BLOCK) == 2:
        return text.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n")
    return text.replace("\\\n", "\n")


class Keyboard:
    """Reads messages of one line or several, which can be edited; what is pasted arrives whole."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._session = _session(commands)

    def read(self) -> str:
        """Raises EOFError: Ctrl-D; KeyboardInterrupt: Ctrl-C."""
        return self._session.prompt(PROMPT)


def _session(commands: Sequence[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output
    from prompt_toolkit.output.vt100 import Vt100_Output

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.document.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = create_output()
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # some terminals answer where the cursor is late, or not at all
    completer = WordCompleter([f"/{name}" for name in commands], sentence=True)
    return PromptSession(multiline=True, key_bindings=keys, output=output, completer=completer,
                         complete_while_typing=False, prompt_continuation=MORE)


class Lines:
    """Reads messages where lines cannot be edited: output is a file, or the terminal is dumb.  Prompts go to stderr."""

    def read(self) -> str:
        """Raises EOFError, KeyboardInterrupt."""
        text = self._line(PROMPT)
        while is_open(text):
            text += "\n" + self._line(MORE)
        return text

    @staticmethod
    def _line(prompt: str) -> str:
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


# -- what is shown -----------------------------------------------------------------------------------------------------


class Screen:
    """Shows answers, and notes next to them."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._dims = self._is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._is_reasoning = False
        self._has_text = False  # in the line of the cursor

    def part(self, part: Part) -> None:
        """Shows more of an answer.  Reasoning is dim, and shown on a terminal only."""
        if isinstance(part, Content):
            self._end_reasoning()
            self._write(part.text)
        elif isinstance(part, Reasoning) and self._is_terminal:
            if not self._is_reasoning:
                self._write(DIM if self._dims else "reasoning: ", is_own=True)
                self._is_reasoning = True
            self._write(part.text)
        elif isinstance(part, CallName):
            self._end_reasoning()
            self._write(f"[calls {part.name}]")

    def end(self) -> None:
        """Ends an answer, or what there is of it."""
        self._end_reasoning()
        if self._has_text:
            self._write("\n")

    def note(self, text: str) -> None:
        """A remark, in lines of its own."""
        width = shutil.get_terminal_size().columns if self._is_terminal else FILE_WIDTH
        for line in text.splitlines():
            for part in textwrap.wrap(printable(line), width, break_long_words=False, break_on_hyphens=False) or [""]:
                print(f"{DIM}{part}{PLAIN}" if self._dims else part, flush=True)

    def complain(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            self._is_reasoning = False
            self._write(f"{PLAIN}\n\n" if self._dims else "\n\nanswer: ", is_own=True)

    def _write(self, text: str, *, is_own: bool = False) -> None:
        print(text if is_own else shown(text), end="", flush=True)
        self._has_text = not text.endswith("\n") if text else self._has_text


def shown(text: str) -> str:
    """`text` as it is; on a terminal, which would obey them, with control characters but tab and newline escaped."""
    if not sys.stdout.isatty():
        return text
    return "".join([c if c in "\n\t" else printable(c) for c in text])


# -- the conversation --------------------------------------------------------------------------------------------------


class Command(NamedTuple):
    """What may be typed in addition to messages."""

    run: Callable[[Chat, str], None]
    argument: str
    help: str


class EndChat(Exception):
    """The chat ends."""


class Chat:
    """A conversation with a model.

    Args:
        system: the system prompt; "" for none.
    """

    def __init__(self, model: ChatModel, system: str = "") -> None:
        self._model, self._system = model, system
        self._messages: list[Message] = []
        self._last = ""  # the last message of the user, answered or not
        self._usage: Usage | None = None  # of the last answer
        self._saved: set[Path] = set()
        self._was_forced = False  # an answer was ended in the middle of a step
        self._screen = Screen()

    # -- runs

    def run_lines(self) -> None:
        """Answers each line of a standard input that is not a terminal, until it ends or a line is empty.

        Raises:
            ValueError, ServerError: a message cannot be answered.
        """
        for line in sys.stdin:
            if not (message := line.strip()):
                return
            self._answer(message)

    def run(self, greeting: str) -> int:
        """Answers what is typed until the user ends.  Returns the exit status."""
        can_edit = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        keyboard = Keyboard(list(COMMANDS)) if can_edit else Lines()
        self._screen.note(greeting)
        is_warned = False
        while True:
            try:
                self._do(message_of(keyboard.read()))
                is_warned = False
            except (EOFError, EndChat):
                return 0
            except KeyboardInterrupt:
                if is_warned or self._was_forced:
                    return INTERRUPTED
                is_warned = True
                self._screen.note("Ctrl-C again, or Ctrl-D, ends the chat.")
            except (ValueError, ServerError, OSError) as error:
                is_warned = False
                self._screen.complain(one_line(described(error)))

    def _do(self, message: str) -> None:
        """Runs a command, or answers a message."""
        found = _COMMAND.fullmatch(message)
        if found is None:
            if message:
                self._ask(message)
        elif (command := COMMANDS.get(found[1])) is None:
            self._screen.complain(f"there is no command /{found[1]}: /help lists them")
        else:
            command.run(self, (found[2] or "").strip())

    # -- answers

    def _ask(self, message: str) -> None:
        """Answers a message; one that cannot be answered is forgotten, but for `/retry`.

        Raises:
            ValueError, ServerError: it cannot be answered.
        """
        self._last = message
        try:
            self._answer(message)
        except (ValueError, ServerError) as error:
            hint = "; /clear begins a new conversation" * bool(self._messages)
            raise type(error)(f"{one_line(str(error))}{hint}") from error

    def _answer(self, message: str) -> None:
        """Shows the answer to a message, and adds both to the conversation unless the answer is empty."""
        asked: Message = {"role": "user", "content": message}
        usage, parts = Usage(), list[str]()
        was_stopped = False
        try:
            with _interrupts(self._model) as pressed, closing(
                    self._model.stream([*self._begin(), *self._messages, asked], usage)) as stream:
                for some in stream:
                    for part in some:
                        self._screen.part(part)
                        if isinstance(part, Content):
                            parts.append(part.text)
                    if pressed:
                        was_stopped = True
                        break
        except KeyboardInterrupt:
            if not self._model.may_be_interrupted or not sys.stdin.isatty():
                self._was_forced = True
                raise
            was_stopped = True
        finally:
            self._screen.end()
        if answer := "".join(parts):
            self._messages += [asked, {"role": "assistant", "content": answer}]
        self._usage = usage
        if sys.stdin.isatty():
            self._remark(usage, is_empty=not answer, was_stopped=was_stopped)
        elif was_stopped:
            raise KeyboardInterrupt

    def _begin(self) -> list[Message]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _remark(self, usage: Usage, *, is_empty: bool, was_stopped: bool) -> None:
        """Says how an answer ended, unless it ended by itself."""
        if was_stopped:
            self._screen.note("(stopped; /retry asks again)")
        elif is_empty:
            self._screen.note("(the answer is empty; /retry asks again)")
        elif usage.finish_reason == "length":
            context = self._model.context
            is_full = context and self._tokens(usage) >= context
            self._screen.note(f"(the context of {context:,} tokens is full: /clear begins a new conversation)"
                              if is_full else "(cut at the most output tokens)")

    @staticmethod
    def _tokens(usage: Usage) -> int:
        """Tokens of the conversation as of an answer."""
        return (usage.prompt_tokens or 0) + (usage.output_tokens or 0)

    # -- commands

    def _help(self, _: str) -> None:
        commands = [(f"/{name} {command.argument}".strip(), command.help) for name, command in COMMANDS.items()]
        width = max(len(form) for form, _ in commands)
        typed = ("A line that ends in a backslash goes on in the next; so does a block between lines of "
                 f"{BLOCK}.", "Pasted lines stay together. Alt-Enter begins a new line.",
                 "Ctrl-C stops an answer. Ctrl-D ends the chat.")
        self._screen.note("\n".join([*(f"{form:{width}}  {meaning}" for form, meaning in commands), *typed]))

    def _tell_tokens(self, _: str) -> None:
        if self._usage is None:
            raise ValueError("there is no answer yet")
        self._screen.note(described_usage(self._usage, self._model.context))

    def _set_system(self, text: str) -> None:
        if text:
            self._system = message_of(text)
            self._screen.note("The system prompt holds from the next answer on.")
        else:
            self._screen.note(self._system or "There is no system prompt: /system TEXT sets one.")

    def _clear(self, _: str) -> None:
        self._messages.clear()
        self._last, self._usage = "", None
        self._screen.note("A new conversation" + " with the same system prompt." if self._system else
                          "A new conversation.")

    def _retry(self, _: str) -> None:
        if not self._last:
            raise ValueError("there is no message to answer again")
        before = list(self._messages)
        if before and before[-2]["content"] == self._last:
            del self._messages[-2:]
        try:
            self._ask(self._last)
        except (ValueError, ServerError):
            self._messages = before
            raise

    def _save(self, name: str) -> None:
        """Raises ValueError, OSError."""
        if not name:
            raise ValueError("/save needs a file: a name that ends in .json, or any other for Markdown")
        if not self._messages:
            raise ValueError("there is nothing to save yet")
        path = Path(name).expanduser().absolute()
        if path.exists() and path not in self._saved:
            raise ValueError(f"{path} is there already: choose another name")
        messages = [*self._begin(), *self._messages]
        text = json.dumps({"model": self._model.name, "messages": messages}, ensure_ascii=False, indent=2) \
            if path.suffix == ".json" else "\n\n".join(
                f"## {message['role']}\n\n{message['content'].strip()}" for message in messages)
        write_output(path, f"{text}\n".encode(errors="replace"))
        self._saved.add(path)
        self._screen.note(f"saved in {path}")

    def _exit(self, _: str) -> None:
        raise EndChat


COMMANDS = {
    "help": Command(Chat._help, "", "this list"),
    "tokens": Command(Chat._tell_tokens, "", "tokens of the last answer, and how fast they came"),
    "retry": Command(Chat._retry, "", "answers the last message again"),
    "system": Command(Chat._set_system, "[TEXT]", "shows or sets the system prompt"),
    "clear": Command(Chat._clear, "", "begins a new conversation"),
    "save": Command(Chat._save, "FILE", "writes the conversation, as Markdown or .json"),
    "exit": Command(Chat._exit, "", "ends the chat"),
}


def described_usage(usage: Usage, context: int) -> str:
    """Returns what an answer took, in a line or two."""
    known = []
    if usage.prompt_tokens is not None:
        cached = f" ({usage.cached_tokens:,} found in the cache)" if usage.cached_tokens else ""
        known.append(f"prompt {usage.prompt_tokens:,} tokens{cached}")
    if usage.output_tokens is not None:
        known.append(f"answer {usage.output_tokens:,} tokens")
    if usage.first_token is not None:
        known.append(f"first token after {duration(usage.first_token)}")
    if (rate := usage.tokens_per_second) is not None:
        known.append(f"then {rate:,.1f} tokens/s")
    if context and usage.output_tokens is not None:
        known.append(f"{Chat._tokens(usage):,} of {context:,} tokens of context")
    if not known:
        return "the server did not say"
    lines, width = [known[0]], shutil.get_terminal_size().columns
    for one in known[1:]:
        if len(lines[-1]) + len(one) + 2 <= width:
            lines[-1] += f", {one}"
        else:
            lines.append(one)
    return "\n".join(lines)


@contextmanager
def _interrupts(model: ChatModel) -> Iterator[list[int]]:
    """Counts presses of Ctrl-C in the list; they raise at once where the model may be interrupted anywhere.

    An exception in the middle of an engine's step would leave it in no state.
    """
    pressed: list[int] = []
    if model.may_be_interrupted or threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) >= FORCED:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
