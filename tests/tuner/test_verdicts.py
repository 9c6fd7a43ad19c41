"""What becomes of text that the gate could not judge, and of studies whose baseline leaves no reference."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import load_launch
from tests.tuner import packed
from tests.tuner.make import config, level, record
from tests.tuner.spaces import SMOKE, write
from tests.tuner.speaker import Speaker
from tests.tuner.test_parity import PROMPTS, REFERENCE, judged
from tests.tuner.test_report import data_of
from tests.tuner.test_study import WORKER, Notes, begin, misbehave, run
from tuner import session
from tuner.brain import Brain
from tuner.executors.local import LocalExecutor
from tuner.export.launch_file import launch_file, write_launch
from tuner.outcome import outcome_of
from tuner.parity import score_others
from tuner.records import Event, FailureKind, TrialRecord, TrialSpec
from tuner.reference import OwnText, Parity, ScoredText
from tuner.space import load_space
from tuner.store import Journal, StudyFolder
from tuner.study import Outcome, Search, startup_of
from tuner.tables import policy_lines, recommendation_lines
from tuner.verdicts import MOST_TEXTS, caveats, taken_back, to_score, unseen

BOUND = 0.25
PASSED = Parity(verdict="passed", bound=BOUND)
OFF = Parity(verdict="off", why=("no reference: the baseline left none",))


def text(number: int, token: int) -> OwnText:
    return OwnText(text=number, tokens=(1, 2, *[token] * 50), judged=2)


def scored(own: OwnText, regret: float | None, *, looping: bool = False) -> ScoredText:
    return ScoredText(**own.model_dump(), regret=regret, at=9, looping=looping)


def saying(trial: int, *own: OwnText, **more: Any) -> TrialRecord:
    """Return a candidate that left the reference at ties and went on with these texts."""
    measured = more.pop("levels", [level(8, 5.0, 900.0)])
    return record(trial, measured, parity=PASSED.model_copy(update={"own": own}), **more)


def relaunched(trial: int, *texts: ScoredText) -> TrialRecord:
    parity = PASSED.model_copy(update={"scored": texts})
    return record(trial, [level(8, 9.0, 500.0)], role="confirm", of=0, parity=parity)


BASELINE = record(0, [level(8, 9.0, 500.0)], parity=Parity(verdict="reference", bound=BOUND))


# ----------------------------------------------------------------------------------------- texts of one's own


def score(speaker: Speaker, *own: OwnText) -> list[ScoredText]:
    async def ask() -> list[ScoredText]:
        async with speaker.served() as server:
            return await score_others(server, REFERENCE, own)

    return asyncio.run(ask())


def circling(prompt: tuple[int, ...], index: int, flying: int) -> int:
    """Leave every text at a tie, and say one token for ever: only behind a prompt, where nobody compares any more."""
    return 0 if prompt not in PROMPTS or index < 4 else 1 if index == 4 else 20


def test_circles_behind_a_tie_of_a_server_that_scores_nothing_are_found_by_the_relaunched_baseline() -> None:
    parity, kind = judged(Speaker(circling, scores=False))
    assert (kind, parity.verdict) == (None, "passed")  # all that the gate itself can say
    candidate = saying(1, *parity.own).model_copy(update={"parity": parity})
    wanted = to_score([BASELINE, candidate], [1])
    assert len(wanted) == len(parity.own) == len(REFERENCE.texts)
    again = relaunched(2, *score(Speaker(), *wanted))
    [failed] = taken_back([BASELINE, candidate, again])
    assert failed.failure is not None
    assert (failed.trial, failed.state, failed.failure.kind) == (1, "failed", "garbage_output")
    assert failed.failure.stage == "parity"
    assert "runs in circles" in failed.failure.evidence[0]
    assert failed.levels == candidate.levels
    assert taken_back([BASELINE, failed, again]) == []


@pytest.mark.parametrize(
    ("regret", "looping", "kind"),
    [
        (0.2, False, None),
        (0.2, True, None),
        (None, True, None),
        (0.3, False, "lost_parity"),
        (9.0, True, "garbage_output"),
    ],
)
def test_only_a_token_beyond_the_bound_is_denied(regret: float | None, looping: bool, kind: FailureKind | None) -> None:
    own = text(0, 7)
    records = [BASELINE, saying(1, own), saying(2, text(1, 5)), relaunched(3, scored(own, regret, looping=looping))]
    found = {r.trial: r.failure.kind for r in taken_back(records) if r.failure is not None}
    assert found == ({} if kind is None else {1: kind})


def test_every_launch_that_said_it_is_judged_and_the_baseline_is_not() -> None:
    own = text(0, 7)
    spoilt = {"failure": {"kind": "client_bound", "stage": "load"}, "state": "failed"}
    records = [
        BASELINE,
        saying(1, text(1, 5)),
        saying(2, own, role="confirm", of=1, **spoilt),
        saying(3, own, failure={"kind": "oom_load", "stage": "load"}, state="failed"),
        saying(4, own, role="confirm", of=0),
        relaunched(5, scored(own, 3.0)),
    ]
    assert [(each.trial, each.of) for each in taken_back(records)] == [(2, 1)]


def test_what_is_scored_is_each_text_once_those_of_the_front_first_and_never_twice() -> None:
    common, mine, known = text(0, 5), text(1, 6), text(2, 7)
    records = [
        BASELINE,
        saying(1, common, *(text(3, 10 + token) for token in range(MOST_TEXTS))),
        saying(2, mine, common, known),
        relaunched(3, scored(known, 0.0)),
    ]
    found = to_score(records, [2])
    assert found[:2] == (mine, common)
    assert len(found) == len(set(found)) == MOST_TEXTS
    assert known not in found
    assert [unseen(records, trial) for trial in (0, 1, 2)] == [False, True, False]


class Picky(Speaker):
    """Refuses prompts with tokens that it does not have."""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.status = 400 if max(body["prompt"]) > 2000 else 200
        return super().answer(body)


def test_a_text_that_the_baseline_refuses_spoils_no_other() -> None:
    parity, _ = judged(Speaker(lambda p, i, _: 1 if i == 20 else 0))
    good, strange = parity.own[0], parity.own[1].model_copy(update={"tokens": (*parity.own[1].tokens[:40], 5000)})
    one, other = score(Picky(), good, strange)
    assert (one.regret, one.looping) == (0.0, False)
    assert (other.regret, other.tokens) == (None, strange.tokens)


# ------------------------------------------------------------------------------------------------- in a study

LOOPING = text(0, 7)


class Judging(LocalExecutor):
    """Runs workers that compute; what they would say of texts is added: the best drafts run in circles behind a tie,
    and the baseline, relaunched, denies that."""

    def __init__(self) -> None:
        super().__init__(WORKER)
        self.asked: list[tuple[OwnText, ...]] = []

    @contextlib.contextmanager
    def run(self, spec: TrialSpec) -> Iterator[Iterator[Event]]:
        if spec.role == "confirm" and spec.config.draft.kind == "none":
            self.asked.append(spec.score)
        with super().run(spec) as events:
            yield (self._judged(event, spec) for event in events)

    @staticmethod
    def _judged(event: Event, spec: TrialSpec) -> Event:
        if event.record is None:
            return event
        draft = event.record.config["draft"]
        own = text(0, 7) if draft.get("block_size") == 8 else text(1, 5)
        scores = tuple(scored(each, 4.0 if each == LOOPING else 0.1, looping=each == LOOPING) for each in spec.score)
        parity = PASSED.model_copy(update={"own": (own,) if draft["kind"] == "dflash" else (), "scored": scores})
        if spec.role == "baseline":
            parity = Parity(verdict="reference", bound=BOUND)
        return event.model_copy(update={"record": event.record.model_copy(update={"parity": parity})})


def blocks(outcome: Outcome) -> set[int]:
    return {point.config["draft"].get("block_size") for point in outcome.points}


@pytest.fixture(scope="module")
def denied_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[session.Session, Outcome, Judging]:
    """A study whose fastest configuration is denied its text."""
    folder = tmp_path_factory.mktemp("denied")
    opened, executor = begin(folder, SMOKE.replace("load: 8", "load: 1")), Judging()
    return opened, session.search(opened, executor, Notes()), executor


Denied = tuple[session.Session, Outcome, Judging]


def test_what_the_relaunched_baseline_denies_is_on_no_front_and_stays_off_it(denied_study: Denied) -> None:
    opened, outcome, executor = denied_study
    denied = [r for r in outcome.records if r.config["draft"].get("block_size") == 8]
    assert {(r.state, r.failure.kind) for r in denied if r.failure is not None} == {("failed", "garbage_output")}
    assert {r.role for r in denied} == {"search", "confirm"}  # it was recommended, until its text was seen
    assert blocks(outcome) >= {6, 10}
    assert 8 not in blocks(outcome)
    best = outcome.recommendation
    assert best is not None
    assert best.point.config["draft"]["block_size"] in (6, 10)
    assert best.point.confirmed
    assert load_launch(opened.folder.launch).entries[0].config.model_dump(mode="json") == best.point.config
    assert not [line for line in recommendation_lines(best, outcome, opened.space) if "text" in line]
    assert executor.asked[0] == (LOOPING, text(1, 5))
    page = data_of(opened.folder.report.read_text())
    assert {t["failure"]["kind"] for t in page["trials"] if t["trial"] == denied[0].trial} == {"garbage_output"}

    notes, reopened = Notes(), session.reopen(opened.folder.path, ["tuner"], trials=None, accept_change=False)
    again = session.search(reopened, Judging(), notes)
    assert notes.begun == []
    assert again.records == outcome.records
    assert len({r.trial for r in again.records}) == len(again.records)


def test_a_death_between_score_and_verdict_loses_no_verdict(tmp_path: Path, denied_study: Denied) -> None:
    opened, whole, _ = denied_study
    folder = StudyFolder(shutil.copytree(opened.folder.path, tmp_path / "cut"))
    lines = folder.trials.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if json.loads(line)["parity"]["scored"]) + 1
    folder.trials.write_text("".join(lines[:cut]))
    assert all(record.state == "measured" for record in folder.read_trials())
    reopened = session.reopen(folder.path, ["tuner"], trials=None, accept_change=False)
    assert blocks(session.search(reopened, Judging(), Notes())) == blocks(whole)


def test_the_baseline_comes_once_more_for_what_was_launched_after_it(tmp_path: Path) -> None:
    """A policy is launched after the baseline's confirmation, here with all confirmations spent."""
    folder, executor, notes = StudyFolder(tmp_path / "study"), Judging(), Notes()
    space = load_space(write(tmp_path, SMOKE.replace("trials: 16", "trials: 2")))
    folder.create((tmp_path / "space.yaml").read_text(), {})
    drafted, seen = config({"kind": "dflash", "block_size": 6}), text(1, 5)
    table = config({"kind": "policy", "by_running": [[1, 4, drafted["draft"]], [5, None, {"kind": "none"}]]})
    at_rest = {"levels": (level(1, 9.0, 100.0), level(8, 9.0, 500.0))}
    records = [
        BASELINE.model_copy(update=at_rest),
        saying(1, seen, config=drafted),
        saying(2, seen, config=drafted, role="confirm", of=1),
        relaunched(3, scored(seen, 0.1)).model_copy(update=at_rest),
        saying(4, seen, config=drafted, role="confirm", of=1),
        saying(5, LOOPING, config=table, role="policy", levels=[level(1, 2.0, 400.0), level(8, 2.0, 2000.0)]),
    ]
    before = outcome_of(records, space)
    assert before.recommendation is not None
    assert before.recommendation.point.trial == 5
    with Journal(folder) as journal:
        for each in records:
            journal.record(each)
    folder.write_reference(REFERENCE)
    advice = packed.Advice(Brain(space, packed.nothing, startup_of(space)))
    with folder.lock(), executor:
        Search(folder, space, packed.nothing, executor, notes, advice, gpu=False).run()
    assert (notes.begun, executor.asked) == ([6], [(LOOPING,)])
    after = outcome_of(folder.read_trials(), space)
    assert after.records[-1].of == 0
    assert after.recommendation is not None
    assert after.recommendation.point.trial == 1
    assert "its launch came to garbage_output" in policy_lines(after)[0]


def test_text_that_no_baseline_was_shown_is_said() -> None:
    records = [BASELINE, saying(1, text(0, 7))]
    assert caveats(records) == []
    assert "not scored by a relaunched baseline" in caveats(records, 1)[0]
    assert caveats([*records, relaunched(2, scored(text(0, 7), None))], 1) == caveats(records, 1)
    assert caveats([*records, relaunched(2, scored(text(0, 7), 0.1))], 1) == []


# -------------------------------------------------------------------------------------- without a reference


def test_a_baseline_that_fails_before_its_text_is_said_at_once_and_everywhere(tmp_path: Path) -> None:
    opened, notes = begin(tmp_path, trials=2), Notes()
    misbehave(opened, {0: "graph_capture"})
    outcome = run(opened, notes)
    words = "The baseline (trial 0) came to graph_capture at ready, so no text of this study is judged"
    assert notes.said[0].startswith(words)
    assert "nothing is compared with no speculation" in notes.said[0]
    assert notes.said[0].endswith("begin anew; do otherwise.")
    assert outcome.recommendation is not None
    assert outcome.recommendation.speedup is None
    assert notes.said[0] in recommendation_lines(outcome.recommendation, outcome, opened.space)
    assert notes.said[0] in data_of(opened.folder.report.read_text())["derived"]["recommendation"]["lines"]
    assert f"# {notes.said[0]}\n" in opened.folder.launch.read_text()
    assert load_launch(opened.folder.launch).entries[0].config.draft.kind == "dflash"


def test_a_baseline_without_a_reference_is_said() -> None:
    refused = Parity(verdict="off", why=("no reference: POST /v1/completions: HTTP 400: too long",))
    baseline = BASELINE.model_copy(update={"parity": refused})
    candidate = record(1, [level(8, 5.0, 900.0)], parity=OFF)
    [line] = caveats([baseline, candidate], 1)
    assert line.startswith("No text of this study was judged (no reference: POST /v1/completions: HTTP 400: too long)")
    dummy = baseline.model_copy(update={"synthetic": True})
    assert caveats([dummy, candidate.model_copy(update={"synthetic": True})], 1) == []
    assert caveats([BASELINE, candidate], 1) == [
        "Its text was not judged (no reference: the baseline left none): "
        "compare its answers with those of a server without speculation before you serve it."
    ]
    assert caveats([BASELINE, record(1, [level(8, 5.0, 900.0)], parity=PASSED)], 1) == []


CAPTURED = SMOKE.replace(
    "[{kind: eager}, {kind: captured, batch_sizes: [1, 4]}]", "[{kind: captured, batch_sizes: [1, 4]}, {kind: eager}]"
)


def with_graphs(folder: Path, how: dict[int, str]) -> tuple[Outcome, Notes]:
    """Run a study of three trials, the baseline's first configuration with graphs, where anything can run."""
    folder.mkdir()
    study, notes = StudyFolder(folder / "study"), Notes()
    space = load_space(write(folder, CAPTURED.replace("trials: 16", "trials: 3")))
    study.create((folder / "space.yaml").read_text(), {})
    (study.path / "misbehave.json").write_text(json.dumps(how))
    advice = packed.Advice(Brain(space, packed.nothing, startup_of(space)))
    with study.lock(), LocalExecutor(WORKER) as executor:
        Search(study, space, packed.nothing, executor, notes, advice, gpu=False).run()
    return outcome_of(study.read_trials(), space), notes


@pytest.mark.parametrize("kind", ["graph_capture", "oom_capture"])
def test_a_baseline_whose_graphs_cannot_be_captured_is_launched_once_without(tmp_path: Path, kind: str) -> None:
    outcome, notes = with_graphs(tmp_path / "once", {0: kind})
    first, second, *rest = outcome.records
    assert [(r.role, r.state, r.config["graphs"]["kind"]) for r in (first, second)] == [
        ("baseline", "failed", "captured"),
        ("baseline", "measured", "eager"),
    ]
    assert first.config | {"graphs": None} == second.config | {"graphs": None}
    assert "baseline" not in {r.role for r in rest}
    assert [
        line for line in notes.said if f"No speculation is trial 1, without graphs: with them it came to {kind}" in line
    ]
    assert {point.trial for point in outcome.points if point.baseline} == {1}
    assert outcome.recommendation is not None
    assert outcome.recommendation.speedup is not None

    outcome, notes = with_graphs(tmp_path / "twice", {0: kind, 1: "crashed"})
    assert [r.role for r in outcome.records].count("baseline") == 2
    assert notes.said[0].startswith("The baseline (trial 1) came to crashed")


def test_remarks_in_a_launch_file_are_comments(tmp_path: Path) -> None:
    """What a server said must not become a key, nor make the file unreadable."""
    outcome = outcome_of([BASELINE, saying(1)], load_space(write(tmp_path)))
    assert outcome.recommendation is not None
    launch = launch_file(outcome.recommendation, outcome.points, "small", "0" * 16)
    write_launch(launch, tmp_path / "launch.yaml", ["it said\nsynthetic: true\r\x1b[2J\x85deploy: {}"])
    assert load_launch(tmp_path / "launch.yaml") == launch
    assert "deploy" not in yaml.safe_load((tmp_path / "launch.yaml").read_text())
