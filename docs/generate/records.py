"""The records of a step, the event log's entries, and the reasons, from their classes."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import get_args

from docs.generate.fields import documented
from docs.generate.markdown import code, sentence, table

from slotwise.core import cache_causes, reasons, record
from slotwise.core.record import StepRecord
from slotwise.core.request import KVTransfer, RequestSpec
from slotwise.engine.messages import Add, Timing
from slotwise.observe import event_log, explain

# The meaning of names that say the same in every record, where their class does not comment on them.
COMMON = {
    "now": "seconds of the engine's clock",
    "ns": "monotonic nanoseconds",
    "step": "the number of the step",
    "number": "the number of the request in this log",
    "request_id": "the request",
    "request_ids": "the request of each row",
    "numbers": "the request of each row",
    "slot": "its slot",
    "slots": "the slot of each row",
    "starts": "the first position that each row computes",
    "counts": "the number of positions that each row computes",
    "num_logits": "the number of positions of each row whose logits are wanted",
    "kinds": "of each row: tokens known at admission, or sampled since",
    "drafts": "the proposed tokens of each row",
    "output": "what the request yields",
    "group": "the cache group; there is one, 0",
    "num_blocks": "blocks",
    "freed_blocks": "blocks behind drafts that were not accepted",
    "tokens": "token ids",
    "num_prompt": "tokens of its prompt",
    "num_output": "tokens of its output",
    "num_computed": "its positions in the cache",
    "params": "its sampling parameters",
    "spec": "what is wanted",
    "timing": "when a server had it",
    "reason": "why",
    "message": "one line for a person",
    "blocks": "cache blocks, in the order of their positions",
    "source": "the block that is read",
    "target": "the block that is written",
    "top_ids": "the most probable tokens",
    "top_logprobs": "their log-probabilities",
    "new_requests": "requests that enter a slot",
    "new_blocks": "blocks appended to block tables",
    "preempted": "requests that lost their slots, with the reasons",
    "refused": "requests examined and not in the step, with the reasons",
    "stop": "where admission ended; None: all waiting requests were admitted",
    "first_blocked": "the first request that waits for it",
    "num_behind": "requests behind that one",
    "admitted": "requests that enter a slot",
    "lookups": "what the prefix cache had of their tokens",
    "cause": "why it was found in the prefix cache, or was not",
    "ended": "requests that end",
    "num_running": "requests with a slot, after the step",
    "num_waiting": "requests without one",
    "num_free_blocks": "blocks without a reference",
    "limits": "the scheduler's limits",
    "scheduling": "the scheduling settings",
    "version": "of Slotwise",
    "model": "its folder or name",
    "dtype": "type of the weights",
    "device": "what computes",
    "started_ns": "monotonic nanoseconds of the same moment",
    "eos_token_ids": "the model's end tokens",
    "seed": "of its sampling",
    "first_ns": "its first byte was written",
    "last_ns": "its last byte was written",
    "num_events": "server-sent events of the response",
    "state": "the state of the engine",
    "missed": "the number of entries",
    "objection": "why not",
    "compiled": "grammars that requests waited for",
    "ended_ns": "monotonic nanoseconds",
    "result": "what was computed",
    "outcome": "what the commit made of it",
    "inputs": "what the engine read and was told before",
    "counters": "of the engine, afterwards",
}
REASON = re.compile(r'^[A-Z_]+ = "(?P<name>\w+)"  # (?P<note>.+)$', re.MULTILINE)


def step_records() -> str:
    """Returns the plan, the result and the record of a step, with their parts and the picture of a row."""
    text = inspect.cleandoc(record.__doc__ or "")
    return "\n\n".join((text.partition("\n")[2].strip("\n"), _records(_classes_of(record))))


def entries() -> str:
    """Returns the entries of an event log, and then the records that they contain."""
    kinds = [kind for kind in get_args(event_log.Entry) if kind is not StepRecord]
    parts = [f"### {kind.__name__}\n\n`\"kind\": \"{kind.__struct_config__.tag}\"`\n\n{_renamed(kind)}"
             for kind in kinds]
    inner = [Add, Timing, RequestSpec, KVTransfer]
    return "\n\n".join((*parts, _records(inner)))


def reasons_of_refusals() -> str:
    """Returns the table of the reasons for which an unfinished request does not run."""
    return _constants("reason", reasons)


def causes_of_misses() -> str:
    """Returns the table of why spans of prompts were found in the prefix cache, or were not."""
    return _constants("cause", cache_causes)


def _constants(name: str, module: ModuleType) -> str:
    found = REASON.finditer(inspect.getsource(module))
    return table((name, "meaning"), [(code(one["name"]), sentence(one["note"])) for one in found])


def parts_of_a_request() -> str:
    """Returns the table of the parts into which an explanation divides a request's time."""
    return table(("part", "meaning"), [(code(part), sentence(meaning)) for part, meaning in explain.PARTS.items()])


def _renamed(kind: type) -> str:
    """Returns the documentation of an entry, with its fields' names as in the file."""
    import msgspec

    text = documented(kind, COMMON)
    for field in msgspec.structs.fields(kind):
        if field.encode_name != field.name:
            text = text.replace(f"| `{field.name}` |", f"| `{field.encode_name}` |")
    return text


def _records(kinds: list[type]) -> str:
    return "\n\n".join(f"### {kind.__name__}\n\n{documented(kind, COMMON)}" for kind in kinds)


def _classes_of(module: ModuleType) -> list[type]:
    """Returns the tuples and structs that a module defines, in the order of its source."""
    return [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__
            and getattr(kind, "__annotations__", None) and not issubclass(kind, Exception)]
