"""Defaults of requests that a model's files give: how it samples, and how it makes vectors.

    generation_config.json, the checkpoint's or a named one  ─►  override_generation_config  ─►  a request's own fields
    1_Pooling/config.json, or a GGUF file's `pooling_type`   ─►  pooler_config               ─►  a request's own fields

The setting `generation_config` is `auto` (the checkpoint's file), `vllm` (none: neutral defaults), or a path.  As in
vLLM, `max_new_tokens` is the default of `max_tokens`; where the operator gives it, by an override or in a named file,
it is also the most that any request of a server gets.  A checkpoint without sentence-transformers' files pools as
its family does, and normalizes.  Names of `pooler_config` are vLLM's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slotwise.compute.model.checkpoint import CONFIG
from slotwise.compute.model.fields import Fields, read_json
from slotwise.compute.model.generation_config import NEUTRAL, NOT_OBEYED, named_file, read_generation
from slotwise.compute.model.sentence_modules import (
    classifier_pooling,
    makes_vectors,
    read_labels,
    read_modules,
    read_prompts,
)
from slotwise.core.params import CLS, LAST, MEAN, POOLING_TYPES, RANGES, PoolingSpec
from slotwise.core.request_defaults import PoolingDefaults, SamplingDefaults
from slotwise.engine.config import ConfigError, EngineConfig
from slotwise.errors import nearest
from slotwise.observe import lines
from slotwise.platform.files import has_part
from slotwise.platform.gguf_file import open_model

OVERRIDE = "override_generation_config"
LENGTH = "max_new_tokens"
BOUND = f"--override-generation-config '{{\"{LENGTH}\": 1024}}'"  # as it is typed
OBEYED = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {
    LENGTH: "max_tokens"}  # names in the file, and in `SamplingParams`
NONE: tuple[Any, ...] = (None, [], {}, "")
IGNORED: dict[str, tuple[Any, ...]] = {  # not implemented; with the values that change no answer
    "do_sample": (None, True), "num_beams": (None, 1), "num_beam_groups": (None, 1), "diversity_penalty": (None, 0),
    "penalty_alpha": (None, 0), "dola_layers": NONE, "max_length": NONE, "min_length": (None, 0),
    "min_new_tokens": (None, 0), "max_time": NONE, "stop_strings": NONE, "top_h": NONE, "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0), "eta_cutoff": (None, 0), "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1), "encoder_no_repeat_ngram_size": (None, 0), "bad_words_ids": NONE,
    "force_words_ids": NONE, "constraints": NONE, "forced_bos_token_id": NONE, "forced_eos_token_id": NONE,
    "exponential_decay_length_penalty": NONE, "suppress_tokens": NONE, "begin_suppress_tokens": NONE,
    "forced_decoder_ids": NONE, "sequence_bias": NONE, "token_healing": (None, False), "guidance_scale": (None, 1),
    "watermarking_config": NONE, "num_return_sequences": (None, 1), **NOT_OBEYED,
}  # fmt: skip

logger = logging.getLogger(__name__)


def read_defaults(config: EngineConfig, override: Mapping[str, Any] | None = None) -> SamplingDefaults:
    """The defaults for `config.model` and `config.generation_config`, changed by `override`.

    `override` has fields of a generation_config.json; null stands for the neutral default.

    Raises:
        CheckpointError: there is no such file, or a field of it is malformed.
        ConfigError: a field of `override` is unknown or malformed.
    """
    named = named_file(config.generation_config)
    fields = read_generation(Path(config.model), named)
    if config.generation_config == NEUTRAL:
        fields = Fields({}, fields.where)
    values: dict[str, Any] = {name: _checked(fields, name) for name in OBEYED}
    changes = _changes(override if override is not None else {})
    chosen = {OBEYED[name]: value for name, value in (values | changes).items() if value is not None}
    limit = chosen.get("max_tokens") if named is not None else changes.get(LENGTH)
    ignored = [name for name, neutral in IGNORED.items() if fields.values.get(name) not in neutral]
    if fields.has(LENGTH) and "max_length" in ignored:  # which counts only without the other
        ignored.remove("max_length")
    has_own = any(value is not None for value in values.values())
    sources = [*([fields.where] if has_own or ignored else []), *([OVERRIDE] if changes else [])]
    return SamplingDefaults(**chosen, max_tokens_limit=limit, source=" and ".join(sources), ignored=tuple(ignored))


def _checked(fields: Fields, name: str) -> float | None:
    """A field of the file, within the range of the parameter it stands for; None: absent."""
    if not fields.has(name):
        return None
    try:
        return RANGES[OBEYED[name]].checked(fields.values[name])
    except ValueError as error:
        raise fields.error(name, f"{error}; generation_config {NEUTRAL} leaves it out") from None


def _changes(override: Mapping[str, Any]) -> dict[str, Any]:
    """The operator's changes.  Raises ConfigError."""
    if not isinstance(override, Mapping):
        raise ConfigError(f"{OVERRIDE} must be an object of fields, not {override!r:.40}")
    changes: dict[str, Any] = {}
    for name, value in override.items():
        if name not in OBEYED:
            raise ConfigError(f"{OVERRIDE}: {name!s:.40} is not supported; these are: {', '.join(OBEYED)}")
        try:
            changes[name] = None if value is None else RANGES[OBEYED[name]].checked(value)
        except ValueError as error:
            raise ConfigError(f"{OVERRIDE}: {name} {error}") from None
    return changes


def announce(defaults: SamplingDefaults, longest: int | None = None) -> None:
    """Logs the defaults in one line, and in others what a chat's length is by default, and what is not obeyed.

    Args:
        longest: tokens of a server's prompts and outputs; None: there is no server.
    """
    if given := defaults.given:
        shown = ", ".join(f"{name} {value}" for name, value in given.items())
        most = f", at most {defaults.max_tokens_limit}" if defaults.max_tokens_limit is not None else ""
        lines.tell(logger, f"sampling by default: {shown}{most} (from {defaults.source}; a request's own fields win)",
                   {"default_sampling_params": given, "max_tokens_limit": defaults.max_tokens_limit})
    if longest is not None and defaults.max_tokens is None:
        lines.tell(logger, f"a chat that names no max_tokens may use the whole context of {longest} tokens, and a "
                   f"small model may repeat itself until then: {BOUND} bounds every output",
                   {"default_max_tokens": None, "max_model_len": longest})
    if defaults.ignored:
        logger.warning("%s: %s would change the answers and %s not implemented: requests are served without",
                       defaults.source, ", ".join(defaults.ignored), "is" if len(defaults.ignored) == 1 else "are")


OF_GGUF = (LAST, MEAN, CLS, LAST, "rank")  # by the number in a file; 0: none
TYPES = ("pooling_type", "seq_pooling_type")  # names of one field, as vLLM's versions have it
NORMALIZE = ("normalize", "use_activation")


def read_pooling(folder: str | Path, override: Mapping[str, Any] | None = None) -> PoolingDefaults:
    """The defaults of the checkpoint in `folder`, changed by `override`.

    Raises:
        CheckpointError: a file is malformed.
        ConfigError: a field of `override` is unknown or malformed.
    """
    found, changes = _of_checkpoint(Path(folder)), _pooling_changes(override)
    named = "pooling_type" in changes and not found.labels
    return replace(found, params=replace(found.params, **changes), objection="" if named else found.objection,
                   leaves_type=found.leaves_type and "pooling_type" not in changes)


def _pooling_changes(override: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(override, Mapping | None):
        raise ConfigError(f"pooler_config must be an object of fields, not {override!r:.40}")
    changes: dict[str, Any] = {}
    for name, value in (override or {}).items():
        if name in TYPES:
            kind = str(value).lower()
            if kind not in POOLING_TYPES:
                allowed = ", ".join(POOLING_TYPES).upper()
                raise ConfigError(f"pooler_config: {name} must be one of {allowed}, not {value!r:.40}")
            changes["pooling_type"] = kind
        elif name in NORMALIZE:
            if not isinstance(value, bool):
                raise ConfigError(f"pooler_config: {name} must be true or false, not {value!r:.40}")
            changes["normalize"] = value
        else:
            near = nearest(str(name), (*TYPES, *NORMALIZE))
            raise ConfigError(f"pooler_config: {name!s:.40} is not supported" + f"; did you mean {near}?" * bool(near))
    return changes


def _of_gguf(path: Path) -> PoolingDefaults:
    """What a GGUF file says; its family's pooling where it says nothing, or that it pools none."""
    metadata = open_model(path).metadata
    key = f"{metadata.text('general.architecture')}.pooling_type"
    kind = metadata.integer(key, 0, maximum=len(OF_GGUF) - 1)
    if OF_GGUF[kind] not in POOLING_TYPES:
        return PoolingDefaults(objection=f"{key} is {kind} ({OF_GGUF[kind]}), which is not supported")
    return PoolingDefaults(PoolingSpec(OF_GGUF[kind]), leaves_type=not kind, is_declared=kind > 0)


def _of_checkpoint(folder: Path) -> PoolingDefaults:
    """What the files say; an objection where they say what is not implemented."""
    if folder.is_file():
        return _of_gguf(folder)
    config = read_json(folder / CONFIG) if has_part(folder / CONFIG) else Fields({}, str(folder / CONFIG))
    modules, prompts, labels = read_modules(folder), read_prompts(folder), read_labels(config)
    named = modules.pooling or classifier_pooling(config)
    params = PoolingSpec(named or LAST, normalize=modules.normalizes)
    dimensions = config.integers("matryoshka_dimensions") if config.has("matryoshka_dimensions") else ()
    objection = "its checkpoint has a head of labels: it classifies and scores" if labels.names else modules.objection
    return PoolingDefaults(
        params, not named, objection, modules.is_declared or makes_vectors(config), labels.names, labels.activation,
        dimensions, prompts.by_name, prompts.default)
