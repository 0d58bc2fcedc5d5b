"""Reads a Dockerfile: stages of instructions, without running any."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

CONTINUED = re.compile(r"\\\n")
ASSIGNED = re.compile(r"\$\{(\w+)\}")


@dataclass
class Stage:
    base: str  # an image, or an earlier stage
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction and the rest of its line

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]

    def command(self, instruction: str) -> list[str]:
        """The only command of ENTRYPOINT, or of CMD after HEALTHCHECK, as a list of words."""
        (rest,) = self.all(instruction)
        words: list[str] = json.loads(rest[rest.index("["):])
        return words


def read(path: Path) -> dict[str, Stage]:
    """The stages of a Dockerfile by name, in their order; `ARG`s before the first stage stand in for their names."""
    lines = [line for line in CONTINUED.sub("", path.read_text()).splitlines() if line and not line.startswith("#")]
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in lines:
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            base, word, name = ASSIGNED.sub(lambda found: arguments[found[1]], rest).split()
            assert word == "AS"
            stage = stages[name] = Stage(base, name)
        elif stage is None:
            assert instruction == "ARG", line
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            stage.steps.append((instruction, rest))
    return stages


def line_of(stages: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and the stages it is built on, the first one first."""
    stage = stages[name]
    return [*(line_of(stages, stage.base) if stage.base in stages else []), stage]


def environment(stages: dict[str, Stage], name: str) -> dict[str, str]:
    """What the `ENV`s of a stage set, with `$PATH` as it is written."""
    assigned = [word for stage in line_of(stages, name) for rest in stage.all("ENV") for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in assigned)
