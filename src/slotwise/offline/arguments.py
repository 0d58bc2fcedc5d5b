"""Arguments of `LLM` and `AsyncLLM` and of their calls: the engine's settings, and vLLM's arguments and methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from slotwise.compat.vllm import CALL, METHODS, RULES, SAME, is_neutral
from slotwise.compute.model.model_registry import find
from slotwise.core.setting_fields import BYTE_UNITS, UNITS, aliases_of, settings_of, whole, with_unit
from slotwise.engine.config import DTYPE_NAMES, RETIRED, ConfigError, EngineConfig, ModelOptions
from slotwise.errors import nearest
from slotwise.platform.progress_bar import ProgressBar

SETTINGS = tuple(name for name in (*settings_of(EngineConfig), "tiers") if name not in {"model", *RULES})
ALIASES = aliases_of(EngineConfig)
OWN = {  # obeyed in addition to the settings
    "model": f"{settings_of(EngineConfig)['model'].help}; None: the built-in model",
    **{name: settings_of(ModelOptions)[name].help for name in ("override_generation_config", "pooler_config")},
    "chat_template": "a chat template or its file, in the place of the model's",
    "served_model_name": "the name, or a list whose first is the name, in the labels of metrics",
    "stream_interval": "tokens of each output of AsyncLLM after the first, 1 or more",
    "use_tqdm_on_load": "False: no progress bar on a terminal while the model is downloaded and read",
    "disable_log_stats": "False: LLM counts what get_metrics() returns, AsyncLLM logs its load; None is True",
    **{alias: f"vLLM's name of {name}" for alias, name in ALIASES.items()},
    "event_log": "a file to which LLM writes the event log; an older one is replaced",
}
KINDS = {"disable_log_stats": bool, "use_tqdm_on_load": bool, "served_model_name": str | list | tuple,
         "chat_template": str | Path}
FITTING = (-1, "auto")  # vLLM's values of max_model_len for as many tokens as fit
SIZES = {alias: {"tokens": UNITS, "bytes": BYTE_UNITS}[one.unit] for name, one in settings_of(EngineConfig).items()
         if one.unit in ("tokens", "bytes") for alias in (name, *one.aliases)}

logger = logging.getLogger(__name__)


class Arguments(NamedTuple):
    """What the arguments say."""

    config: EngineConfig
    name: str  # of the model, in metrics
    override: Mapping[str, Any] | None = None  # fields that replace those of the generation_config.json
    chat_template: str | Path | None = None  # a template or its file; None: the model's own
    event_log: str | Path = ""
    stream_interval: int = 1
    log_stats: bool = False
    pooler_config: Mapping[str, Any] | None = None  # replaces what the checkpoint says of pooling
    shows_progress: bool = True  # of loading, on a terminal

    @classmethod
    def of(cls, model: str | Path | None, given: Mapping[str, Any]) -> Arguments:
        """Args: given: by name; None stands for a default.

        Raises:
            CheckpointError: there is no such model.
            ConfigError: one line that names the argument and says what to do.
        """
        model = str(model) if isinstance(model, Path) else model
        check(model, given)
        given = {name: _value(name, value) for name, value in given.items() if value is not None}
        settings = {name: given[name] for name in (*SETTINGS, *RETIRED) if name in given}
        settings |= {name: given[alias] for alias, name in ALIASES.items() if alias in given}
        if "kv_cache_memory_bytes" in given:
            settings.pop("gpu_memory_utilization", None)  # as in vLLM, where both may be given
        if settings.get("max_model_len") in FITTING:
            del settings["max_model_len"]
        config = EngineConfig.of(model=model or "", **settings)
        shows_progress = given.get("use_tqdm_on_load", True)
        with ProgressBar(logger.info, is_wanted=shows_progress) as bar:
            found = find(model or "", bar)
        config = replace(config, model=str(found.path))
        named, interval = given.get("served_model_name") or found.name, given.get("stream_interval", 1)
        if wrong := whole(1).objection(interval):
            raise ConfigError(f"stream_interval {wrong}")
        if idle := [name for name in given if name in RULES]:
            logger.info("without effect: %s", ", ".join(idle))
        return cls(config, named if isinstance(named, str) else str(named[0]), given.get("override_generation_config"),
                   given.get("chat_template"), given.get("event_log", ""), interval,
                   given.get("disable_log_stats") is False, given.get("pooler_config"), shows_progress)


def check(model: str | None, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that is unknown, or not supported with its value."""
    for name, value in given.items():
        if name in RULES:
            rule = RULES[name]
            if not is_neutral(value, rule.accepted) and not (SAME in rule.accepted and value == model):
                raise ConfigError(f"{name} {value!r:.40} is not supported: {rule.told(str)[1]}")
        elif name not in (*SETTINGS, *OWN, *RETIRED):
            near = nearest(name, (*SETTINGS, *OWN, *RULES))
            raise ConfigError(f"there is no argument {name!r:.40}" + f"; did you mean {near}?" * bool(near))
        elif value is not None and name in KINDS and not isinstance(value, KINDS[name]):
            raise ConfigError(f"{name} {value!r:.40}: {OWN[name]}")


def _value(name: str, value: Any) -> Any:
    """A value as `EngineConfig` has it: sizes are numbers, types have one name."""
    if name == "dtype":
        text = str(value).removeprefix("torch.")
        return DTYPE_NAMES.get(text, text)
    if name in SIZES and isinstance(value, str):
        number = int(value) if value.isdecimal() and value.isascii() else with_unit(value, SIZES[name])
        return value if number is None or number.denominator != 1 else int(number)
    return value


class EngineArgs:
    """Arguments of `LLM` or `AsyncLLM`, by attribute: `LLM.from_engine_args` and `AsyncLLM.from_engine_args` take them.

    Raises:
        ConfigError: an argument is unknown, or not supported with its value.
    """

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        check(model, arguments)
        vars(self).update(arguments, model=model)


class AsyncEngineArgs(EngineArgs):
    """vLLM's name of `EngineArgs` for `AsyncLLM`."""


def check_call(given: Mapping[str, Any]) -> None:
    """Raises TypeError for an unknown argument of a call, and ValueError for one that is not supported."""
    for name, value in given.items():
        if name not in CALL:
            near = nearest(name, CALL)
            raise TypeError(f"there is no argument {name!r}" + f"; did you mean {near}?" * bool(near))
        if not is_neutral(value, CALL[name]):
            raise ValueError(f"{name} {value!r:.40} is not supported: leave it out")


class VllmMethods:
    """Base of a class that has vLLM's name: a method without an implementation says what to do instead."""


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: object, *arguments: object, **given: object) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__}.{name} is not supported: {METHODS[name]}")

    return method


for _name in METHODS:
    setattr(VllmMethods, _name, _refused(_name))
