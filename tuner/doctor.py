"""`tuner doctor`: what this machine can run, and what to do about the rest."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine import backends
from engine.backends import commands_file, known_versions, load_commands
from engine.config import BUNDLED, PAIR, EngineConfig
from engine.errors import EngineError
from engine.estimate import Machine, cpu_name, detect_machine, host_memory, usable_cores
from tuner.errors import TunerError
from tuner.leases import foreign_use, fresh_port, held_locks, runtime_folder
from tuner.machine import free_bytes, look_at_gpus
from tuner.provenance import package_version
from tuner.supervise import supervise
from tuner.trial import LEAST_DISK
from tuner.watchdog import descendants

GIB = 2**30
Verdict = Literal["ok", "note", "bad"]
# What a backend may be able to run beyond no speculation: a word for it, and a config that asks for it.
FEATURES: dict[str, dict[str, Any]] = {
    "dflash": {"draft": {"kind": "dflash"}},
    "ddtree": {"draft": {"kind": "ddtree"}},
    "policies": {"draft": {"kind": "policy", "by_running": [[1, 4, {"kind": "dflash"}], [5, None, {"kind": "none"}]]}},
    "captured graphs": {"graphs": {"kind": "captured"}},
}
STYLE: dict[Verdict, str] = {"ok": "green", "note": "yellow", "bad": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the table: `bad` means that trials cannot run here."""

    what: str
    verdict: Verdict
    text: str


def run(console: Console | None = None, results: Path | None = None) -> int:
    """Print what this machine can run; return 0, or 2 when trials cannot run.

    Args:
        results: where studies will be written; None is the current folder.
    """
    findings = list(examine(results or Path.cwd()))
    table = Table(title="tuner doctor", show_lines=False)
    for column in ("", "what", "finding"):
        table.add_column(column)
    for finding in findings:
        style = STYLE[finding.verdict]
        table.add_row(f"[{style}]{finding.verdict}[/{style}]", finding.what, escape(finding.text))
    (console or Console()).print(table)
    return 2 if any(finding.verdict == "bad" for finding in findings) else 0


def examine(results: Path) -> Iterator[Finding]:
    """Look at everything that a trial needs; a look that fails is a finding."""
    for what, look in (
        ("python", _python),
        ("torch", _torch),
        ("bundled pair", _pair),
        ("processor", _processor),
        ("GPUs", _gpus),
        ("leases", _leases),
        ("backends", _backends),
        ("ports", _ports),
        ("disk", lambda: _disk(results)),
        ("supervision", _supervision),
    ):
        yield _finding(what, look)


def _finding(what: str, look: Callable[[], tuple[Verdict, str]]) -> Finding:
    try:
        return Finding(what, *look())
    except (TunerError, EngineError, OSError) as error:
        return Finding(what, "bad", str(error))


def _python() -> tuple[Verdict, str]:
    return "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}"


def _torch() -> tuple[Verdict, str]:
    version = package_version("torch")
    if version is None:
        return "note", "not installed: the native engine cannot run; other backends can"
    return "ok", version


def _pair() -> tuple[Verdict, str]:
    missing = [name for name in ("target", "draft", "workload.jsonl") if not (PAIR / name).exists()]
    if missing:
        return "note", f"not complete: {', '.join(missing)} is missing in {PAIR}; `prompts: bundled` will not work"
    return "ok", str(PAIR)


def _processor() -> tuple[Verdict, str]:
    cores = usable_cores()
    text = f"{cpu_name()}, {cores} cores, {host_memory() / GIB:.1f} GiB"
    if cores < 2:
        return "note", f"{text}: server and load generator share one core, so expect noise"
    return "ok", text


def _gpus() -> tuple[Verdict, str]:
    look = look_at_gpus()
    if not look.gpus:
        return "note", "none visible: trials run on the CPU, one at a time"
    lines = [f"{gpu.index}: {gpu.name}, {gpu.memory_total / 1024:.0f} GiB" for gpu in look.gpus]
    held = {lock.name for lock in held_locks()}
    foreign = [line for uuid, signs in foreign_use(look).items() if f"gpu-{uuid}" not in held for line in signs]
    text = "; ".join(lines) + f"; driver {look.driver}"
    if foreign:
        return "note", f"{text}. In use by someone else, so not leased: {'; '.join(foreign)}"
    return "ok", text


def _leases() -> tuple[Verdict, str]:
    folder = runtime_folder()
    held = [f"{lock.name} by {lock.holder} (pid {lock.pid})" for lock in held_locks()]
    return "ok", f"{folder}; held now: {', '.join(held) or 'none'}"


def _backends() -> tuple[Verdict, str]:
    """Say what each listed server can run on this machine, asked of the same refusals that a search asks."""
    path = commands_file()
    known = known_versions()
    if not path.is_file():
        rest = "; ".join(f"{kind} {', '.join(versions)}" for kind, versions in known.items() if kind != "native")
        return "note", f"native only: {path} does not exist (it names the commands of servers; known: {rest})"
    machine = detect_machine()
    verdict: Verdict = "ok"
    lines = [f"native {', '.join(known['native'])}: {_runs('native', None, machine)}"]
    for kind, versions in sorted(load_commands(path).items()):
        for version, command in sorted(versions.items()):
            if kind not in known:
                verdict, text = "note", f"unknown backend; known: {', '.join(known)}"
            elif shutil.which(command.command[0]) is None:
                verdict, text = "note", f"its command {command.command[0]} is not found"
            else:
                text = _runs(kind, version, machine)
            lines.append(f"{kind} {version}: {text}")
    return verdict, f"{'; '.join(lines)} ({path})"


def _runs(kind: str, version: str | None, machine: Machine) -> str:
    """Return what a backend version can run here, by trying each kind of draft and graphs."""
    base = {"model": {"target": BUNDLED}, "backend": {"kind": kind, "version": version}}
    plain = EngineConfig.model_validate(base)
    refused = backends.get(plain).refusals(plain, machine)
    if refused:
        return f"nothing here: {refused[0]}"
    can: list[str] = ["none"]
    cannot: list[str] = []
    for word, sections in FEATURES.items():
        config = EngineConfig.model_validate({**base, **sections})
        (cannot if backends.get(config).refusals(config, machine) else can).append(word)
    return f"runs {', '.join(can)}" + (f", not {', '.join(cannot)}" if cannot else "")


def _ports() -> tuple[Verdict, str]:
    with fresh_port("doctor") as port:
        return "ok", f"loopback ports can be bound, such as {port}"


def _disk(results: Path) -> tuple[Verdict, str]:
    free = free_bytes(results)
    text = f"{free / GIB:.1f} GiB free for {results}"
    return ("bad", f"{text}: {LEAST_DISK // 2**20} MiB are needed") if free < LEAST_DISK else ("ok", text)


def _supervision() -> tuple[Verdict, str]:
    """Start a process below a watchdog and stop it."""
    with supervise(
        [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"],
        env={},
        log=runtime_folder() / "doctor.log",
        grace=5.0,
    ) as process:
        adopts = process.subreaper and bool(descendants(1))
        stopped = process.stop(5.0)
    process.log.unlink(missing_ok=True)
    if not stopped.gone:
        return "bad", "a process that was started could not be ended"
    if not adopts:
        return "note", "weaker here: processes that leave their process group are not ended (no subreaper or /proc)"
    return "ok", "nothing outlives the tuner: subreaper and /proc are there"
