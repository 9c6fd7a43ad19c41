"""The fitted policy of a study: which draft to use for how many running requests.

Read from `policy.json` in the study's folder:

    {"schema": 1, "by_running": [[1, 4, <draft>], [5, null, <draft>]],
     "expected": {"1": {"output_tok_s": 812.0}, "4": {…}}}          expected is optional

or else from a launch.yaml with several entries, or whose draft is of kind `policy`; or else fitted to the trials that
differ from the recommended one in their draft alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from tuner.dashboard.study import read_mapping
from tuner.errors import StudyError
from tuner.export.launch_file import recorded_config
from tuner.policy_fit import curves_of, fit_policy
from tuner.store import StudyFolder
from tuner.study import Outcome

MOST_FITTED = 2000  # trials

Ranges = TypeAdapter(list[tuple[PositiveInt, PositiveInt | None, dict[str, Any]]])


class PolicyFile(BaseModel):
    """policy.json."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    by_running: list[tuple[PositiveInt, PositiveInt | None, dict[str, Any]]]
    expected: dict[PositiveInt, dict[str, FiniteFloat]] = {}


def policy_of(folder: StudyFolder) -> dict[str, Any] | None:
    """Return {by_running, expected, source}, None when the study has no policy."""
    document = read_mapping(folder.path / "policy.json")
    if document is not None:
        try:
            return PolicyFile.model_validate(document).model_dump(mode="json") | {"source": "policy.json"}
        except ValidationError:
            return None
    launch = read_mapping(folder.launch)
    ranges = _launch_ranges(launch) if launch is not None else None
    return {"by_running": ranges, "expected": {}, "source": "launch.yaml"} if ranges else None


def fitted(outcome: Outcome) -> dict[str, Any] | None:
    """Return the policy that the trials come to, in the form of `policy_of`; None without one."""
    best = outcome.recommendation
    records = [
        r for r in outcome.records if r.state in ("measured", "failed") and isinstance(r.config.get("draft"), dict)
    ]
    if best is None or len(records) > MOST_FITTED:
        return None
    try:
        like = recorded_config(best.point.trial, best.point.config)
    except StudyError:
        return None  # of another version: nothing can be served from it
    policy = fit_policy(curves_of(records, like))
    if policy is None:
        return None
    ranges = [[each.first, each.last, each.curve.draft] for each in policy.ranges]
    expected = {str(level): {"output_tok_s": speed} for level, speed in policy.expected.items()}
    return {"by_running": ranges, "expected": expected, "source": f"from the trials like #{best.point.trial}"}


def _launch_ranges(launch: Mapping[str, Any]) -> list[Any] | None:
    entries = launch.get("entries")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return None
    drafts = [_draft(entry) for entry in entries]
    if len(entries) == 1 and drafts[0].get("kind") == "policy":
        found: Any = drafts[0].get("by_running")
    elif len(entries) > 1:
        found = [(entry.get("from", 1), entry.get("to"), draft) for entry, draft in zip(entries, drafts, strict=True)]
    else:
        return None
    try:
        return list(Ranges.validate_python(found))
    except ValidationError:
        return None


def _draft(entry: Mapping[str, Any]) -> dict[str, Any]:
    config = entry.get("config")
    draft = config.get("draft") if isinstance(config, dict) else None
    return draft if isinstance(draft, dict) else {}
