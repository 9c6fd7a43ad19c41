"""policy.json: the table of drafts by load that a study came to, and whether its launch held what it promised.

    {"schema": 1, "by_running": [[1, 4, <draft>], [5, null, <draft>]],
     "expected": {"1": {"output_tok_s": 812.0}, "4": {…}},
     "accepted": true | false | null, "why": "…", "trial": 17 | null, "like": 3}

`expected` is what the launch measured where there was one, else what the fitted curves give. `accepted` is null for a
table that was not launched. `like`: the trial from which it differs in the draft alone.
"""

from __future__ import annotations

import json
from typing import Any

from tuner.errors import StudyError
from tuner.export.launch_file import recorded_config
from tuner.policy_fit import METRIC, Policy, fit_for, verdict_of
from tuner.records import TrialRecord
from tuner.store import StudyFolder, write_atomic
from tuner.study import Outcome

MOST_FITTED = 2000  # trials


def write_policy(folder: StudyFolder, outcome: Outcome) -> None:
    """Write policy.json; remove it where the trials come to none.

    Raises:
        OSError: it cannot be written.
    """
    document = policy_document(outcome, folder.read_search().get("policy"))
    if document is None:
        folder.policy.unlink(missing_ok=True)
    else:
        write_atomic(folder.policy, json.dumps(document, indent=1, allow_nan=False) + "\n")


def policy_document(outcome: Outcome, refused: object = None) -> dict[str, Any] | None:
    """Return the table that was launched, else the one that the trials come to; None without one.

    `refused`: why it cannot be launched on this machine, if that is known.
    """
    verdict = verdict_of(outcome.records)
    if verdict is not None:
        record = next(record for record in outcome.records if record.trial == verdict.trial)
        return _document(
            record.config["draft"]["by_running"],
            {level.concurrency: level.metrics.get(METRIC) for level in record.levels},
            accepted=verdict.accepted,
            why=verdict.why,
            trial=verdict.trial,
        )
    fitted = fit_of(outcome)
    if fitted is None:
        return None
    policy, like = fitted
    single = len(policy.ranges) == 1
    why = "one draft is best at every load, there is nothing to switch" if single else "it was not launched"
    return _document(
        [[each.first, each.last, each.curve.draft] for each in policy.ranges],
        policy.expected,
        accepted=None,
        why=str(refused) if refused and not single else why,
        like=like,
    )


def fit_of(outcome: Outcome) -> tuple[Policy, int] | None:
    """Return the best table of a server like the recommended one, and that one's trial; None without one."""
    best = outcome.recommendation
    records: list[TrialRecord] = [r for r in outcome.records if r.state in ("measured", "failed")]
    if best is None or len(records) > MOST_FITTED:
        return None
    try:
        like = recorded_config(best.point.trial, best.point.config)
    except StudyError:
        return None  # of another version: nothing can be served from it
    policy = fit_for(records, like)
    return None if policy is None else (policy, best.point.trial)


def _document(
    by_running: list[Any],
    speeds: Any,
    *,
    accepted: bool | None,
    why: str,
    trial: int | None = None,
    like: int | None = None,
) -> dict[str, Any]:
    return {
        "schema": 1,
        "by_running": by_running,
        "expected": {str(level): {METRIC: speed} for level, speed in speeds.items() if speed is not None},
        "accepted": accepted,
        "why": why,
        "trial": trial,
        "like": like,
    }
