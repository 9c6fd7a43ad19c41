"""The gate within a trial and a study: real engines, one of them faulty, and the way of the reference."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends import Launch, Native
from engine.config import EngineConfig
from tests.tuner.running import family
from tests.tuner.test_study import WORKER, Notes, begin
from tuner import session
from tuner.errors import StudyError
from tuner.executors.local import LocalExecutor
from tuner.records import Event, Role, TrialRecord, TrialSpec, Workload
from tuner.reference import OwnText, Peer, Reference, ReferenceText
from tuner.store import read_events
from tuner.trial import run_trial

PAIR = Path(__file__).resolve().parents[1] / "data" / "smoke_pair"
DFLASH = {"kind": "dflash", "model": str(PAIR / "draft"), "block_size": 4}


@dataclasses.dataclass(frozen=True)
class Faulty(Native):
    """The native engine with one of the planted faults."""

    fault: str = ""

    def command(self, config: EngineConfig, config_path: Path, host: str, port: int) -> Launch:
        arguments = super().command(config, config_path, host, port).argv[3:]
        return Launch((sys.executable, "-m", "tests.faults", self.fault, *arguments))


def trial(
    folder: Path,
    draft: dict[str, Any],
    reference: Reference | None,
    role: Role = "search",
    backend: Native | None = None,
    **more: Any,
) -> tuple[TrialRecord, list[Event]]:
    prompts = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"token_ids": p["token_ids"]}) for p in prompts))
    config = EngineConfig.model_validate({"model": {"target": str(PAIR / "target")}, "draft": draft})
    spec = TrialSpec(
        study=str(folder / "study"),
        trial=3,
        role=role,
        config=config,
        workload=Workload(prompts=str(folder / "prompts.jsonl"), output_tokens=16, window=0.2, client_lag=1000),
        levels=(1,),
        served_name=config.model.target,
        reference=reference,
        **more,
    )
    events: list[Event] = []
    record = asyncio.run(run_trial(spec, events.append, backend))
    assert family(str(folder)) == []
    return record, events


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    record, events = trial(tmp_path_factory.mktemp("baseline"), {"kind": "none"}, None, "baseline")
    assert record.state == "measured", record.failure
    assert record.parity is not None
    assert record.parity.verdict == "reference"
    assert record.seconds["parity"] > 0
    [found] = [event.reference for event in events if event.reference is not None]
    assert len(found.texts) == record.parity.texts
    return found


def test_a_healthy_candidate_is_measured(tmp_path: Path, reference: Reference) -> None:
    record, _ = trial(tmp_path, DFLASH, reference)
    assert record.state == "measured", record.failure
    assert record.parity is not None
    assert record.parity.verdict == "passed"
    assert record.parity.accept_length is not None
    assert record.parity.accept_length > 1
    assert all(own.judged <= len(own.tokens) for own in record.parity.own)


def test_the_relaunched_baseline_scores_the_texts_of_others(tmp_path: Path, reference: Reference) -> None:
    text = reference.texts[0]
    same = OwnText(text=0, tokens=text.tokens, judged=1)
    circles = OwnText(text=0, tokens=(*text.tokens[:4], *text.tokens[:1] * 50), judged=5)
    record, _ = trial(tmp_path, {"kind": "none"}, reference, "confirm", score=(same, circles))
    assert record.state == "measured", record.failure
    assert record.parity is not None
    good, bad = record.parity.scored
    assert good.regret is not None
    assert bad.regret is not None
    assert good.regret <= reference.bound("float32") < bad.regret
    assert (good.looping, bad.looping) == (False, True)


@pytest.mark.parametrize("fault", ["commit_one_short", "bonus_from_last_row"])
def test_a_faulty_candidate_fails_before_it_is_measured(tmp_path: Path, reference: Reference, fault: str) -> None:
    record, _ = trial(tmp_path, DFLASH, reference, backend=Faulty(fault=fault))
    assert record.state == "failed"
    assert record.failure is not None
    assert record.failure.kind in ("lost_parity", "garbage_output")  # a small model that is misled runs in circles
    assert record.failure.stage == "parity"
    assert "leave the reference beyond a tie" in record.failure.evidence[0]
    assert record.levels == ()
    assert record.parity is not None
    assert record.parity.beyond > 0


def test_acceptance_far_below_another_trials_fails(tmp_path: Path, reference: Reference) -> None:
    """The other trial is invented: no drafter with blocks of 4 reaches it."""
    record, _ = trial(tmp_path, DFLASH, reference, peer=Peer(trial=2, accept_length=12.0))
    assert record.failure is not None
    assert record.failure.kind == "acceptance_collapse"
    assert "where trial 2 has 12.00" in record.failure.evidence[0]


def test_synthetic_trials_are_not_judged(tmp_path: Path, reference: Reference) -> None:
    record, events = trial(tmp_path, {**DFLASH, "simulate_accept": 2.0}, reference)
    assert record.state == "measured", record.failure
    assert record.parity is not None
    assert (record.parity.verdict, record.parity.why[0].split(":")[0]) == ("off", "synthetic")
    assert not any(event.stage == "parity" for event in events)


# ------------------------------------------------------------------------------------------------- studies

TEXT = ReferenceText(prompt=(1, 2), tokens=(3,), top=(((3, -0.5), (4, -1.0)),))
KEPT = Reference(dtype="bfloat16", length=1, unit=0.125, self_regret=0.0, compared=1, texts=(TEXT,))


class Referring(LocalExecutor):
    """Runs workers that compute; the baseline's gives a reference. Keeps what every worker was told."""

    def __init__(self) -> None:
        super().__init__(WORKER)
        self.specs: list[TrialSpec] = []

    @contextlib.contextmanager
    def run(self, spec: TrialSpec) -> Iterator[Iterator[Event]]:
        self.specs.append(spec)
        given = Event(trial=spec.trial, stage="parity", time=1.0, text="reference", reference=KEPT)
        with super().run(spec) as events:
            yield itertools.chain([given] if spec.role == "baseline" else [], events)


def test_the_reference_goes_from_the_baseline_to_all_others_also_after_a_break(tmp_path: Path) -> None:
    opened, first = begin(tmp_path), Referring()
    with pytest.raises(KeyboardInterrupt):
        session.search(opened, first, Notes(stop_at=2))
    assert [(spec.role, spec.reference) for spec in first.specs] == [
        ("baseline", None),
        ("search", KEPT),
        ("search", KEPT),
    ]
    assert opened.folder.read_reference() == KEPT
    told, _ = read_events(opened.folder)
    assert [event.text for event in told if event.stage == "parity"] == ["reference"]
    assert all(event.reference is None for event in told)

    again = Referring()
    session.search(session.reopen(opened.folder.path, ["tuner"], trials=4, accept_change=False), again, Notes())
    assert {spec.role for spec in again.specs} >= {"search", "confirm"}
    assert all(spec.reference == KEPT for spec in again.specs)


def test_a_broken_reference_is_said(tmp_path: Path) -> None:
    opened = begin(tmp_path)
    assert opened.folder.read_reference() is None
    opened.folder.write_reference(KEPT)
    opened.folder.reference.write_text(opened.folder.reference.read_text()[:40])
    with pytest.raises(StudyError, match=r"reference\.json: not a reference"):
        session.search(opened, Referring(), Notes())
