"""report.html: the dashboard's page with its data embedded, one file that anyone may open anywhere, offline."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuner.dashboard.payload import whole_of
from tuner.dashboard.study import StudyReader
from tuner.report.bundle import document
from tuner.store import StudyFolder, write_atomic

LARGEST = 4 * 10**6  # bytes of the file
SPACE_FOR_PAGE = 10_000  # of it, for what is not counted below


def write_report(folder: StudyFolder, path: Path | None = None, *, ended: bool = False) -> None:
    """Write report.html, in the study's folder or to `path`; `ended`: by the study's own search, at its end.

    Raises:
        OSError: it cannot be written, or the study not be read.
        StudyError: provenance.json cannot be read.
        SpaceError: its space.yaml is invalid.
    """
    study = whole_of(StudyReader(folder), folder.path.resolve().name, ended=ended)
    write_atomic(path or folder.report, page(study))


def page(study: Mapping[str, Any]) -> str:
    """Return the page of a study's document (see `dashboard.payload`), at most LARGEST bytes.

    A document that is too large goes without its least: first what trials said on the way, then evidence beyond ten
    lines, then intervals of metrics that are no objective, then trials that are neither on the front nor the baseline,
    half of them at a time. The page says so.
    """
    title = html.escape(f"{study['name']} – tuning report")
    room = LARGEST - len(document(title, "").encode()) - SPACE_FOR_PAGE
    kept = dict(study)
    left_out: list[str] = []
    for what, less in (("", None), *LESS):
        if less is not None:
            kept["trials"] = [less(trial, study) for trial in kept["trials"]]
            left_out.append(what)
        data = _packed(kept | {"left_out": left_out})
        if len(data) <= room:
            break
    named = _named(study)
    while len(data) > room and (others := [t["trial"] for t in kept["trials"] if t["trial"] not in named]):
        dropped = set(others[: (len(others) + 1) // 2])
        kept["trials"] = [trial for trial in kept["trials"] if trial["trial"] not in dropped]
        gone = len(study["trials"]) - len(kept["trials"])
        data = _packed(kept | {"left_out": [*left_out, f"{gone} trials that are not on the front"]})
    return document(title, data)


def _named(study: Mapping[str, Any]) -> set[int]:
    """Return the trials that the page cannot do without: the front, what is recommended, and the baseline."""
    derived = study["derived"]
    best = derived["recommendation"]
    named = {point[0] for point in derived["front"]} | {t["trial"] for t in study["trials"] if t["role"] == "baseline"}
    return named if best is None else named | {best["trial"]}


def _packed(study: Mapping[str, Any]) -> str:
    text = json.dumps(study, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(text, 9, mtime=0)).decode("ascii")


def _silent(trial: dict[str, Any], study: Mapping[str, Any]) -> dict[str, Any]:
    return trial | {"lines": []}


def _brief(trial: dict[str, Any], study: Mapping[str, Any]) -> dict[str, Any]:
    failure = trial["failure"]
    if failure is None:
        return trial
    return trial | {"failure": failure | {"evidence": [line[:200] for line in failure["evidence"][-10:]]}}


def _essential(trial: dict[str, Any], study: Mapping[str, Any]) -> dict[str, Any]:
    objectives = {objective["metric"] for objective in study["study"]["objectives"]}
    keep = [metric["name"] in objectives for metric in study["metrics"]]

    def thin(row: list[Any]) -> list[Any]:
        return [*row[:5], *([v if k else None for v, k in zip(side, keep, strict=True)] for side in row[5:])]

    levels = trial["levels"]
    return trial | {
        "points": [thin(row) for row in trial["points"]],
        "levels": None if levels is None else [thin(row) for row in levels],
        "segments": [],
    }


Less = Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]
LESS: tuple[tuple[str, Less], ...] = (
    ("what trials said on the way", _silent),
    ("evidence beyond ten lines", _brief),
    ("stage timelines, and intervals of metrics that are no objective", _essential),
)
