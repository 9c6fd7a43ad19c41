"""Dotted paths of EngineConfig: which exist, for which kinds, and what type a value must have."""

from __future__ import annotations

import difflib
import types
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from engine.config import EngineConfig


@dataclass(frozen=True)
class Variant:
    """One place where a path exists: under these kinds, with this type."""

    kinds: tuple[tuple[str, str], ...]  # ((path of a kind, its value), …), outermost first
    adapter: TypeAdapter[Any]
    description: str
    default: Any  # `...` where the field is required


class NoSuchPath(ValueError):
    """A path that is no field; `hint` says what is."""

    def __init__(self, message: str, hint: str) -> None:
        self.hint = hint
        super().__init__(message)


@cache
def resolve(path: str) -> tuple[Variant, ...]:
    """Return every variant of a dotted path.

    Raises:
        NoSuchPath: the path leads to no field.
    """
    owners: list[tuple[tuple[tuple[str, str], ...], type[BaseModel]]] = [((), EngineConfig)]
    parts = path.split(".")
    for depth, part in enumerate(parts):
        found = [(kinds, model.model_fields[part]) for kinds, model in owners if part in model.model_fields]
        if not found:
            raise _no_such_path(path, parts, depth, bool(owners))
        if depth == len(parts) - 1:
            return tuple(_variant(kinds, info) for kinds, info in found)
        here = ".".join(parts[: depth + 1])
        owners = [
            ((*kinds, *_kind_of(model, here)), model) for kinds, info in found for model in models_in(info.annotation)
        ]
    raise NoSuchPath("the path is empty", "")


def _no_such_path(path: str, parts: list[str], depth: int, inside: bool) -> NoSuchPath:
    if not inside:
        parent = ".".join(parts[:depth])
        return NoSuchPath(f"{path} is no config field", f"{parent} has no fields of its own")
    same = [known for known in all_paths() if known.split(".")[-1] == parts[-1]]
    near = same or difflib.get_close_matches(path, all_paths(), n=1, cutoff=0.5)
    if near:
        return NoSuchPath(f"{path} is no config field", f"did you mean {near[0]}?")
    return NoSuchPath(f"{path} is no config field", "`tuner schema --config` lists every field")


def _variant(kinds: tuple[tuple[str, str], ...], info: FieldInfo) -> Variant:
    annotated: Any = info.annotation
    for extra in info.metadata:
        annotated = Annotated[annotated, extra]
    if info.discriminator is not None:
        from pydantic import Field

        annotated = Annotated[annotated, Field(discriminator=info.discriminator)]
    default = ... if info.is_required() else info.get_default(call_default_factory=False)
    return Variant(kinds, TypeAdapter(annotated), info.description or "", default)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a type is, or that its union holds."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return models_in(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [model for member in get_args(annotation) for model in models_in(member)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return []


def kind_of(model: type[BaseModel]) -> str | None:
    """Return a union member's kind."""
    field = model.model_fields.get("kind")
    if field is None or get_origin(field.annotation) is not Literal:
        return None
    values = get_args(field.annotation)
    return str(values[0]) if len(values) == 1 else None


def _kind_of(model: type[BaseModel], path: str) -> tuple[tuple[str, str], ...]:
    kind = kind_of(model)
    return ((f"{path}.kind", kind),) if kind is not None else ()


@cache
def unions() -> dict[str, dict[str, frozenset[str]]]:
    """Return {path of a union field: {kind: names of its fields}} for the top-level unions."""
    result: dict[str, dict[str, frozenset[str]]] = {}
    for name, info in EngineConfig.model_fields.items():
        models = models_in(info.annotation)
        if len(models) > 1:
            kinds = {kind_of(model): frozenset(model.model_fields) for model in models}
            result[name] = {kind: fields for kind, fields in kinds.items() if kind is not None}
    return result


@cache
def all_paths() -> tuple[str, ...]:
    """Return every dotted path, containers included."""
    paths: dict[str, None] = {}

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, info in model.model_fields.items():
            paths[prefix + name] = None
            for child in models_in(info.annotation):
                walk(child, f"{prefix}{name}.")

    walk(EngineConfig, "")
    return tuple(paths)
