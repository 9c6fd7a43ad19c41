"""`tuner load`: one level against any OpenAI-compatible server, with live progress, a table and JSON."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from engine.backends import Native
from tuner.errors import Exit, TunerError, UsageError
from tuner.labels import clean, number, with_interval
from tuner.load.arrivals import Target
from tuner.load.client import Endpoint, parse_endpoint
from tuner.load.gate import enough
from tuner.load.level import Plan, Run, level_of, run_level
from tuner.load.loop import run as run_loop
from tuner.load.workload import make_requests, parse_workload
from tuner.output import must_be_writable, write_json
from tuner.records import STATISTICS, Level, Workload
from tuner.slo import parse_slo

LATENCIES = ("ttft_ms", "tpot_ms", "chunk_gap_ms", "e2e_ms", "normalized_ms")
RATES = ("output_tok_s", "output_tok_s_per_gpu", "output_tok_s_per_user", "request_rps", "goodput_rps", "accept_length")
REFRESH_SECONDS = 0.2


class LoadFailed(TunerError):
    """Every request failed: there is nothing to report, least of all a speed."""

    exit = Exit.NOTHING_FEASIBLE


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    url: str
    model: str
    users: int
    workload: Mapping[str, Any]
    requests: int | None = None
    seed: int = 0
    slo: str = ""
    gpus: int = 0
    stall: float = 120.0
    total: float = 3600.0
    processes: int | None = None
    key_variable: str | None = None
    json_path: Path | None = None


def load(asked: Asked, out: Console) -> None:
    """Measure, print the table, and write the JSON.

    Raises:
        UsageError: an argument makes no sense.
        WorkloadError: the prompts cannot be used.
        LoadFailed: no request was answered well; the JSON is written all the same.
    """
    workload = parse_workload({**asked.workload, "concurrency": [asked.users]})
    endpoint, slo = _endpoint(asked), _slo(asked.slo)
    if asked.json_path is not None:
        must_be_writable(asked.json_path)
    requests = make_requests(workload, asked.model, asked.seed)
    target = Target(endpoint, requests, asked.stall, asked.total)
    for warning in workload.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    runs: list[Run] = []
    first = 0
    for repeat in range(workload.repeats):
        plan = Plan(asked.users, workload, asked.seed, first, asked.requests)
        label = f"c={asked.users}" + (f", {repeat + 1} of {workload.repeats}" if workload.repeats > 1 else "")
        with _progress(asked.requests, label) as tell:
            runs.append(
                run_loop(run_level(target, plan, statistics=_statistics, progress=tell, processes=asked.processes))
            )
        first += len(runs[-1].traces) + runs[-1].uncounted
    found = level_of(runs, gpus=asked.gpus, slo=slo)
    document = as_json(found, runs, asked, workload, endpoint)
    if asked.json_path is not None:
        write_json(asked.json_path, document)
    if found.n == 0:
        raise LoadFailed(_why_nothing(runs, endpoint))
    out.print(table(found, runs))


def _endpoint(asked: Asked) -> Endpoint:
    headers: tuple[tuple[str, str], ...] = ()
    if asked.key_variable is not None:
        key = os.environ.get(asked.key_variable, "")
        if not key or not key.isascii() or not key.isprintable():
            raise UsageError(f"the variable {asked.key_variable} holds no key")
        headers = (("authorization", f"Bearer {key}"),)
    try:
        return parse_endpoint(asked.url, headers)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _slo(text: str) -> dict[str, float]:
    try:
        return parse_slo(text).uppers()
    except ValueError as error:
        raise UsageError(str(error)) from error


_statistics = Native().request_stats  # other servers say nothing under its names, and nothing is made up


@contextmanager
def _progress(total: int | None, label: str) -> Iterator[Any]:
    """Show how many requests are over, on a terminal; yield what is told of it."""
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    shown = 0.0
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=total)

        def tell(over: int) -> None:
            nonlocal shown
            if time.monotonic() - shown >= REFRESH_SECONDS:
                shown = time.monotonic()
                bar.update(task, completed=over, refresh=True)

        yield tell


# --------------------------------------------------------------------------------------------------------- results


def as_json(level: Level, runs: Sequence[Run], asked: Asked, workload: Workload, endpoint: Endpoint) -> dict[str, Any]:
    """Return what is known of a level, latencies by statistic; null is not measured, and `few` says why."""
    traces = [trace for run in runs for trace in run.traces]
    prompt = workload.model_dump(mode="json")
    client = None if level.client is None else level.client.model_dump(mode="json")
    return {
        "schema": 1,
        "url": str(endpoint),
        "model": asked.model,
        "concurrency": asked.users,
        "requests": len(traces),
        "completed": level.n,
        "uncounted": sum(run.uncounted for run in runs),
        "seconds": level.seconds,
        "steady": level.steady,
        "output_tokens": level.output_tokens,
        **{name: level.metrics[name] for name in (*RATES, "error_rate")},
        **{name: {s: level.metrics[f"{name}_{s}"] for s in STATISTICS} for name in LATENCIES},
        "intervals": level.intervals,
        "few": level.few,
        "errors": level.errors,
        "slices": {name: part.model_dump(mode="json") for name, part in level.slices.items()},
        "client": client,
        "workload": prompt,
        "seed": asked.seed,
        "warnings": list(workload.warnings),
    }


def table(level: Level, runs: Sequence[Run]) -> RenderableType:
    """Return a level for people: rates, latencies, errors, and the client's own error."""
    rates = Table(box=None, pad_edge=False, show_header=False)
    for name in RATES:
        if level.metrics[name] is not None:
            rates.add_row(name, with_interval(level.metrics[name], level.intervals.get(name)))
    latencies = Table(box=None, pad_edge=False, header_style="bold")
    latencies.add_column("ms")
    for statistic in STATISTICS:
        latencies.add_column(statistic, justify="right", no_wrap=True)
    for name in LATENCIES:
        latencies.add_row(name.removesuffix("_ms"), *(_cell(level, f"{name}_{statistic}") for statistic in STATISTICS))
    return Group(Text(_heading(level, runs)), Text(), rates, Text(), latencies, Text(), *map(Text, _remarks(level)))


def _heading(level: Level, runs: Sequence[Run]) -> str:
    over = (
        f"{level.n} requests, {level.output_tokens} tokens in {level.seconds or 0:.2f} s at {level.concurrency} users"
    )
    return over + f"; {sum(run.uncounted for run in runs)} for warm-up and drain, not counted"


def _cell(level: Level, name: str) -> str:
    value = level.metrics[name]
    if value is None:
        return f"n < {level.few[name]}" if name in level.few else "–"
    return with_interval(value, level.intervals.get(name)) if name.endswith("_p50") else number(value)


def _remarks(level: Level) -> Iterator[str]:
    """Yield what must be said of the numbers."""
    if level.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(level.errors.items()))
        yield f"failed: {kinds}; in no latency"
    if not level.steady:
        yield "not steady: the completion rate was still changing when the longest window was over"
    if level.n < enough(level.concurrency):
        yield f"only {level.n} requests: ask for more"
    client = level.client
    if client is not None:
        allowed = "" if client.limit_ms is None else f", {number(client.limit_ms)} allowed"
        lag = f"lag {number(client.lag_ms_mean)} ms, p99 {number(client.lag_ms_p99)}{allowed}"
        yield f"client: {lag}; processes: {client.processes}, busy {client.busy:.0%}"
        if client.bound:
            yield "CLIENT BOUND: the load generator was too slow; these numbers are its own, not the server's"
    for name, part in level.slices.items():
        tpot, length = part.metrics.get("tpot_ms_p50"), part.metrics.get("accept_length")
        yield f"  {clean(name)}: {part.n} requests, tpot_ms_p50 {number(tpot)}, accept_length {number(length)}"


def _why_nothing(runs: Sequence[Run], endpoint: Endpoint) -> str:
    traces = [trace for run in runs for trace in run.traces]
    first = f"{traces[0].error}: {clean(traces[0].detail)}" if traces else "none was sent"
    return f"{endpoint}: all {len(traces)} requests failed; the first: {first}"
