"""The fitted policy of a study: which draft to use for how many running requests.

Read from `policy.json` in the study's folder (`tuner.export.policy_file`); or else from a launch.yaml with several
entries, or whose draft is of kind `policy`; or else fitted to the trials that differ from the recommended one in
their draft alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from tuner.dashboard.study import read_mapping
from tuner.export.policy_file import policy_document
from tuner.store import StudyFolder
from tuner.study import Outcome

Ranges = TypeAdapter(list[tuple[PositiveInt, PositiveInt | None, dict[str, Any]]])


class PolicyFile(BaseModel):
    """policy.json."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    by_running: list[tuple[PositiveInt, PositiveInt | None, dict[str, Any]]]
    expected: dict[PositiveInt, dict[str, FiniteFloat]] = {}
    accepted: bool | None = None
    why: str = ""
    trial: int | None = None


def policy_of(folder: StudyFolder) -> dict[str, Any] | None:
    """Return {by_running, expected, source, …}, None when the study has no policy; of an unreadable file {problem}."""
    if folder.policy.exists():
        document = read_mapping(folder.policy)
        if document is None:
            return {"problem": "policy.json cannot be read"}
        try:
            return PolicyFile.model_validate(document).model_dump(mode="json") | {"source": "policy.json"}
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return {"problem": f"policy.json is not a policy: {where}: {first['msg']}"}
    launch = read_mapping(folder.launch)
    ranges = _launch_ranges(launch) if launch is not None else None
    return {"by_running": ranges, "expected": {}, "source": "launch.yaml"} if ranges else None


def fitted(outcome: Outcome) -> dict[str, Any] | None:
    """Return the policy that the trials come to, in the form of `policy_of`; None without one."""
    document = policy_document(outcome)
    if document is None:
        return None
    like = f"trial #{document['trial']}" if document["trial"] is not None else f"the trials like #{document['like']}"
    return document | {"source": f"from {like}"}


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
