"""Opening a study: from a space file to a folder that can be searched, and from a folder back."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.backends import find_command
from engine.errors import EngineError
from engine.estimate import Machine, detect_machine, gpu
from tuner.errors import StudyError, UsageError
from tuner.executors.base import Executor
from tuner.executors.local import LocalExecutor
from tuner.executors.packed import PackedExecutor
from tuner.export.launch_file import launch_file, write_launch
from tuner.export.policy_file import write_policy
from tuner.feasible import Pruning, StaticChecks, prune
from tuner.labels import plain
from tuner.machine import look_at_gpus
from tuner.points import Point
from tuner.provenance import collect
from tuner.report.page import write_report
from tuner.sampling.process import RemoteBrain
from tuner.space import Infeasible, Space, load_space
from tuner.store import StudyFolder, keep_aside, write_atomic
from tuner.study import Observer, Outcome, Search, outcome_of, startup_of
from tuner.verdicts import caveats


@dataclass(frozen=True)
class Session:
    """A study that is ready to be searched."""

    folder: StudyFolder
    space: Space  # as the file says
    pruning: Pruning  # what of it this machine can run
    checks: StaticChecks


def plan(space: Space, machine: str | None = None) -> tuple[StaticChecks, Pruning]:
    """Return what a machine can run of a space; nothing is launched.

    `machine` None is this one, else GPUs that are elsewhere, such as `8xH200`.

    Raises:
        UsageError: no such machine.
    """
    checks = StaticChecks(detect_machine() if machine is None else described(machine))
    return checks, prune(space, checks)


def described(text: str) -> Machine:
    """Return the machine that `8xH200` or `H200` describes, from datasheets.

    Raises:
        UsageError: not of that form, or a GPU that is not in the table.
    """
    match = re.fullmatch(r"(?:([1-9]\d{0,3})\s*[x×])?\s*(.+)", text.strip())
    if match is None:
        raise UsageError("--machine: write the number and name of its GPUs, such as 8xH200")
    try:
        return gpu(match[2], devices=int(match[1] or 1))
    except EngineError as error:
        raise UsageError(f"--machine: {error}") from error


def with_trials(space: Space, trials: int | None) -> Space:
    """Return the space with another number of trials in its budget."""
    if trials is None:
        return space
    budget = space.file.study.budget.model_copy(update={"trials": trials})
    study = space.file.study.model_copy(update={"budget": budget})
    return Space(space.source, space.text, space.file.model_copy(update={"study": study}), space.domains)


def begin(space: Space, results: Path, argv: list[str], *, trials: int | None, fresh: bool) -> Session:
    """Make a new study's folder below `results`, complete before anything is launched.

    `fresh`: an earlier study of this name is kept aside instead of refused.

    Raises:
        UsageError: not even the baseline can run on this machine, or no command is known that starts its server.
        StudyError: a study of this name exists, or the folder cannot be written.
    """
    checks, pruning = plan(space)
    if isinstance(found := pruning.space.baseline(checks), Infeasible):
        raise UsageError(f"{space.source}: the baseline cannot run here: {'; '.join(found.reasons)}")
    backend = found[0].backend
    if backend.kind != "native":
        try:
            find_command(backend.kind, backend.version)
        except EngineError as error:
            raise UsageError(f"{space.source}: {error}") from error
    folder = StudyFolder(results / space.file.study.name)
    if fresh and folder.is_complete():
        with folder.lock():  # nobody is running it
            keep_aside(folder)
    provenance = describe_now(space, argv) | {"trials": trials}
    with _claimed(folder):
        folder.create(space.text, provenance)
    return Session(folder, with_trials(space, trials), pruning_for(pruning, trials), checks)


@contextlib.contextmanager
def _claimed(folder: StudyFolder) -> Iterator[None]:
    """Hold a folder in which a study is to be made.

    Raises:
        StudyError: it holds a study, or something else, or cannot be made.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.path.iterdir() if not path.name.startswith(".")}
        foreign = not folder.space.is_file() and names - {"logs"}
    except OSError as error:
        raise StudyError(f"{folder.path}: cannot be made: {error.strerror or error}") from error
    if foreign:
        raise StudyError(f"{folder.path}: exists and is no study; choose another study.name or --results")
    with folder.lock():
        if folder.is_complete():
            raise StudyError(
                f"{folder.path}: holds a study already; go on with `tuner resume {folder.path}`, "
                "or keep it aside and start anew with --fresh"
            )
        yield


def pruning_for(pruning: Pruning, trials: int | None) -> Pruning:
    """Return the pruning with another number of trials in its space."""
    return replace(pruning, space=with_trials(pruning.space, trials))


def reopen(path: Path, argv: list[str], *, trials: int | None, accept_change: bool) -> Session:
    """Open a study's folder to go on with it.

    Raises:
        StudyError: no study, or the machine, the versions or the space changed and `accept_change` is not set.
        SpaceError: its space.yaml is invalid now.
    """
    folder = existing(path)
    space = load_space(folder.space)
    before = folder.read_provenance()
    now = describe_now(space, argv)
    differences = list(changes(before, now))
    if before.get("space_digest") != space.digest:
        differences.append("space.yaml was changed beyond its budget and pick")
    if differences and not accept_change:
        raise StudyError(
            f"{folder.path}: measurements would not be comparable: {'; '.join(differences)}; "
            "start another study, or accept that with --accept-change"
        )
    kept = before.get("trials")
    wanted = trials if trials is not None else kept if isinstance(kept, int) else None
    if differences:
        history = [*before.get("earlier", []), {k: v for k, v in before.items() if k != "earlier"}]
        _write_provenance(folder, now | {"trials": wanted, "earlier": history})
    elif trials is not None:
        _write_provenance(folder, before | {"trials": trials})
    checks, pruning = plan(space)
    return Session(folder, with_trials(space, wanted), pruning_for(pruning, wanted), checks)


def _write_provenance(folder: StudyFolder, document: dict[str, Any]) -> None:
    try:
        write_atomic(folder.provenance, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise StudyError(f"{folder.provenance}: cannot be written: {error.strerror or error}") from error


def describe_now(space: Space, argv: list[str]) -> dict[str, Any]:
    """Return the provenance of a study that starts or goes on now."""
    return collect(argv, space.file.study.seed) | {"space_digest": space.digest}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what makes measurements of before and of now incomparable, in words."""
    old, new = before.get("identity"), now.get("identity")
    if not isinstance(old, dict) or not isinstance(new, dict):
        return ["provenance.json does not say on what machine the study began"]
    return [
        f"{name} was {plain(old.get(name))} and is {plain(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def existing(path: Path) -> StudyFolder:
    """Return a study's folder.

    Raises:
        StudyError: the path holds no study.
    """
    folder = StudyFolder(path)
    if not folder.space.is_file():
        raise StudyError(f"{path}: holds no study (no space.yaml); a study is RESULTS/<study.name>")
    if not folder.is_complete():
        raise StudyError(f"{path}: the study was never begun completely; run `tuner search` again")
    return folder


def load_outcome(folder: StudyFolder) -> tuple[Space, Outcome]:
    """Read what a study has found so far; nothing is written and no lock is needed.

    Raises:
        StudyError: unreadable records.
        SpaceError: its space.yaml is invalid.
    """
    space = load_space(folder.space)
    return space, outcome_of(folder.read_trials(), space)


def executor_of(session: Session) -> Executor:
    """Return where the trials of a study run, as its space file says.

    Raises:
        MachineError: the GPUs cannot be listed.
    """
    if session.space.file.executor.kind == "packed" and session.checks.machine.kind == "cuda":
        return PackedExecutor([gpu.uuid for gpu in look_at_gpus().gpus])
    return LocalExecutor()  # without GPUs there is one CPU to share, and one trial at a time


def search(session: Session, executor: Executor, observer: Observer) -> Outcome:
    """Run a study to the end of its budget; whatever ends it, what was found until then is written.

    Raises:
        NothingFeasible: nothing runs here.
        StudyError: another process runs the study, or its folder cannot be written.
    """
    space, machine = session.pruning.space, session.checks.machine
    strategy = space.file.strategy
    advisor = RemoteBrain(
        space,
        session.checks,
        startup_of(space),
        sampler=strategy.sampler,
        machine=machine if strategy.prior and machine.bandwidth is not None else None,
        impossible=session.pruning.impossible,
    )
    with session.folder.lock(), executor, _derived(session), advisor:
        gpu = machine.kind == "cuda"
        Search(session.folder, space, session.checks, executor, observer, advisor, gpu=gpu).run()
    return outcome_of(session.folder.read_trials(), session.space)


@contextlib.contextmanager
def _derived(session: Session) -> Iterator[None]:
    """Write front, launch file and report when the block is left, whatever ended it."""
    try:
        yield
    finally:
        write_derived(session.folder, session.space)


def write_derived(folder: StudyFolder, space: Space) -> Outcome:
    """Write front.json, policy.json, launch.yaml and report.html from the records.

    Raises:
        StudyError: the folder cannot be written, or a record's configuration is not valid in this version.
        ConfigError: there is no launch file for the recommended configuration; everything else is written.
    """
    outcome = outcome_of(folder.read_trials(), space)
    try:
        write_atomic(folder.front, front_json(outcome.front))
        write_policy(folder, outcome)
        try:
            _write_launch(folder, outcome, space)
        finally:
            write_report(folder, ended=True)  # also where the recommended configuration cannot be written down
    except OSError as error:
        raise StudyError(f"{folder.path}: cannot be written: {error.strerror or error}") from error
    return outcome


def _write_launch(folder: StudyFolder, outcome: Outcome, space: Space) -> None:
    folder.launch.unlink(missing_ok=True)  # an earlier one would no longer be true
    if outcome.recommendation is not None:
        file = launch_file(outcome.recommendation, outcome.points, space.file.study.name, space.digest)
        write_launch(file, folder.launch, caveats(outcome.records, outcome.recommendation.point.trial))


def front_json(front: tuple[Point, ...]) -> str:
    """Return the text of front.json."""
    return json.dumps([point.to_json() for point in front], indent=1, allow_nan=False) + "\n"
