"""From what is left of a failed trial to its cause: Failure(kind, stage, evidence, advice). Pure.

The order of trust: what the tuner saw itself (a wrong model, a stolen port), then the server's structured word (its
exit code and the JSON line that goes with it), then the messages of `symptoms.py`, then `crashed` with the evidence.
That a server stalls says least: a cause that its log names goes before.
A number in a message goes into the advice.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from engine.config import EngineConfig
from tuner import symptoms
from tuner.load.client import SILENT, UNREADABLE
from tuner.records import Failure, FailureKind, Stage
from tuner.supervise import Exit

EVIDENCE_LINES = 12
TRACE_LINES = 40
LINE_WIDTH = 400
KINDS: frozenset[str] = frozenset(get_args(FailureKind))

# Exit codes of `python -m engine` (engine.errors.Exit). INTERNAL (70) names no cause.
EXIT_KINDS: dict[int, FailureKind] = {
    2: "config",
    3: "missing_file",
    4: "oom_start",
    5: "graph_capture",
    6: "port",
}

ADVICE: dict[FailureKind, str] = {
    "config": "correct the path that the message names, or take it out of the search",
    "missing_file": "check that model.target and draft.model are complete folders; download them again if in doubt",
    "gated_model": "accept the licence on the model's page and log in with `hf auth login`, then resume",
    "unsupported_model": "use another backend or version for this model",
    "oom_start": "lower memory.kv_fraction or memory.kv_tokens, or spread the model with parallel.tensor",
    "oom_capture": "capture smaller graphs.batch_sizes, or lower memory.kv_fraction",
    "oom_load": "lower memory.max_running, memory.prefill_chunk or memory.kv_fraction",
    "graph_capture": "search graphs: {kind: eager} beside it, or another attention.backend",
    "kernel_compile": "install a compiler that matches the server's CUDA, or choose another attention.backend",
    "distributed_init": "check that the GPUs see each other (nvidia-smi topo -m) and that no firewall blocks loopback",
    "port": "try again; if it repeats, end what listens on 127.0.0.1 between 20000 and 32000",
    "no_progress": "raise the deadline if the model is large, else look at the end of the log",
    "wrong_model": "check what the backend's command serves: its model name must be the one asked for",
    "garbage_output": "check the weights, and try model.dtype float32: this text is not the model's",
    "lost_parity": "do not serve this config: it changes the text; report it to the backend",
    "acceptance_collapse": "check that the drafter belongs to this target and to its tokenizer",
    "crashed": "look at the end of the log; a trial that repeats it with an eager config narrows it down",
    "client_bound": "run the tuner on a machine with more free cores, or measure lower concurrencies",
    "disk_full": "free disk space where the results and the server's caches lie",
    "foreign_gpu_process": "end the process that the evidence names (`tuner clean` lists what dead studies left), "
    "or hide its GPU with CUDA_VISIBLE_DEVICES",
}
# Where nothing was launched yet, the same words mean something else.
LEASE_ADVICE: dict[FailureKind, str] = {
    "config": "`tuner doctor` says what this machine can lease; correct what the message names, or ask for less",
    "no_progress": "`tuner doctor` says who holds the machine: wait for them or end them, then resume",
}
KILLED_ADVICE = (
    "somebody ended it with SIGKILL; the kernel does so when memory runs out (`dmesg` says): "
    "then lower memory.kv_tokens or memory.max_running"
)

EXCEPTION = re.compile(r"^(?:[\w.]+\.)?\w+(?:Error|Exception): .+$", re.MULTILINE)  # the last line of a traceback
# SGLang's launcher kills its own tree, itself included, when a child has failed.
SUICIDE = re.compile(r"Received sigquit from a child process|kill_process_tree")


@dataclass(frozen=True)
class Remains:
    """What is known when a trial fails.

    `seen`: the kind, when the tuner saw the cause itself. `reason`: one line about it. `exit`: how the server
    ended, None while it lives. `tail`: the end of its log. `advice`: what to do, when who saw it knows better
    than the kind. `config`: what was asked for, so that advice can name numbers.
    """

    stage: Stage
    reason: str = ""
    seen: FailureKind | None = None
    exit: Exit | None = None
    tail: str = ""
    advice: str = ""
    config: EngineConfig | None = None


def classify(remains: Remains) -> Failure:
    """Return the failure that the remains tell of."""
    word = engine_word(remains.tail)
    kind, advice, quoted = _cause(remains, word)
    return Failure(
        kind=kind,
        stage=remains.stage,
        evidence=_evidence(remains, quoted),
        told=_clip(quoted or (remains.reason if remains.seen is not None else "")),
        advice=advice or ADVICE[kind],
    )


@dataclass(frozen=True)
class Word:
    """The line that `python -m engine` writes when it ends for a known cause."""

    kind: FailureKind
    code: int
    message: str
    line: str


def engine_word(tail: str) -> Word | None:
    """Find the last `{"event": "exit", "code": …, "kind": …, "message": …}` of a log."""
    for line in reversed(tail.splitlines()):
        if not line.startswith('{"event"'):
            continue
        try:
            document = json.loads(line)
        except ValueError:
            continue  # cut off where the tail begins
        if isinstance(document, dict) and document.get("event") == "exit":
            kind, code = document.get("kind"), document.get("code")
            if isinstance(code, int) and kind in KINDS:
                return Word(kind, code, str(document.get("message", "")), line)
    return None


def _cause(remains: Remains, word: Word | None) -> tuple[FailureKind, str, str]:
    """Return (kind, advice or "", the line that says so or "")."""
    if remains.seen == "no_progress" and (symptom := _behind_stall(remains)) is not None:
        return _by_stage(symptom.kind, remains.stage), symptom.advice, symptom.line
    if remains.seen is not None:
        return remains.seen, remains.advice, ""
    if word is not None and word.kind != "crashed":
        kind = _by_stage(word.kind, remains.stage)
        return (
            kind,
            f"{ADVICE[kind]} ({word.message})" if word.message else "",
            word.line,
        )
    if (symptom := _symptom(remains)) is not None:
        return _by_stage(symptom.kind, remains.stage, symptom.line), symptom.advice, symptom.line
    if word is not None:
        return "crashed", "", word.line
    code = remains.exit.code if remains.exit is not None else None
    if code in EXIT_KINDS and _is_engine(remains.tail):
        return _by_stage(EXIT_KINDS[code], remains.stage), "", ""
    if raised := EXCEPTION.findall(remains.tail):
        return "crashed", "", raised[-1]
    killed = remains.exit is not None and (remains.exit.signal == signal.SIGKILL or code == 128 + signal.SIGKILL)
    if killed and not SUICIDE.search(remains.tail):
        return "crashed", KILLED_ADVICE, ""
    return "crashed", "", ""


def _behind_stall(remains: Remains) -> symptoms.Symptom | None:
    """Return why a server stalls, where its log names a cause: parts of it may have died, and the rest waits for them.

    A server that has served has survived what its log said before, so later only memory that ran out counts.
    """
    cause = symptoms.find_cause(symptoms.Facts(remains.config, remains.tail))
    survived = _serving(remains.stage) and cause is not None and cause.kind not in ("oom_start", "oom_load")
    return None if survived else cause


def _symptom(remains: Remains) -> symptoms.Symptom | None:
    """Read the log; where it is silent, what the server answered (`reason`)."""
    if (found := symptoms.find(symptoms.Facts(remains.config, remains.tail))) is not None:
        return found
    return symptoms.find(symptoms.Facts(remains.config, remains.reason))


def _by_stage(kind: FailureKind, stage: Stage, line: str = "") -> FailureKind:
    """The same message means another thing before the first answer than under load."""
    serving = _serving(stage)
    if kind == "oom_start" and serving:
        return "oom_load"
    if kind == "distributed_init" and serving:
        return "crashed"  # they had found each other
    if kind == "no_progress" and not serving and "collective" in line.lower():
        return "distributed_init"
    return kind


def _serving(stage: Stage) -> bool:
    return stage in ("parity", "load")


def _is_engine(tail: str) -> bool:
    """Whether the log is of `python -m engine`: only its exit codes have a meaning for us."""
    return any(line.startswith('{"event"') for line in tail.splitlines())


def _evidence(remains: Remains, quoted: str) -> tuple[str, ...]:
    """Return what was seen, how the server ended, the end of the log, and last the line that decided."""
    lines = [remains.reason] if remains.reason else []
    if remains.exit is not None:
        lines.append(f"the server ended with {remains.exit}")
    last = [line for line in remains.tail.splitlines() if line.strip()]
    lines += [line for line in last[-EVIDENCE_LINES:] if line != quoted]
    if quoted:
        lines.append(quoted)
    return tuple(_clip(line) for line in lines)


def _clip(line: str) -> str:
    clean = "".join(character if character.isprintable() else " " for character in line).rstrip()
    return clean if len(clean) <= LINE_WIDTH else clean[: LINE_WIDTH - 1] + "…"


def kind_of_errors(kinds: set[str]) -> FailureKind | None:
    """Return the failure that requests are of which none has a good answer; None leaves it to the log."""
    if kinds <= SILENT:
        return "no_progress"
    if kinds <= UNREADABLE:
        return "garbage_output"
    return None


def from_error(stage: Stage, error: Exception, kind: str, evidence: Sequence[str] = ()) -> Failure:
    """Return the failure of a trial that could not go on for a known cause; `kind` is the cause's own word."""
    known: FailureKind = next((name for name in get_args(FailureKind) if name == kind), "crashed")
    advice = (LEASE_ADVICE if stage == "lease" else ADVICE).get(known, ADVICE[known])
    lines = tuple(_clip(line) for line in (str(error), *evidence))
    return Failure(kind=known, stage=stage, evidence=lines, told=lines[0], advice=advice)


def from_trace(stage: Stage, trace: str) -> Failure:
    """Return the failure of a trial that broke in our own code, with the traceback as evidence."""
    lines = trace.rstrip().splitlines()
    if lines and re.search(r"\[Errno (28|122)\]", lines[-1]):
        return Failure(kind="disk_full", stage=stage, evidence=(_clip(lines[-1]),), advice=ADVICE["disk_full"])
    kept = lines if len(lines) <= TRACE_LINES else [*lines[:4], "…", *lines[-TRACE_LINES + 5 :]]
    return Failure(
        kind="crashed",
        stage=stage,
        evidence=tuple(_clip(line) for line in kept),
        advice="this is a fault of the tuner itself; please report it with this evidence",
    )
