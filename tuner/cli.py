"""`tuner`: parses, calls, prints. What a command does is elsewhere."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from engine.config import EngineConfig, LaunchFile
from engine.errors import EngineError
from tuner.errors import Exit, NothingFeasible, SpaceError, StudyError, TunerError, UsageError
from tuner.output import must_be_writable, write_json, writing

if TYPE_CHECKING:  # commands import what they need: `tuner schema` shall not load an optimiser
    from tuner.feasible import Pruning, StaticChecks
    from tuner.session import Session
    from tuner.space import Pick, Space
    from tuner.study import Outcome

app = typer.Typer(
    name="tuner",
    help="Find the launch configuration that is best on this machine, with the proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SpacePath = Annotated[Path, typer.Argument(metavar="SPACE", help="A search-space file; see docs/space-file.md.")]
StudyPath = Annotated[Path, typer.Argument(metavar="STUDY", help="A study's folder: RESULTS/<study.name>.")]
Give = Annotated[
    float | None,
    typer.Option(min=0, max=0.99, help="Share of the best at the load that may be given up for more over all loads."),
]
Trials = Annotated[int | None, typer.Option("--trials", min=1, help="Launches, instead of budget.trials.")]


class ExportForm(StrEnum):
    """What `tuner export` writes."""

    LAUNCH = "launch"
    BY_LOAD = "by-load"
    OPTUNA_JOURNAL = "optuna-journal"


def console() -> Console:
    """Return where results are printed; what is no terminal has lines of any length."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)


@app.command()
def search(
    space: SpacePath,
    results: Annotated[Path, typer.Option("--results", help="Folder of studies.")] = Path("results"),
    trials: Trials = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it would cost; launch nothing.")] = False,
    machine: Annotated[
        str | None, typer.Option("--machine", help="With --dry-run: plan for GPUs that are elsewhere, such as 8xH200.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before a long study.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Keep an earlier study of this name aside as <name>.1, and start anew.")
    ] = False,
) -> None:
    """Measure what a search-space file describes, and recommend what to serve."""
    from tuner import dryrun, session
    from tuner.space import load_space

    if machine is not None and not dry_run:
        raise UsageError("--machine plans for another machine; add --dry-run")
    asked = session.with_trials(load_space(space), trials)
    for warning in asked.file.workload.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    out = console()
    checks, pruning = session.plan(asked, machine)
    if dry_run:
        out.print(dryrun.view(asked, pruning, checks))
        return
    seconds = dryrun.cost(asked, pruning, checks).seconds
    if not yes and (seconds is None or seconds > dryrun.LONG):
        _ask(out, asked, pruning, checks)
    _run(session.begin(asked, results, sys.argv, trials=trials, fresh=fresh), out)


@app.command()
def resume(
    study: StudyPath,
    trials: Trials = None,
    accept_change: Annotated[
        bool, typer.Option("--accept-change", help="Go on although machine, versions or space changed.")
    ] = False,
) -> None:
    """Go on with a study where it stopped; nothing is measured twice."""
    from tuner import session

    _run(session.reopen(study, sys.argv, trials=trials, accept_change=accept_change), console())


@app.command()
def front(
    study: StudyPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print the entries of front.json.")] = False,
) -> None:
    """Print the front of a study, also while it runs."""
    from tuner import session
    from tuner.tables import FrontTable, reason_lines, recommendation_lines

    space, outcome = session.load_outcome(session.existing(study))
    if as_json:
        print(session.front_json(outcome.front), end="")
        return
    out = console()
    if not outcome.front:
        raise NothingFeasible(f"{study}: {outcome.why or 'nothing was measured yet'}")
    out.print(FrontTable(outcome, space))
    if outcome.recommendation is not None:
        out.print()
        lines = recommendation_lines(outcome.recommendation, outcome, space)
        for line in [*lines, *reason_lines(outcome, space)]:
            out.print(line, markup=False, soft_wrap=True)


@app.command()
def show(
    study: StudyPath,
    trial: Annotated[int, typer.Argument(min=0, help="Number of the trial.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the line of trials.jsonl.")] = False,
) -> None:
    """Print everything known of one trial."""
    from tuner import session
    from tuner.tables import trial_view

    space, outcome = session.load_outcome(session.existing(study))
    record = next((record for record in outcome.records if record.trial == trial), None)
    if record is None:
        known = f"0 to {len(outcome.records) - 1}" if outcome.records else "none yet"
        raise UsageError(f"{study}: there is no trial {trial}; recorded are {known}")
    if as_json:
        print(record.model_dump_json())
    else:
        baseline = next((each for each in outcome.records if each.role == "baseline" and each.levels), None)
        console().print(trial_view(record, space, baseline))


@app.command()
def pick(
    study: StudyPath,
    slo: Annotated[str | None, typer.Option(help="Limits, such as 'ttft_ms_p90<500, tpot_ms_p50<20'.")] = None,
    load: Annotated[int | None, typer.Option(min=1, help="Requests in flight to choose for.")] = None,
    give: Give = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the point as JSON.")] = False,
) -> None:
    """Print the point to serve under limits and a load; without options, those of the space file."""
    from tuner import session
    from tuner.outcome import best_of
    from tuner.tables import reason_lines, recommendation_lines

    space, outcome = session.load_outcome(session.existing(study))
    best = best_of(outcome.points, outcome.records, space, _pick(space, slo=slo, load=load, give=give))
    if as_json:
        estimate = None if best.estimate is None else asdict(best.estimate)
        judged = {"misses": list(best.misses), "speedup": best.speedup, "estimate": estimate}
        print(json.dumps(best.point.to_json() | judged, indent=1))
    else:
        out = console()
        lines = recommendation_lines(best, outcome, space)
        for line in [*lines, *reason_lines(replace(outcome, recommendation=best), space)]:
            out.print(line, markup=False, soft_wrap=True)
    if best.misses:
        raise NothingFeasible("no measured configuration meets these limits")


@app.command()
def export(
    study: StudyPath,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: print it.")] = None,
    slo: Annotated[str | None, typer.Option(help="Limits, as for pick.")] = None,
    load: Annotated[int | None, typer.Option(min=1, help="Requests in flight to choose for.")] = None,
    give: Give = None,
    form: Annotated[
        ExportForm,
        typer.Option(
            "--format",
            help="launch: what to serve; by-load: its fastest draft for every load, one server a range where a server "
            "cannot switch; optuna-journal: the study, for optuna-dashboard.",
        ),
    ] = ExportForm.LAUNCH,
) -> None:
    """Write the launch file of the recommended point, or of drafts by load, or the study as an Optuna journal."""
    from tuner import session
    from tuner.export.launch_file import by_load_file, launch_file, render, serve_lines, write_launch
    from tuner.outcome import best_of
    from tuner.verdicts import caveats

    folder = session.existing(study)
    space, outcome = session.load_outcome(folder)
    if form is ExportForm.OPTUNA_JOURNAL:
        _export_journal(space, outcome, folder.path / "optuna.journal" if out is None else out)
        return
    best = best_of(outcome.points, outcome.records, space, _pick(space, slo=slo, load=load, give=give))
    if best.misses:
        raise NothingFeasible(f"no measured configuration meets these limits: {'; '.join(best.misses)}")
    name, digest = space.file.study.name, space.digest
    if form is ExportForm.BY_LOAD:
        launch = by_load_file(best, outcome.records, name, digest)
    else:
        launch = launch_file(best, outcome.points, name, digest)
    remarks = caveats(outcome.records, best.point.trial)
    if out is None:
        print(render(launch, folder.launch, remarks), end="")
        return
    with writing(out):
        write_launch(launch, Path(os.path.realpath(out)), remarks)  # a link is followed, not replaced
    print("\n".join(serve_lines(out, launch)))


@app.command()
def load(
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI-compatible server, such as http://HOST:PORT.")],
    model: Annotated[str, typer.Option(help="Name of the model that requests carry.")],
    concurrency: Annotated[int, typer.Option(min=1, max=100_000, help="Users: requests kept in flight.")] = 1,
    requests: Annotated[int | None, typer.Option(min=1, help="Measure exactly so many; default: a window.")] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="Most tokens generated per request.")] = 64,
    prompts: Annotated[str, typer.Option(help="`bundled`, `random`, or a JSONL or ShareGPT file.")] = "bundled",
    arrivals: Annotated[str, typer.Option(help="closed, constant, poisson or gamma.")] = "closed",
    rate: Annotated[float | None, typer.Option(help="Requests a second of each user, unless closed.")] = None,
    shape: Annotated[float | None, typer.Option(help="Of gamma: below 1 in bursts.")] = None,
    shared_prefix: Annotated[float, typer.Option(help="Share of a prompt that all have in common.")] = 0.0,
    category: Annotated[list[str] | None, typer.Option(help="Only prompts of this one; may be repeated.")] = None,
    window: Annotated[str, typer.Option(help="Shortest measured time.")] = "10s",
    longest: Annotated[str | None, typer.Option(help="Longest measured time; default: twice the window.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measure so many times.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the text.")] = False,
    slo: Annotated[str, typer.Option(help="Limits for goodput, such as 'ttft_ms_p90<500'.")] = "",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of the server, for throughput per GPU.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds without a byte that end a request.")] = 120.0,
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds that end a request in any case.")] = 3600.0,
    processes: Annotated[int | None, typer.Option(min=1, help="Of the client; default: as it needs.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Variable that holds the server's key.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Order of prompts and arrivals.")] = 0,
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write.")] = None,
) -> None:
    """Put load on any OpenAI-compatible server and measure it."""
    from tuner.load.command import Asked
    from tuner.load.command import load as measure

    law = {key: value for key, value in (("kind", arrivals), ("rate", rate), ("shape", shape)) if value is not None}
    workload = {
        "prompts": prompts,
        "arrivals": law,
        "shared_prefix": shared_prefix,
        "categories": category,
        "window": window,
        "longest": longest,
        "repeats": repeats,
        "output_tokens": output_tokens,
        "ignore_eos": ignore_eos,
    }
    asked = Asked(
        url, model, concurrency, workload, requests, seed, slo, gpus, timeout, deadline, processes, api_key_env, as_json
    )
    measure(asked, console())


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A launch file, an EngineConfig, or STUDY:TRIAL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What it is compared with.")],
    concurrency: Annotated[list[int] | None, typer.Option(min=1, help="A level; may be repeated.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Windows of each side, per level.")] = 6,
    window: Annotated[str, typer.Option(help="Shortest measured time of a window.")] = "5s",
    output_tokens: Annotated[int, typer.Option(min=1, help="Most tokens generated per request.")] = 64,
    prompts: Annotated[str, typer.Option(help="`bundled`, `random`, or a JSONL or ShareGPT file.")] = "bundled",
    relaunch: Annotated[bool, typer.Option("--relaunch", help="Start a server for each window; one runs.")] = False,
    ready: Annotated[float, typer.Option(min=1, help="Seconds a server may take to become ready.")] = 900.0,
    seed: Annotated[int, typer.Option(min=0, help="Order of prompts and arrivals.")] = 0,
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write.")] = None,
) -> None:
    """Measure two configurations in turns, and say which is better, with the paired interval."""
    from tuner.compare import Asked
    from tuner.compare import compare as measure

    levels = sorted(set(concurrency or (1, 4, 8)))
    workload = {"prompts": prompts, "window": window, "output_tokens": output_tokens, "concurrency": levels}
    measure(Asked(a, b, workload, pairs, seed, ready, relaunch, as_json), console())


@app.command()
def report(
    study: StudyPath,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: report.html there.")] = None,
) -> None:
    """Write the report of a study as one file, also while it runs."""
    from tuner import session
    from tuner.report.page import write_report

    folder = session.existing(study)
    target = folder.report if out is None else out
    with writing(target):
        write_report(folder, None if out is None else Path(os.path.realpath(out)))  # a link is followed, not replaced
    print(f"Report:  {target}")


@app.command()
def dashboard(
    studies: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[STUDY]...", help="Studies, or folders of studies; default: results."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 is any free one.")] = 8080,
    token: Annotated[str | None, typer.Option(envvar="TUNER_DASHBOARD_TOKEN", help="Default: a new one.")] = None,
) -> None:
    """Show studies in a browser, also while they run; nothing is written."""
    from tuner.dashboard.serve import serve

    serve(studies or [Path("results")], host, port, token)


@app.command()
def watch(
    study: StudyPath,
    once: Annotated[bool, typer.Option("--once", help="Print where it stands, and end.")] = False,
) -> None:
    """Show a study in the terminal until it ends."""
    from tuner import session
    from tuner.watch import watch as follow

    follow(session.existing(study), console(), once=once)


@app.command()
def doctor(
    results: Annotated[Path, typer.Option("--results", help="Folder of studies.")] = Path("results"),
) -> None:
    """Say what this machine can run."""
    from tuner.doctor import run

    raise typer.Exit(run(console(), results if results.is_dir() else Path.cwd()))


@app.command()
def clean(
    results: Annotated[Path, typer.Option("--results", help="Folder of studies.")] = Path("results"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """List what dead studies left on this machine and, confirmed, end it."""
    from tuner.clean import leftovers

    found = leftovers(results)
    print("\n".join(map(str, found)) or "Nothing is left of dead studies.")
    if not found or not (yes or (sys.stdin.isatty() and typer.confirm("End and remove all of this?"))):
        return
    if stuck := [f"{left}: {why}" for left in found if (why := left.end())]:
        raise StudyError("; ".join(stuck))
    print(f"Gone: {len(found)}.")


@app.command()
def simulate(
    space: SpacePath,
    table: Annotated[Path, typer.Option("--table", help="Lines of trials.jsonl, each with optional `noise`.")],
    out: Annotated[Path, typer.Option("--json", help="File to write: what each study found.")],
    sampler: Annotated[list[str] | None, typer.Option("--sampler", help="Repeatable; default: the tuner's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Studies per sampler, with seeds from 0.")] = 1,
    trials: Annotated[int, typer.Option(min=1, help="Launches of each study.")] = 60,
) -> None:
    """Replay a table of known outcomes against samplers; nothing is launched."""
    from tuner import simulate as replay
    from tuner.sampling import DEFAULT
    from tuner.space import load_space

    must_be_writable(out)
    asked = load_space(space)
    known = replay.read_table(table, asked)
    found = replay.simulate(asked, known, sampler or [DEFAULT.kind], seeds, trials)
    write_json(out, found)
    console().print(replay.summary(found), markup=False, soft_wrap=True)


@app.command()
def init(
    target: Annotated[str, typer.Option("--target", help="Folder of the target, or `bundled`.")],
    draft: Annotated[str | None, typer.Option("--draft", help="Folder of the drafter; default: the target's.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("space.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Write a commented search space for a model on this machine."""
    from engine.estimate import detect_machine
    from tuner.init import write_space

    write_space(out, target, draft, detect_machine(), force=force)
    print(f"Wrote {out}. Next: tuner search {out} --dry-run")


@app.command()
def schema(
    config: Annotated[bool, typer.Option("--config", help="EngineConfig instead of the search space.")] = False,
    launch: Annotated[bool, typer.Option("--launch", help="launch.yaml instead of the search space.")] = False,
) -> None:
    """Print the JSON Schema of search-space files, for editors."""
    from tuner.space.schema import space_schema, standard

    document = space_schema()
    if config:
        document = standard(EngineConfig.model_json_schema())
    elif launch:
        document = standard(LaunchFile.model_json_schema(by_alias=True))
    print(json.dumps(document, indent=2))


# ------------------------------------------------------------------------------------------------------ helpers


def _pick(space: Space, **asked: str | int | float | None) -> Pick:
    """Return the space file's pick with what the command line says instead."""
    return space.file.pick.model_copy(update={name: value for name, value in asked.items() if value is not None})


def _export_journal(space: Space, outcome: Outcome, path: Path) -> None:
    from tuner.export.optuna_journal import write_journal

    must_be_writable(path)
    with writing(path):
        count = write_journal(path, space, outcome.records)
    print(f"Journal: {path} ({count} trials); open it with:  optuna-dashboard {path}")


def _ask(out: Console, space: Space, pruning: Pruning, checks: StaticChecks) -> None:
    from tuner import dryrun

    out.print(dryrun.view(space, pruning, checks))
    if not sys.stdin.isatty():
        raise UsageError("this is a long study: add --yes to start it unasked")
    if not typer.confirm("This is a long study. Start it?"):
        raise typer.Exit(Exit.OK)


def _run(opened: Session, out: Console) -> None:
    from tuner import session
    from tuner.dryrun import heading
    from tuner.progress import Watcher
    from tuner.tables import ending

    signal.signal(signal.SIGTERM, _interrupt)
    path = opened.folder.path
    try:
        for line in heading(opened.space, opened.pruning, opened.checks, str(path)):
            out.print(line, markup=False, soft_wrap=True)
        with Watcher(out, opened.pruning.space) as watcher:
            outcome = session.search(opened, session.executor_of(opened), watcher)
    except (KeyboardInterrupt, SystemExit, BrokenPipeError):  # the last two: the reader of the output has left
        print(f"\nInterrupted; nothing runs any more. Go on with:  tuner resume {path}", file=sys.stderr)
        raise typer.Exit(Exit.INTERRUPTED) from None
    out.print(ending(outcome, opened.space, opened.folder))
    if not any(point.feasible for point in outcome.points):
        raise NothingFeasible(f"{path}: {outcome.why or 'no trial is feasible'}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a search as Ctrl-C does: in order."""
    raise KeyboardInterrupt


def _drop_output() -> None:
    """Let nothing that is still buffered meet at the exit what refused it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def main() -> None:
    """Run the command line; every known problem is one message and an exit status."""
    if sys.stdout is None:  # it was closed, as `>&-` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the whole process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × gets a question mark, not a traceback
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # what cannot be written is said below, not by a traceback at the exit
    except TunerError as error:
        print(f"tuner: {error}" if not isinstance(error, SpaceError) else str(error), file=sys.stderr)
        raise SystemExit(int(error.exit)) from None
    except EngineError as error:  # a launch file or a model's folder that a command names
        print(f"tuner: {error}", file=sys.stderr)
        raise SystemExit(int(Exit.BAD_INPUT)) from None
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # for which Typer's status is 1, too
            _drop_output()
            raise SystemExit(0) from None
        # Typer turns Ctrl-C and a declined question into status 1, which nothing else here uses.
        raise SystemExit(int(Exit.INTERRUPTED) if leaving.code == 1 else leaving.code) from None
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(0) from None  # the reader, such as `head`, has seen enough
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _drop_output()
        print(f"tuner: {error.filename or 'the output'}: cannot be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(int(Exit.BAD_INPUT)) from None


if __name__ == "__main__":
    main()
