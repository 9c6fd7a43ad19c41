"""Validation errors of pydantic as problems of a file: in words, with a hint, at a position."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from engine.config import explain_paths, field_names
from tuner.space.fields import models_in
from tuner.space.source import Document, Path


def shorten(value: object, limit: int = 60) -> str:
    """Return a value as text of bounded length."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def file_problems(error: ValidationError, document: Document, root: type[BaseModel]) -> list[Any]:
    """Return the problems of a whole file validated against `root`."""
    problems = []
    for detail in error.errors(include_url=False):
        path: Path = tuple(detail["loc"])
        given = detail["input"]
        if detail["type"] == "union_tag_invalid" and isinstance(given, Mapping) and "kind" in given:
            path = (*path, "kind")
        message, hint = in_words(detail, document.booleans.get(path))
        name = ".".join(str(part) for part in path)
        if detail["type"] == "missing":
            parent = ".".join(str(part) for part in path[:-1]) or "the file"
            problems.append(document.problem(path, f"{parent} has no {path[-1]}", hint))
        elif detail["type"] == "extra_forbidden":
            hint = did_you_mean(str(path[-1]), _siblings(root, path))
            problems.append(document.problem(path, f"{name}: no such key", hint, key=True))
        else:
            problems.append(document.problem(path, f"{name}: {message}" if name else message, hint))
    return problems


def value_problem(error: ValidationError, document: Document, place: Path, value: object) -> tuple[Path, str, str]:
    """Return (place, message, hint) of one value refused by its type: the first of its problems.

    A value may be a mapping; the place is then the part of it that is wrong.
    """
    detail = error.errors(include_url=False)[0]
    inner: Path = ()
    for part in detail["loc"]:  # the location also names union members, which the file does not have
        if isinstance(value, Mapping) and part in value:
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        inner = (*inner, part)
    if detail["type"] == "union_tag_invalid" and isinstance(value, Mapping) and "kind" in value:
        inner = (*inner, "kind")
    message, hint = in_words(detail, document.booleans.get((*place, *inner)))
    if detail["type"] == "missing":
        message = f"{detail['loc'][-1]} is missing"
    if detail["type"] == "extra_forbidden":
        message, hint = "no such field", did_you_mean(str(inner[-1]), field_names())
    where = "".join(f"{part}: " for part in inner if isinstance(part, str))
    return (*place, *inner), where + message, hint


def config_problems(error: ValidationError, root: type[BaseModel]) -> list[tuple[str, str, str]]:
    """Return (dotted path, message, hint) per problem of a configuration."""
    result = []
    for path, message in explain_paths(error, root):
        text, _, meant = message.partition(", did you mean ")
        result.append((path, text, f"did you mean {meant}" if meant else ""))
    return result


def in_words(detail: ErrorDetails, boolean: str | None) -> tuple[str, str]:
    """Return (message, hint)."""
    given = detail["input"]
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if boolean is not None and (isinstance(given, bool) or detail["type"] == "union_tag_invalid"):
        kind = "a word or number is meant" if detail["type"] != "dict_type" else "a mapping is meant"
        return f"YAML reads {boolean} as a boolean; {kind} here", f'write "{boolean}" if it is the word'
    if detail["type"] == "literal_error":
        expected = expected_words(detail)
        return f"{shorten(given)} is not one of {', '.join(expected)}", did_you_mean(str(given), expected, all_=False)
    if detail["type"] == "union_tag_invalid":
        expected = expected_words(detail, "expected_tags")
        tag = str(detail.get("ctx", {}).get("tag", ""))
        return f"kind {tag[:40]!r} is not one of {', '.join(expected)}", did_you_mean(tag, expected, all_=False)
    if detail["type"] == "union_tag_not_found":
        return "a mapping with a `kind` is meant", ""
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"a mapping is meant, got {shorten(given)}", ""
    if detail["type"] == "string_pattern_mismatch":
        return f"{shorten(given)} is no name", "letters, digits, dot, underscore, hyphen; at most 64"
    if detail["type"] in ("value_error", "missing", "extra_forbidden"):
        return message, ""
    message = message[0].lower() + message[1:]
    message = message.replace("input should", "should", 1)
    if isinstance(given, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", given):
        return f"{message}, got the text {shorten(given)}", "YAML wants 1.0e+3 where 1e3 is meant"
    if isinstance(given, Mapping | list):
        return f"{message}, got a {'mapping' if isinstance(given, Mapping) else 'list'}", ""
    return f"{message}, got {shorten(given)}", ""


def expected_words(detail: ErrorDetails, key: str = "expected") -> list[str]:
    """Return the words that pydantic would have taken."""
    text = str(detail.get("ctx", {}).get(key, "")).replace(" or ", ", ")
    return [word.strip("'") for word in text.split(", ") if word]


def did_you_mean(word: str, words: list[str] | tuple[str, ...], *, all_: bool = True) -> str:
    """Return `did you mean …?`; else, with `all_`, the words to choose from where they are few."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.55)
    if near:
        return f"did you mean {near[0]}?"
    return f"one of {', '.join(words)}" if all_ and 0 < len(words) <= 12 else ""


def _siblings(root: type[BaseModel], path: Path) -> list[str]:
    """Return the keys that are allowed where `path` ends."""
    model: type[BaseModel] | None = root
    for part in path[:-1]:
        if model is None or isinstance(part, int):
            continue
        info = next((info for name, info in model.model_fields.items() if (info.alias or name) == part), None)
        models = _element_models(info.annotation) if info is not None else []
        model = models[0] if models else None
    return [info.alias or name for name, info in model.model_fields.items()] if model is not None else []


def _element_models(annotation: Any) -> list[type[BaseModel]]:
    from typing import get_args

    found = models_in(annotation)
    return found or [model for item in get_args(annotation) for model in models_in(item)]
