"""What the texts of a study come to, beyond the gate of each trial. Pure.

A candidate that leaves the reference at a tie goes on by itself, where the reference has seen nothing: that text may
be anything, and a server that scores nothing (SGLang with DFLASH) cannot even be asked about it. So the baseline,
relaunched for the confirmation, scores such texts of all configurations, those of the front first, and what it denies
is taken back. What nobody judged is said wherever a configuration is recommended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tuner.failures import ADVICE
from tuner.records import Failure, FailureKind, TrialRecord
from tuner.reference import OwnText, Parity, ScoredText

MOST_TEXTS = 256  # that one launch of the baseline scores
MOST_LINES = 4  # of evidence
UNJUDGED = "compare its answers with those of a server without speculation before you serve it"

Key = tuple[int, tuple[int, ...]]


def to_score(records: Sequence[TrialRecord], front: Sequence[int]) -> tuple[OwnText, ...]:
    """Return the texts that the baseline has to score when it is launched next: each once, at most `MOST_TEXTS`.

    Args:
        front: trials whose texts come first.
    """
    known = _scores(records)
    first = {trial: place for place, trial in enumerate(front)}
    passed = sorted(_passed(records), key=lambda record: first.get(_configuration(record), len(first)))
    wanted = {_key(own): own for record in passed for own in _own(record) if _key(own) not in known}
    return tuple(wanted.values())[:MOST_TEXTS]


def unseen(records: Sequence[TrialRecord], trial: int) -> bool:
    """Whether a configuration, named by its first trial, has texts of its own and no reference was shown any."""
    own = _own_texts(records, trial)
    return bool(own) and own.isdisjoint(_scores(records))


def taken_back(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return, as failed, the records that passed the gate with a text that the relaunched reference denies.

    A text with a token beyond the bound is `lost_parity`, and `garbage_output` when it runs in circles besides.
    """
    known = _scores(records)
    found = []
    for record in _passed(records):
        parity = record.parity
        if parity is None or parity.bound is None:
            continue
        scored = [known[_key(own)] for own in parity.own if _key(own) in known]
        denied = [(by, text) for by, text in scored if text.regret is not None and text.regret > parity.bound]
        if denied:
            looping = any(text.looping for _, text in denied)
            lines = tuple(_words(by, text, parity.bound) for by, text in denied[:MOST_LINES])
            found.append(_failed(record, parity, "garbage_output" if looping else "lost_parity", lines))
    return found


def caveats(records: Sequence[TrialRecord], trial: int | None = None) -> list[str]:
    """Return what must be said of a study whose baseline could not do its part, a sentence each; usually nothing.

    Args:
        trial: the configuration that is recommended.
    """
    baselines = [record for record in records if record.role == "baseline" and not record.blameless]
    measured = next((record for record in baselines if record.state == "measured"), None)
    if measured is None:
        return [_without_baseline(baselines[-1])] if baselines else []
    lines = []
    if measured is not baselines[0]:
        lines.append(
            f"No speculation is trial {measured.trial}, without graphs: with them it came to {_came_to(baselines[0])}. "
            "A configuration with graphs owes part of its speed to them."
        )
    if reason := _off(measured):
        return [*lines, f"No text of this study was judged ({reason}): {UNJUDGED}."]
    chosen = [record for record in records if trial is not None and _configuration(record) == trial]
    if reason := next((why for record in chosen if (why := _off(record))), ""):
        lines.append(f"Its text was not judged ({reason}): {UNJUDGED}.")
    elif trial is not None and _unscored(records, trial):
        lines.append("The text that it goes on with behind a tie was not scored by a relaunched baseline.")
    return lines


# ---------------------------------------------------------------------------------------------------- the parts


def _without_baseline(baseline: TrialRecord) -> str:
    advice = "" if baseline.failure is None else f"; {baseline.failure.advice}"
    return (
        f"The baseline (trial {baseline.trial}) came to {_came_to(baseline)}, so no text of this study is judged and "
        f"nothing is compared with no speculation: remove the cause and begin anew{advice}."
    )


def _came_to(record: TrialRecord) -> str:
    failure = record.failure
    return record.state if failure is None else f"{failure.kind} at {failure.stage}"


def _off(record: TrialRecord) -> str:
    """Return why the text of a measured trial was not judged although it means something, or nothing."""
    parity = record.parity
    if parity is None or parity.verdict != "off" or record.synthetic:
        return ""
    return "; ".join(parity.why)


def _unscored(records: Sequence[TrialRecord], trial: int) -> bool:
    """Whether no text of a configuration's own has a score: none was asked for, or the reference takes none."""
    own, known = _own_texts(records, trial), _scores(records)
    return bool(own) and all(key not in known or known[key][1].regret is None for key in own)


def _own_texts(records: Sequence[TrialRecord], trial: int) -> set[Key]:
    return {_key(own) for record in _passed(records) if _configuration(record) == trial for own in _own(record)}


def _passed(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the launches of candidates whose text passed the gate, and that did not fail otherwise. What its client
    spoilt says nothing of speed, but its text counts."""
    baselines = {record.trial for record in records if record.role == "baseline"}
    return [
        record
        for record in records
        if record.parity is not None
        and record.parity.verdict == "passed"
        and (record.failure is None or record.failure.kind == "client_bound")
        and _configuration(record) not in baselines
    ]


def _scores(records: Iterable[TrialRecord]) -> dict[Key, tuple[int, ScoredText]]:
    """Return what relaunched baselines said of texts, each with the trial that said it."""
    return {
        _key(text): (record.trial, text)
        for record in records
        if record.parity is not None
        for text in record.parity.scored
    }


def _own(record: TrialRecord) -> tuple[OwnText, ...]:
    return () if record.parity is None else record.parity.own


def _key(text: OwnText) -> Key:
    return text.text, text.tokens


def _configuration(record: TrialRecord) -> int:
    return record.trial if record.of is None else record.of


def _words(by: int, text: ScoredText, bound: float) -> str:
    circles = ", and the text runs in circles" if text.looping else ""
    return (
        f"text {text.text}, behind a tie: token {text.at} costs {text.regret:.3g} nats by the reference, relaunched "
        f"as trial {by}; a tie costs up to {bound:.3g}{circles}"
    )


def _failed(record: TrialRecord, parity: Parity, kind: FailureKind, why: tuple[str, ...]) -> TrialRecord:
    """Return a record as a failed one; what was measured is kept."""
    failure = Failure(kind=kind, stage="parity", evidence=why, advice=ADVICE[kind])
    judged = parity.model_copy(update={"verdict": "failed", "why": why})
    return record.model_copy(update={"state": "failed", "failure": failure, "parity": judged})
