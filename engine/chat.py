"""Chat templates: Jinja from the model's folder, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError

RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}


# What a template's expressions raise on messages of another shape than it expects.
_DATA_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ChatError(ValueError):
    """The template refuses these messages."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; when serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 — typed by Jinja's base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: object, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike Jinja's filter, do not escape for HTML: the text is for a model."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # the output is a prompt, not HTML
        extensions=[_Generation, loopcontrols],
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _tojson
    return environment


def _source(folder: Path, options: Mapping[str, Any]) -> str | None:
    """Return the template's text: chat_template.jinja before tokenizer_config.json; of several, `default`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    given = options.get("chat_template")
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _special(options: Mapping[str, Any], name: str) -> str | None:
    value = options.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


class ChatTemplate:
    """A compiled chat template and the special tokens that it may name."""

    def __init__(self, source: str, bos: str | None, eos: str | None) -> None:
        """Compile.

        Raises:
            TemplateSyntaxError: not a template.
        """
        self._template = _environment().from_string(source)
        self._tokens = {name: text for name, text in (("bos_token", bos), ("eos_token", eos)) if text is not None}

    @classmethod
    def read(cls, folder: Path, options: Mapping[str, Any]) -> ChatTemplate | None:
        """Return the template of a model's folder, None when it has none.

        Args:
            options: the folder's tokenizer_config.json.

        Raises:
            ModelError: the template cannot be read or compiled.
        """
        try:
            source = _source(folder, options)
            if source is None:
                return None
            return cls(source, _special(options, "bos_token"), _special(options, "eos_token"))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{folder}: chat_template.jinja cannot be read: {error}") from error
        except TemplateSyntaxError as error:
            raise ModelError(f"{folder}: chat template, line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Return the prompt's text, ending where the assistant starts to speak.

        Args:
            messages: `{"role": …, "content": …}`, in order.
            options: the request's `chat_template_kwargs`, such as `enable_thinking`.

        Raises:
            ChatError: an option's name is taken, or the template refuses the messages.
        """
        taken = sorted(RESERVED & set(options))
        if taken:
            raise ChatError(f"chat_template_kwargs may not set {', '.join(taken)}")
        try:
            return self._template.render(
                **self._tokens, **options, messages=messages, tools=None, add_generation_prompt=True
            )
        except (TemplateError, *_DATA_ERRORS) as error:
            raise ChatError(f"the model's chat template refuses these messages: {error}") from error
