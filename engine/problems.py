"""Pydantic's validation errors in the words of the file: dotted path, what is wrong, what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_UNION_MEMBER = re.compile(r"[\w-]*\[.*\]")  # pydantic names the tried member of a plain union, and "[key]"
_MAPPING_TYPES = {"model_type", "model_attributes_type", "dict_type", "union_tag_not_found"}


def problems(error: ValidationError, root: type[BaseModel]) -> list[tuple[str, str]]:
    """Return (dotted path, one line) per problem of a document validated against `root`."""
    found: dict[str, list[str]] = {}
    details = error.errors(include_url=False)
    for detail in details:
        if detail["type"] == "too_short" and _has_inner(detail, details):
            continue  # a list is short only because its items were refused
        parts, models = _place(detail, root)
        path, message = _words(detail, parts, models, root)
        found.setdefault(path, []).append(message)
    return [(path, _joined(messages)) for path, messages in found.items()]


def field_paths(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every field below `root`, list items left out."""
    for name, annotation in _fields(root):
        yield prefix + name
        for model in _models(annotation, through_lists=False):
            yield from field_paths(model, f"{prefix}{name}.")


def _has_inner(detail: ErrorDetails, details: list[ErrorDetails]) -> bool:
    outer = detail["loc"]
    return any(len(other["loc"]) > len(outer) and other["loc"][: len(outer)] == outer for other in details)


def _joined(messages: list[str]) -> str:
    boolean = next((message for message in messages if message.startswith("YAML read")), None)
    return boolean or "; or: ".join(dict.fromkeys(messages))


def _fields(model: type[BaseModel]) -> list[tuple[str, Any]]:
    return [(info.alias or name, info.annotation) for name, info in model.model_fields.items()]


def _models(annotation: Any, through_lists: bool = True) -> list[type[BaseModel]]:
    """Return the models an annotation may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if not through_lists and getattr(annotation, "__origin__", None) in (tuple, list, dict):
        return []
    return [model for part in get_args(annotation) for model in _models(part, through_lists)]


def _kind(model: type[BaseModel]) -> object:
    field = model.model_fields.get("kind")
    return field.default if field else None


def _place(detail: ErrorDetails, root: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the path as the file has it, and the models that may stand at its end.

    For an unknown field: the models that may stand around it. A discriminated union puts its tag into the
    location, where the file has no such level.
    """
    parts: list[str] = []
    models: list[type[BaseModel]] = [root]
    unknown = detail["type"] == "extra_forbidden"
    for part in detail["loc"][:-1] if unknown else detail["loc"]:
        if isinstance(part, int):
            parts.append(str(part))
            continue
        named = [annotation for model in models for name, annotation in _fields(model) if name == part]
        tagged = [model for model in models if _kind(model) == part]
        if named:
            parts.append(part)
            models = list(dict.fromkeys(model for annotation in named for model in _models(annotation)))
        elif tagged:
            models = tagged
        elif not _UNION_MEMBER.fullmatch(part):
            parts.append(part)
    if unknown:
        parts.append(str(detail["loc"][-1]))
    return parts, models


def _words(
    detail: ErrorDetails, parts: list[str], models: list[type[BaseModel]], root: type[BaseModel]
) -> tuple[str, str]:
    """Return (dotted path, message)."""
    path, given, kind = ".".join(parts), detail["input"], detail["type"]
    message = detail["msg"].removeprefix("Value error, ")
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return path, "no such field" + _field_hint(parts, models, root)
    if kind == "missing":
        return path, "is missing"
    if kind == "union_tag_invalid":
        if isinstance(given, Mapping) and isinstance(given.get("kind"), bool):
            return f"{path}.kind", "YAML read this as a boolean; a word is meant here, so quote it"
        tags = [word.strip("' ") for word in str(context.get("expected_tags", "")).split(",")]
        tag = _short(given.get("kind") if isinstance(given, Mapping) else given)
        return f"{path}.kind", f"{tag} is none of {', '.join(tags)}" + _near(tag.strip("'"), tags)
    if kind in _MAPPING_TYPES:
        return path, _mapping_words(given, models)
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        if words:
            return path, f"{_short(given)} is none of {', '.join(words)}" + _near(str(given), words)
    if kind == "string_type" and isinstance(given, int | float):
        return path, f'a word is meant here, so quote it: "{given}"'
    if kind == "too_short":
        return path, "is empty"
    if kind == "value_error":
        return path, message
    return path, f"{message[0].lower()}{message[1:]}, got {_short(given)}"


def _mapping_words(given: object, models: list[type[BaseModel]]) -> str:
    kinds = [str(_kind(model)) for model in models if _kind(model) is not None]
    if isinstance(given, bool):
        return "YAML read this as a boolean; a mapping is meant here"
    if isinstance(given, Mapping):
        return f"kind is missing: one of {', '.join(kinds)}"
    if isinstance(given, str) and given in kinds:
        return f"a mapping is meant, did you mean {{kind: {given}}}?"
    return f"a mapping is meant, got {_short(given)}"


def _field_hint(parts: list[str], models: list[type[BaseModel]], root: type[BaseModel]) -> str:
    """Return the sibling that is spelt nearly so, else a field of that name elsewhere."""
    word, parent = parts[-1], parts[:-1]
    siblings = [name for model in models for name, _ in _fields(model)]
    near = difflib.get_close_matches(word, siblings, n=1)
    if near:
        return f", did you mean {'.'.join([*parent, near[0]])}?"
    elsewhere = {path.rsplit(".", 1)[-1]: path for path in reversed(list(field_paths(root)))}
    near = difflib.get_close_matches(word, list(elsewhere), n=1, cutoff=0.8)
    return f", did you mean {elsewhere[near[0]]}?" if near else ""


def _near(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f", did you mean {near[0]}?" if near else ""


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
