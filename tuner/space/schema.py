"""JSON Schema of search-space files, for editors: the sections' own, with the two open parts filled in."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig
from tuner.space.fields import all_paths
from tuner.space.model import SpaceFile

_WHEN: dict[str, Any] = {
    "type": "object",
    "description": "Active only while every path has one of these values.",
    "additionalProperties": {"type": "array", "minItems": 1},
}
_BOUNDS = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}


def space_schema() -> dict[str, Any]:
    """Return the schema of a search-space file."""
    document = SpaceFile.model_json_schema(by_alias=True)
    config = EngineConfig.model_json_schema()
    definitions = document.setdefault("$defs", {})
    definitions |= config.pop("$defs", {})
    config.pop("required", None)  # the search may give what the fixed part leaves out
    definitions["EngineConfig"] = config
    definitions["Domain"] = _domain()
    properties = document["properties"]
    properties["engine"] = {"$ref": "#/$defs/EngineConfig", "description": properties["engine"]["description"]}
    properties["search"] = {
        "type": "object",
        "description": properties["search"]["description"],
        "properties": {path: {"$ref": "#/$defs/Domain"} for path in all_paths()},
        "additionalProperties": False,
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **standard(document)}


_KEYWORDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def standard(schema: Any) -> Any:
    """Return a schema with the limits that pydantic leaves under its own names renamed to JSON Schema's."""
    if isinstance(schema, list):
        return [standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: standard(value) for key, value in schema.items() if key not in _KEYWORDS}
    for key, keyword in _KEYWORDS.items():
        if key in schema and isinstance(schema[key], int | float):
            renamed[keyword] = schema[key]
        elif key in schema:
            renamed[key] = standard(schema[key])  # a property that happens to be called so
    if renamed.get("exclusiveMinimum", 1) == 0 and renamed.get("minimum", 0) >= 1:
        del renamed["exclusiveMinimum"]  # said twice
    return renamed


def _domain() -> dict[str, Any]:
    def form(name: str, value: dict[str, Any], **more: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: value, **more, "when": _WHEN},
            "required": [name],
            "additionalProperties": False,
        }

    choices = {"type": "array", "minItems": 1}
    step, log = {"type": "integer", "minimum": 1}, {"type": "boolean"}
    return {
        "description": "What a path may be: [a, b], {choices: […]}, {int: [low, high]} or {float: [low, high]}.",
        "anyOf": [
            choices,
            form("choices", choices),
            form("int", {**_BOUNDS, "items": {"type": "integer"}}, step=step, log=log),
            form("float", _BOUNDS, log=log),
        ],
    }
