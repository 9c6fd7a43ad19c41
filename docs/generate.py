"""Fills the generated parts of the references from the types: `python -m docs.generate`, or `--check`.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; the text around it is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from engine import config as engine_config
from tuner.failures import ADVICE
from tuner.load.laws import ARRIVAL_KINDS
from tuner.load.sources import PROMPT_KINDS
from tuner.points import Point
from tuner.records import (
    FAILURES,
    METRICS,
    STAGES,
    ClientError,
    Event,
    Failure,
    Level,
    Raced,
    Slice,
    TrialRecord,
    Workload,
)
from tuner.reference import Parity, Reference
from tuner.sampling import SAMPLERS
from tuner.space.model import (
    Budget,
    Constraint,
    LocalExecutor,
    Objective,
    PackedExecutor,
    Pick,
    SpaceFile,
    Strategy,
    Study,
)
from tuner.space.schema import standard

FOLDER = Path(__file__).resolve().parent
SEARCH = FOLDER.parent / "benchmarks" / "results" / "search.json"
SEEDS = 20  # of a sampler whose figures need no remark
PART = re.compile(r"(<!-- generated: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def fields(model: type[BaseModel]) -> str:
    """Return a table of a model's fields."""
    schema = standard(model.model_json_schema(by_alias=True))
    definitions = schema.get("$defs", {})
    required = set(schema.get("required", ()))
    rows = []
    for name, value in schema["properties"].items():
        default = "required" if name in required else f"`{json.dumps(value.get('default'), ensure_ascii=False)}`"
        if name not in required and "default" not in value:
            default = ""
        rows.append((f"`{name}`", type_text(value, definitions), default, value.get("description", "")))
    return table(("field", "type", "default", "meaning"), rows)


def type_text(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return a JSON schema's type in words."""
    if "$ref" in schema:
        definition = definitions[schema["$ref"].rsplit("/", 1)[-1]]
        return "mapping, see below" if definition.get("type") == "object" else type_text(definition, definitions)
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema and set(schema["enum"]) == set(FAILURES):
        return "a failure kind"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema or "oneOf" in schema:
        members = schema.get("anyOf") or schema["oneOf"]
        return " or ".join(dict.fromkeys(type_text(member, definitions) for member in members))
    match schema.get("type"):
        case "integer":
            return "whole number" + bounds(schema)
        case "number":
            return "number" + bounds(schema)
        case "string":
            return "text" + (f", such as {', '.join(schema['examples'])}" if "examples" in schema else "")
        case "boolean":
            return "`true` or `false`"
        case "null":
            return "`null`"
        case "array":
            inner = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
            return f"list of {type_text(inner, definitions)}"
        case _:
            return "mapping"


def bounds(schema: dict[str, Any]) -> str:
    """Return a number's limits in words."""
    words = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
        if key in schema and abs(schema[key]) < 2**31
    ]
    return f" {', '.join(words)}" if words else ""


def metrics() -> str:
    """Return the table of metrics."""
    rows = []
    for metric in METRICS.values():
        names = (
            f"`{metric.name}_`" + "{" + ", ".join(metric.statistics) + "}" if metric.statistics else f"`{metric.name}`"
        )
        better = "lower" if metric.goal == "min" else "higher"
        rows.append((names, metric.unit, better, metric.description))
    return table(("metric", "unit", "better", "meaning"), rows)


def failures() -> str:
    """Return the table of failure kinds."""
    rows = [(f"`{kind}`", meaning, ADVICE[kind]) for kind, meaning in FAILURES.items()]
    return table(("kind", "meaning", "what to do"), rows)


def stages() -> str:
    """Return the stages of a trial."""
    return "`" + "` → `".join(STAGES) + "`\n"


def union(*models: type[BaseModel]) -> str:
    """Return one table per kind of a union."""
    parts = []
    for model in models:
        kind = model.model_fields["kind"].default
        text = " ".join((model.__doc__ or "").split())
        parts.append(f"**`kind: {kind}`** – {text}\n\n{fields(model)}")
    return "\n".join(parts)


def front_entry() -> str:
    """Return the keys of an entry of front.json."""
    point = Point(0, 1, {}, {}, {}, 0, True, True, False, False)
    return ", ".join(f"`{key}`" for key in point.to_json()) + "\n"


def search_claims() -> str:
    """Return what the search benchmark claims and found."""
    claims = json.loads(SEARCH.read_text(encoding="utf-8"))["claims"]
    rows = [
        (name, claim["wanted"], f"{claim['figure']:g}", "yes" if claim["holds"] else "**no**")
        for name, claim in claims.items()
    ]
    return table(("claim", "wanted", "found", "holds"), rows)


def search_samplers() -> str:
    """Return each sampler's share of hypervolume and its crashes at 60 launches, by surface."""
    summary = json.loads(SEARCH.read_text(encoding="utf-8"))["summary"]
    found: dict[str, dict[str, str]] = {}
    for name, means in summary.items():
        part, surface, sampler, trials = name.split("/")
        if (part, trials) == ("search", "60"):
            few = "" if means["seeds"] >= SEEDS else f" ({means['seeds']} seeds)"
            text = f"{means['hypervolume'][trials]:.3f}, {means['crashes']:.1f}{few}"
            found.setdefault(surface, {})[sampler] = text
    samplers = [name for name in SAMPLERS if any(name in each for each in found.values())]
    rows = [(surface, *(each.get(name, "–") for name in samplers)) for surface, each in found.items()]
    return table(("surface", *(f"`{name}`" for name in samplers)), rows)


PARTS: dict[str, Callable[[], str]] = {
    "space": lambda: fields(SpaceFile),
    "study": lambda: fields(Study),
    "budget": lambda: fields(Budget),
    "workload": lambda: fields(Workload),
    "workload.prompts": lambda: union(*PROMPT_KINDS),
    "workload.arrivals": lambda: union(*ARRIVAL_KINDS),
    "objective": lambda: fields(Objective),
    "constraint": lambda: fields(Constraint),
    "pick": lambda: fields(Pick),
    "strategy": lambda: fields(Strategy),
    "executor": lambda: union(LocalExecutor, PackedExecutor),
    "config": lambda: fields(engine_config.EngineConfig),
    "config.model": lambda: fields(engine_config.Model),
    "config.draft": lambda: union(
        engine_config.NoDraft, engine_config.DFlashDraft, engine_config.DDTreeDraft, engine_config.PolicyDraft
    ),
    "config.graphs": lambda: union(engine_config.Eager, engine_config.Captured),
    "config.parallel": lambda: fields(engine_config.Parallel),
    "config.memory": lambda: fields(engine_config.Memory),
    "config.attention": lambda: fields(engine_config.Attention),
    "config.backend": lambda: fields(engine_config.Backend),
    "launch": lambda: fields(engine_config.LaunchFile),
    "metrics": metrics,
    "failures": failures,
    "stages": stages,
    "trial": lambda: fields(TrialRecord),
    "level": lambda: fields(Level),
    "raced": lambda: fields(Raced),
    "parity": lambda: fields(Parity),
    "reference": lambda: fields(Reference),
    "slice": lambda: fields(Slice),
    "client": lambda: fields(ClientError),
    "failure": lambda: fields(Failure),
    "event": lambda: fields(Event),
    "front": front_entry,
    "search.claims": search_claims,
    "search.samplers": search_samplers,
}


def filled(text: str) -> str:
    """Return a document with its generated parts renewed.

    Raises:
        KeyError: it names a part that does not exist.
    """
    return PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}{match[3]}", text)


def stale() -> Iterator[Path]:
    """Yield the documents whose generated parts are not what the types say."""
    for path in sorted(FOLDER.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            yield path


def main(arguments: list[str]) -> int:
    """Write the documents, or with --check say which are out of date."""
    outdated = list(stale())
    if "--check" in arguments:
        for path in outdated:
            print(f"{path.name} is out of date: run `python -m docs.generate`", file=sys.stderr)
        return 1 if outdated else 0
    for path in outdated:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
