"""What a search would cost, before it costs anything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from engine.config import EngineConfig
from engine.estimate import GIB
from tuner.budget import confirmations
from tuner.durations import format_duration
from tuner.feasible import Pruning, StaticChecks
from tuner.labels import label, plain
from tuner.space import Infeasible, Space

LONG = 3600.0  # a study that takes longer asks first
SAMPLE = 200
LOAD_BYTES_PER_SECOND = 1e9  # reading weights from a disk
START_SECONDS = {"native": 4.0, "sglang": 75.0, "vllm": 90.0}  # without the weights, kernels compiled before
LEVEL_SECONDS = 1.0  # warm-up and drain of a level


@dataclass(frozen=True)
class Cost:
    """An estimate: launches, seconds of wall time, GPU-hours."""

    launches: int | None
    confirmations: int
    trial_seconds: float
    seconds: float | None
    gpu_hours: float | None


def cost(space: Space, pruning: Pruning, checks: StaticChecks) -> Cost:
    """Estimate a whole search from the baseline's size and the workload."""
    found = space.baseline(checks)
    config = None if isinstance(found, Infeasible) else found[0]
    budget = space.file.study.budget
    start = START_SECONDS[config.backend.kind if config else "native"]
    need = checks.memory(config) if config else None
    if need is not None:
        start += (need.weights + need.draft_weights) / LOAD_BYTES_PER_SECOND
    work = space.file.workload
    trial = start + len(space.levels) * (work.repeats * work.window + LEVEL_SECONDS)
    launches = budget.trials
    if pruning.feasible is not None:
        # The baseline is one of the points where `none` is searched, else it comes on top.
        launches = min(launches or pruning.feasible + 1, pruning.feasible + 1)
    gpus = max(1, _most_gpus(space, checks)) if checks.machine.kind == "cuda" else 0
    again = confirmations(launches or 0)
    limits = [] if launches is None else [(launches + again) * trial]
    if budget.wall is not None:
        limits.append(budget.wall)
    if budget.gpu_hours is not None and gpus:
        limits.append(budget.gpu_hours * 3600 / gpus)
    seconds = min(limits, default=None)
    hours = seconds * gpus / 3600 if seconds is not None and gpus else None
    return Cost(launches, again, trial, seconds, hours)


def _most_gpus(space: Space, checks: StaticChecks) -> int:
    return max((config.parallel.gpus for config in _sample(space, checks)), default=1)


def _sample(space: Space, checks: StaticChecks) -> Iterator[EngineConfig]:
    """Yield configurations that can run: all of a small space, else random ones."""
    size = space.size()
    rng = random.Random(space.file.study.seed)
    small = size is not None and size <= SAMPLE
    points = space.points() if small else (space.draw(rng) for _ in range(SAMPLE))
    for assignment in points:
        judged = space.judge(assignment, checks)
        if not isinstance(judged, Infeasible):
            yield judged


def view(space: Space, pruning: Pruning, checks: StaticChecks) -> RenderableType:
    """Return what `--dry-run` prints."""
    parts: list[RenderableType] = [Text(line) for line in _points(space, pruning, checks)]
    parts += [Text(f"Machine: {_machine(checks)}"), Text()]
    found = space.baseline(checks)
    if isinstance(found, Infeasible):
        parts.append(Text(f"The baseline cannot run here: {'; '.join(found.reasons)}"))
        return Group(*parts)  # and so nothing would be launched
    parts += [_memory(space, found[0], checks), Text()]
    parts += [Text(line) for line in _cost(space, cost(space, pruning, checks))]
    return Group(*parts)


def heading(space: Space, pruning: Pruning, checks: StaticChecks, folder: str) -> Iterator[str]:
    """Yield what a search says first: what is searched, where, and what this machine leaves out."""
    if pruning.feasible is not None:
        points = f"{pruning.feasible} of {pruning.points} points can run here"
    else:
        points = f"{pruning.points} points" if pruning.points is not None else "a continuous space"
    yield f"{space.file.study.name}: {points}; {_machine(checks)}; {folder}"
    for dropped in pruning.dropped:
        yield f"  left out: {dropped.path} = {plain(dropped.value)}: {dropped.reason}"


def _machine(checks: StaticChecks) -> str:
    machine = checks.machine
    what = f"{machine.devices} × {machine.name}" if machine.kind == "cuda" else f"{machine.name}, {machine.cores} cores"
    return f"{what}, {machine.memory / GIB:.0f} GiB" + (f" ({machine.note})" if machine.note else "")


def _points(space: Space, pruning: Pruning, checks: StaticChecks) -> Iterator[str]:
    yield f"Study {space.file.study.name}: {len(space.domains)} searched paths"
    if pruning.points is None:
        yield "Points: more than can be counted (a continuous range, or too many conditions)"
    elif pruning.feasible is None:
        yield f"Points: {pruning.points}, too many to judge one by one; impossible ones are refused when suggested"
    else:
        share = 1 - pruning.feasible / pruning.points
        yield f"Points: {pruning.points}, of which {pruning.feasible} can run here; {share:.0%} pruned statically"
    if pruning.feasible is None:
        yield _sampled_share(space, checks)
    for dropped in pruning.dropped if pruning.feasible != 0 else ():
        yield f"  never: {dropped.path} = {plain(dropped.value)}: {dropped.reason}"
    for reason, count in sorted(pruning.reasons.items(), key=lambda item: -item[1])[:10]:
        yield f"  {count} points: {reason}"


def _sampled_share(space: Space, checks: StaticChecks) -> str:
    running = sum(1 for _ in _sample(space, checks))
    return f"Pruned statically: about {1 - running / SAMPLE:.0%}, by {SAMPLE} random points"


def _memory(space: Space, baseline: EngineConfig, checks: StaticChecks) -> RenderableType:
    needs = [(config, need) for config in _sample(space, checks) if (need := checks.memory(config)) is not None]
    base = checks.memory(baseline)
    if base is None:
        return Text("Memory: unknown, the model's folder is not here; loading its weights comes on top of what follows")
    rows = [("baseline", baseline, base)]
    if needs:
        largest = max(needs, key=lambda item: item[1].total)
        rows.append(("largest", *largest))
    table = Table(title="Memory per device, estimated (GiB)", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("configuration")
    for name in (*base.items(), "total"):
        table.add_column(name, justify="right")
    paths = [domain.path for domain in space.domains]
    for name, config, need in rows:
        cells = [f"{count / GIB:.2f}" for count in (*need.items().values(), need.total)]
        table.add_row(name, escape(label(config.model_dump(mode="json"), paths)), *cells)
    return table


def _cost(space: Space, estimate: Cost) -> Iterator[str]:
    levels = ", ".join(map(str, space.levels))
    trial = format_duration(estimate.trial_seconds)
    launches = "as many as the budget allows" if estimate.launches is None else f"at most {estimate.launches}"
    yield f"Launches: {launches}, then up to {estimate.confirmations} to confirm"
    yield f"Each measures {len(space.levels)} loads (c = {levels}) and takes about {trial} by estimate"
    wall = "unknown" if estimate.seconds is None else f"at most about {format_duration(estimate.seconds)}"
    yield f"Wall time: {wall}"
    if estimate.gpu_hours is not None:
        yield f"GPU-hours: at most about {estimate.gpu_hours:.1f}"
