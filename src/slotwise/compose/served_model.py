"""What the API process reads of a model before it is served: names, defaults, tokenizer, template, output formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from slotwise.compose.pooling import read_pooling
from slotwise.compose.sampling_defaults import read_defaults
from slotwise.engine.config import EngineConfig
from slotwise.model.checkpoint import locate
from slotwise.server.parsers.output_format import OutputFormat, output_format
from slotwise.server.settings import ServerSettings
from slotwise.text.chat_source import find_chat_template, find_tool_template
from slotwise.text.tokenizer import Tokenizer


class ModelOptions(NamedTuple):
    """Options of the command line that hold for every model that the server serves."""

    names: tuple[str, ...] = ()  # by which clients ask for it; (): as it is given
    template: str | None = None  # a chat template's file; None: the model's own
    generation: Mapping[str, Any] | None = None  # changes to its generation_config.json
    pooling: Mapping[str, Any] | None = None  # changes to its pooling


class ServedModel(NamedTuple):
    """A model as its files describe it; no weights."""

    config: EngineConfig
    settings: ServerSettings
    tokenizer: Tokenizer
    template: str | None  # the source of its chat template
    tool_template: str | None  # of that for conversations with tools, where it has one

    def output_format(self, *, ignores_tools: bool) -> OutputFormat:
        """How its outputs are parsed.  Raises ValueError.  Args: ignores_tools: the template does."""
        settings = self.settings
        return output_format(
            settings.tool_call_parser, settings.reasoning_parser, settings.enable_auto_tool_choice,
            self.tool_template or self.template or "", self.tokenizer.special_by_text, ignores_tools=ignores_tools)


def read_model(config: EngineConfig, settings: ServerSettings, options: ModelOptions) -> ServedModel:
    """Reads what `config.model` needs to be served.

    Raises:
        OSError, TokenizerError, ChatTemplateError, ConfigError: one line that says what is wrong.
    """
    tokenizer = Tokenizer.load(config.model)
    model = ServedModel(config, settings, tokenizer, find_chat_template(config.model, options.template),
                        find_tool_template(config.model, options.template))
    model.output_format(ignores_tools=True)  # a parser that does not fit is reported before anything starts
    return model


def read_other(before: ServedModel, options: ModelOptions, path: str, name: str) -> ServedModel:
    """Reads another model, to be served with the options of the first.

    Args:
        name: by which clients ask for it; "": one of the options, else `path`.

    Raises:
        OSError, CheckpointError, TokenizerError, ChatTemplateError, ConfigError: one line that says what is wrong.
    """
    config = replace(before.config, model=str(locate(path)))
    first, *others = (name,) if name else options.names or (path,)
    settings = replace(
        before.settings, served_model_name=first, more_model_names=tuple(others),
        sampling_defaults=read_defaults(config, options.generation),
        pooling_defaults=read_pooling(config.model, options.pooling))
    return read_model(config, settings, options)
