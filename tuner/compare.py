"""`tuner compare A B`: two configurations on one machine, their windows interleaved, and the paired interval.

Both servers run; pair k measures A then B, or B then A (ABBA), with the same prompts and arrivals. What the machine
does meanwhile falls on both sides of a pair, so the ratio B/A of a pair varies less than either side: its interval is
Student's over the pairs' logarithms. `relaunch` starts a server anew for each of its windows, where both do not fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from engine import backends
from engine.backends import Backend
from engine.config import EngineConfig, load_launch
from engine.errors import EngineError
from tuner.curve import run_window
from tuner.errors import Exit, TunerError, UsageError
from tuner.executors.base import Lease
from tuner.failures import Remains, classify
from tuner.journal import Journal
from tuner.labels import clean, draft_kind, flatten, number, plain, with_interval
from tuner.load.arrivals import Target
from tuner.load.intervals import student
from tuner.load.level import Plan, Run, level_of
from tuner.load.loop import run as run_loop
from tuner.load.workload import Requests, make_requests, parse_workload
from tuner.machine import look_at_gpus
from tuner.output import must_be_writable, write_json
from tuner.records import LeaseRequest, Level, Limits, TrialSpec, Workload, config_dict, metric_of
from tuner.trial import Server, leased, made_ready, not_gone, served

SHOWN = ("tpot_ms_p50", "ttft_ms_p50", "e2e_ms_mean", "output_tok_s", "accept_length")
LEAST_PAIRS = 3


class CompareFailed(TunerError):
    """A server could not be started or measured."""

    exit = Exit.NOTHING_FEASIBLE


@dataclass(frozen=True)
class Asked:
    """What the command line says. `pairs`: windows of each side, per level."""

    a: str
    b: str
    workload: Mapping[str, Any]
    pairs: int = 6
    seed: int = 0
    ready: float = 900.0
    relaunch: bool = False
    json_path: Path | None = None


@dataclass(frozen=True)
class Paired:
    """One metric at one level: the ratio B/A with its 95 % interval, None where a window did not measure it."""

    metric: str
    a: float | None
    b: float | None
    ratio: float | None
    interval: tuple[float, float] | None

    @property
    def verdict(self) -> str:
        """`A`, `B`, or `tie` when the interval does not tell them apart."""
        if self.ratio is None or self.interval is None or self.interval[0] <= 1 <= self.interval[1]:
            return "tie"
        return "B" if (self.ratio > 1) == (metric_of(self.metric).goal == "max") else "A"


def paired(metric: str, a: Sequence[Level], b: Sequence[Level], pooled: tuple[Level, Level]) -> Paired:
    """Compare one metric over pairs of windows."""
    values = [(x.metrics.get(metric), y.metrics.get(metric)) for x, y in zip(a, b, strict=True)]
    logs = [math.log(y / x) for x, y in values if x and y and x > 0 and y > 0]
    left, right = (level.metrics.get(metric) for level in pooled)
    if not logs or len(logs) < len(values):
        return Paired(metric, left, right, None, None)
    centre, interval = math.fsum(logs) / len(logs), None
    if len(logs) > 1:
        half = student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        interval = (math.exp(centre - half), math.exp(centre + half))
    return Paired(metric, left, right, math.exp(centre), interval)


# ------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Side:
    """One configuration, and what its windows brought by level."""

    name: str
    config: EngineConfig
    backend: Backend
    spec: TrialSpec
    requests: Requests
    runs: dict[int, list[Run]] = field(default_factory=dict)


def compare(asked: Asked, out: Console) -> None:
    """Measure both, print the comparison, and write the JSON.

    Raises:
        UsageError: an argument makes no sense.
        ConfigError: A or B is no configuration.
        CompareFailed: one of them could not be started or measured.
    """
    workload = parse_workload(asked.workload)
    if asked.pairs < LEAST_PAIRS:
        raise UsageError(f"--pairs must be at least {LEAST_PAIRS}: fewer have no interval")
    if asked.json_path is not None:
        must_be_writable(asked.json_path)
    with tempfile.TemporaryDirectory(prefix="tuner-compare-") as folder:
        sides = tuple(
            _side(name, word, number, Path(folder), workload, asked)
            for number, (name, word) in enumerate((("A", asked.a), ("B", asked.b)))
        )
        run_loop(_measure(sides, asked, out))
    document = as_json(sides, asked, workload)
    if asked.json_path is not None:
        write_json(asked.json_path, document)
    out.print(view(sides))


def config_of(word: str) -> EngineConfig:
    """Return the configuration of a launch file with one entry, a bare EngineConfig, or `STUDY:TRIAL`.

    Raises:
        ConfigError, StudyError, UsageError: there is none.
    """
    folder, colon, trial = word.rpartition(":")
    if colon and trial.isdigit() and Path(folder).is_dir():
        from tuner import session

        _, outcome = session.load_outcome(session.existing(Path(folder)))
        record = next((record for record in outcome.records if record.trial == int(trial)), None)
        if record is None:
            raise UsageError(f"{folder}: there is no trial {trial}")
        return EngineConfig.model_validate(record.config)
    launch = load_launch(Path(word))
    if len(launch.entries) > 1:
        raise UsageError(f"{word}: has {len(launch.entries)} entries; compare files with one")
    return launch.entries[0].config


def _side(name: str, word: str, index: int, folder: Path, workload: Workload, asked: Asked) -> Side:
    config = config_of(word)
    gpus = config.parallel.gpus if look_at_gpus().gpus else 0
    spec = TrialSpec(
        study=str(folder),
        trial=index,
        role="confirm",
        config=config,
        workload=workload,
        levels=workload.concurrency,
        seed=asked.seed,
        served_name=config.model.target,
        limits=Limits.of(workload, asked.ready),
        lease=LeaseRequest(gpus=gpus),
    )
    requests = make_requests(workload, spec.served_name, asked.seed)
    return Side(name, config, backends.get(config), spec, requests)


async def _measure(sides: tuple[Side, ...], asked: Asked, out: Console) -> None:
    """Run every window of both sides."""
    async with _room(sides, asked.relaunch) as leases, contextlib.AsyncExitStack() as stack:
        servers: dict[str, Server] = {}
        if not asked.relaunch:
            for side in sides:
                servers[side.name] = await stack.enter_async_context(_ready(side, leases[side.name]))
        workload = sides[0].spec.workload
        firsts = dict.fromkeys(workload.concurrency, 0)
        for pair in range(asked.pairs):
            order = sides if pair % 2 == 0 else sides[::-1]
            for users in workload.concurrency:
                used = []
                for side in order:
                    out.print(f"pair {pair + 1} of {asked.pairs}, c={users}: {side.name}", markup=False)
                    plan = Plan(users, workload, asked.seed + pair, firsts[users])
                    run = await _window(side, servers.get(side.name), leases[side.name], plan)
                    side.runs.setdefault(users, []).append(run)
                    used.append(run.uncounted + len(run.traces))
                firsts[users] += max(used)


@contextlib.asynccontextmanager
async def _room(sides: tuple[Side, ...], relaunch: bool) -> AsyncIterator[dict[str, Lease]]:
    """Lease what both sides need: at once, or one after the other. On CPUs they share one lease: one idles."""
    needs = [side.spec.lease.gpus for side in sides]
    gpus = max(needs) if relaunch else sum(needs)
    spec = sides[0].spec.model_copy(update={"lease": LeaseRequest(gpus=gpus)})
    async with leased(spec, Journal(spec, lambda _: None)) as held:
        starts = (0, 0) if relaunch else (0, needs[0])
        yield {
            side.name: dataclasses.replace(held, gpus=held.gpus[start : start + need])
            for side, start, need in zip(sides, starts, needs, strict=True)
        }


@contextlib.asynccontextmanager
async def _ready(side: Side, held: Lease) -> AsyncIterator[Server]:
    """Run a side's server until the block is left.

    Raises:
        CompareFailed: it did not become ready, runs another config than asked for, or could not be ended.
    """
    try:
        with served(side.spec, held, side.backend, Journal(side.spec, lambda _: None)) as server:
            _, remains = await made_ready(side.spec, server, held, side.backend, side.requests)
            if remains is not None:
                raise _failed(side, remains, server)
            yield server
        if (left := not_gone(server.stopped, server.held_back)) is not None:
            raise CompareFailed(f"{side.name}: {left.kind} at {left.stage}: {left.evidence[0]}; {left.advice}")
    except EngineError as error:
        raise CompareFailed(f"{side.name}: {error}") from error


async def _window(side: Side, server: Server | None, held: Lease, plan: Plan) -> Run:
    """Measure one window of a side, on a server of its own if none is running."""
    if server is None:
        async with _ready(side, held) as started:
            return await _window(side, started, held, plan)
    target = Target(server.endpoint, side.requests, side.spec.limits.request_s, side.spec.limits.level_s / 2)
    run = await run_window(side.spec, server.process, target, plan, side.backend)
    if isinstance(run, Remains):
        raise _failed(side, run, server)
    return run


def _failed(side: Side, remains: Remains, server: Server) -> CompareFailed:
    failure = classify(dataclasses.replace(remains, tail=server.process.tail()))
    last = clean(failure.told or failure.evidence[0]) if failure.evidence else ""
    return CompareFailed(f"{side.name}: {failure.kind} at {failure.stage}: {last}; {failure.advice}")


# --------------------------------------------------------------------------------------------------------- results


def results(sides: Sequence[Side]) -> Iterator[tuple[int, tuple[Level, Level], list[Paired]]]:
    """Yield (users, pooled levels of both sides, the compared metrics) for every level."""
    a, b = sides
    for users in a.runs:
        windows = [[level_of([run], gpus=side.spec.lease.gpus) for run in side.runs[users]] for side in (a, b)]
        pooled = tuple(level_of(side.runs[users], gpus=side.spec.lease.gpus) for side in (a, b))
        both = (pooled[0], pooled[1])
        yield users, both, [paired(metric, windows[0], windows[1], both) for metric in SHOWN]


def as_json(sides: Sequence[Side], asked: Asked, workload: Workload) -> dict[str, Any]:
    """Return the comparison and both sides' levels."""
    found = list(results(sides))
    return {
        "schema": 1,
        "configs": {side.name: config_dict(side.config) for side in sides},
        "pairs": asked.pairs,
        "seed": asked.seed,
        "relaunched": asked.relaunch,
        "workload": workload.model_dump(mode="json"),
        "levels": [
            {
                "concurrency": users,
                "metrics": [dataclasses.asdict(each) | {"verdict": each.verdict} for each in metrics],
                **{side.name: level.model_dump(mode="json") for side, level in zip(sides, levels, strict=True)},
            }
            for users, levels, metrics in found
        ],
    }


def view(sides: Sequence[Side]) -> RenderableType:
    """Return the comparison for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("c", "metric", "A", "B", "B / A [95 %]", ""):
        table.add_column(name, justify="left" if name in ("metric", "") else "right", no_wrap=True)
    notes = []
    for users, levels, metrics in results(sides):
        for each in metrics:
            if each.a is None and each.b is None:
                continue
            verdict = "tie" if each.verdict == "tie" else f"{each.verdict} is better"
            ratio = with_interval(each.ratio, each.interval)
            table.add_row(str(users), each.metric, number(each.a), number(each.b), ratio, verdict)
        for side, level in zip(sides, levels, strict=True):
            if level.client is not None and level.client.bound:
                notes.append(f"c={users}: {side.name} is CLIENT BOUND: the load generator was too slow")
            if level.errors:
                kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(level.errors.items()))
                notes.append(f"c={users}: {side.name} failed: {kinds}")
    names = [f"{side.name}: {escape(label)}" for side, label in zip(sides, labels(sides), strict=True)]
    return Group(*map(Text, names), Text(), table, *map(Text, notes))


def labels(sides: Sequence[Side]) -> tuple[str, ...]:
    """Return what sets the two configurations apart."""
    flat = [flatten(config_dict(side.config)) for side in sides]
    known = dict.fromkeys(key for each in flat for key in each)
    paths = [path for path in known if len({str(each.get(path)) for each in flat}) > 1]
    return tuple(
        " ".join(
            [draft_kind(config_dict(side.config))]
            + [f"{path}={plain(each[path])}" for path in paths if path in each and path != "draft.kind"]
        )
        for side, each in zip(sides, flat, strict=True)
    )
