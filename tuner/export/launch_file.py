"""launch.yaml: the configuration to serve, what to expect of it, and the command that serves it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from engine import backends
from engine.config import EngineConfig, LaunchEntry, LaunchFile, LaunchStudy, PolicyDraft, explain, load_launch
from engine.errors import EngineError
from tuner.errors import NothingFeasible, StudyError
from tuner.labels import clean
from tuner.pick import Recommendation
from tuner.points import Point
from tuner.policy_fit import METRIC, fit_for, policy_config
from tuner.records import TrialRecord
from tuner.store import write_atomic

HOST = "127.0.0.1"
PORT = 8000


def launch_file(recommendation: Recommendation, points: Iterable[Point], name: str, digest: str) -> LaunchFile:
    """Return the launch file of a recommendation; `expected` holds the intervals of every load measured."""
    chosen = recommendation.point
    mine = [point for point in points if point.trial == chosen.trial]
    return LaunchFile(
        entries=servers(recorded_config(chosen.trial, chosen.config)),
        expected={point.concurrency: _rounded(point) for point in mine if point.intervals},
        synthetic=chosen.synthetic,
        study=LaunchStudy(name=name, trial=chosen.trial, digest=digest),
    )


def by_load_file(recommendation: Recommendation, records: Sequence[TrialRecord], name: str, digest: str) -> LaunchFile:
    """Return what serves every load by the fastest draft measured there: servers like the recommended one, one a range
    of running requests where a server cannot switch drafts itself. `expected` holds each range's own measurements.

    Raises:
        NothingFeasible: one draft is best at every load, or no speculation was not measured on such a server.
    """
    chosen = recommendation.point
    like = recorded_config(chosen.trial, chosen.config)
    policy = None if isinstance(like.draft, PolicyDraft) else fit_for(records, like)
    if policy is None or len(policy.ranges) == 1:
        why = "no table of drafts can be fitted" if policy is None else "one draft serves every load best"
        raise NothingFeasible(f"{why}; export the recommendation itself")
    measured = {load: policy.at(load).speed[load] for load in policy.expected}
    return LaunchFile(
        entries=servers(policy_config(like, policy)),
        expected={load: {METRIC: _short(low, high)} for load, (low, _, high) in measured.items()},
        synthetic=chosen.synthetic,
        study=LaunchStudy(name=name, trial=chosen.trial, digest=digest),
    )


def servers(config: EngineConfig) -> tuple[LaunchEntry, ...]:
    """Return one entry, or one a range of a policy whose backend cannot switch drafts inside a server.

    Raises:
        ConfigError: a policy for a backend whose version is not known on this machine.
    """
    if not isinstance(config.draft, PolicyDraft):
        return (LaunchEntry(config=config),)
    return backends.get(config).entries(config)


def recorded_config(trial: int, config: Mapping[str, Any]) -> EngineConfig:
    """Return a record's configuration.

    Raises:
        StudyError: this version cannot read it.
    """
    try:
        return EngineConfig.model_validate(config)
    except ValidationError as error:
        raise StudyError(
            f"trial {trial}: its configuration is not valid in this version: {explain(error)[0]}"
        ) from error


def _rounded(point: Point) -> dict[str, tuple[float, float]]:
    return {name: _short(*interval) for name, interval in point.intervals.items()}


def _short(low: float, high: float) -> tuple[float, float]:
    """Return an interval with the four digits that a reader wants; outwards by at most a half of the last."""
    return float(f"{low:.4g}"), float(f"{high:.4g}")


def render(launch: LaunchFile, path: Path, remarks: Iterable[str] = ()) -> str:
    """Return the YAML text, with the commands on top and, as comments, what whoever serves it must know."""
    body = yaml.safe_dump(
        launch.model_dump(mode="json", by_alias=True, exclude_none=True),
        sort_keys=False,
        default_flow_style=None,
        width=110,
        allow_unicode=True,
    )
    head = [*serve_lines(path, launch), *remarks]
    return "".join(f"# {clean(line)}\n" for line in head) + body


def write_launch(launch: LaunchFile, path: Path, remarks: Iterable[str] = ()) -> None:
    """Write launch.yaml, with remarks as `render` takes them.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(path, render(launch, path, remarks))


def serve_lines(path: Path, launch: LaunchFile) -> list[str]:
    """Return what to type for each entry of a launch file, on ports of their own."""
    if len(launch.entries) == 1:
        return [f"Serve it:  {serve_command(path, launch=launch)}"]
    lines = ["One server a range of running requests; whoever routes requests chooses among them by load:"]
    for port, entry in enumerate(launch.entries, PORT):
        alone = launch.model_copy(update={"entries": (LaunchEntry(config=entry.config),)})
        most = f"{entry.first} and more" if entry.last is None else f"{entry.first}–{entry.last}"
        lines.append(f"{most} running:  {serve_command(path, port, alone)}")
    return lines


def serve_command(path: Path, port: int = PORT, launch: LaunchFile | None = None) -> str:
    """Return the command line that serves a launch file, to be pasted into a shell in this folder.

    Args:
        launch: what the file holds; None reads it where it exists. A foreign server is started by its own command,
            with the options of the first entry; what the machine's file adds to its environment may be secret and
            is left out.
    """
    try:
        config = _first_config(path, launch)
    except EngineError as error:
        return f"# cannot be served: {error}"
    if config is None or config.backend.kind == "native":
        return shlex.join([shorten(Path(sys.executable)), "-m", "engine", "serve", shorten(path), "--port", str(port)])
    try:
        backend = backends.get(config)
        command = backend.command(config, path, HOST, port)
        secret = backends.find_command(backend.kind, config.backend.version)[1].env
    except EngineError as error:
        return f"# {config.backend.kind} cannot be started from here: {error}"
    ours = (f"{name}={value}" for name, value in command.env.items() if secret.get(name) != value)
    return shlex.join(["env", *ours, *command.argv])


def _first_config(path: Path, launch: LaunchFile | None) -> EngineConfig | None:
    """Return the first entry's configuration; None where there is no file.

    Raises:
        EngineError: it cannot be read, or not in this version.
    """
    if launch is None:
        if not path.is_file():
            return None
        launch = load_launch(path)
    return launch.entries[0].config


def shorten(path: Path) -> str:
    """Return a path below the working directory as a relative one, others as they are."""
    absolute = os.path.abspath(path)  # not resolved: an environment's python is a link that must stay one
    here = os.path.join(os.getcwd(), "")
    return absolute.removeprefix(here)
