"""A study on eight GPUs that do not exist: `nvidia-smi` is a script, leases are real, and workers compute.

python packed.py FOLDER: runs or resumes the study in FOLDER, as a controller that tests can kill. Each worker leases
what it was given, loads and measures for as long as its configuration says, and writes down what it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.config import EngineConfig
from tests.tuner.make import measure
from tests.tuner.smi import FakeSmi
from tests.tuner.spaces import SMOKE
from tuner.journal import Journal
from tuner.leases import lease
from tuner.records import Event, TrialRecord, TrialSpec, canonical, config_dict
from tuner.space import Space, parse_space
from tuner.store import StudyFolder
from tuner.windows import measuring

if TYPE_CHECKING:  # workers import none of it
    from tuner.brain import Brain
    from tuner.study import Search

GPUS = tuple(f"GPU-{index}" for index in range(8))
WORKER = (sys.executable, str(Path(__file__)), "--worker")
SPACE = (
    SMOKE.replace("  graphs: {choices: [{kind: eager}, {kind: captured, batch_sizes: [1, 4]}]}\n", "")
    .replace("  draft.block_size", "  parallel.tensor: [1, 2, 4, 8]\n  draft.block_size")
    .replace("executor: {kind: local}", "executor: {kind: packed, windows: exclusive}\nstrategy: {least_gain: null}")
)


@dataclass(frozen=True)
class Held:
    """What a worker had: GPUs from `begin` to `end`, and its window; seconds of one clock for all processes."""

    trial: int
    gpus: tuple[str, ...]
    begin: float
    window: float
    closed: float
    end: float


def clashes(held: list[Held], *, exclusive: bool) -> list[tuple[str, int, int]]:
    """Return pairs of trials that held a GPU, or where that is forbidden a window, at the same time."""
    found = []
    for index, one in enumerate(held):
        for other in held[index + 1 :]:
            if set(one.gpus) & set(other.gpus) and one.begin < other.end and other.begin < one.end:
                found.append(("gpu", one.trial, other.trial))
            if exclusive and one.window < other.closed and other.window < one.closed:
                found.append(("window", one.trial, other.trial))
    return found


def held_in(folder: Path) -> list[Held]:
    """Return what the workers of a study wrote down."""
    lines = (folder / "held.jsonl").read_text(encoding="utf-8").splitlines()
    return [Held(**json.loads(line) | {"gpus": tuple(json.loads(line)["gpus"])}) for line in lines]


@contextlib.contextmanager
def pretended(folder: Path) -> Iterator[None]:
    """Put eight GPUs on this machine, as far as `nvidia-smi` goes."""
    folder.mkdir(exist_ok=True)
    FakeSmi(folder).set([(index, 0) for index in range(8)], [])
    before = {name: os.environ.get(name) for name in ("PATH", "CUDA_VISIBLE_DEVICES")}
    os.environ["PATH"] = f"{folder}{os.pathsep}{before['PATH']}"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def begin(folder: Path, trials: int, scale: float = 1.0, text: str = SPACE, wall: str = "null") -> None:
    """Make a study. `scale`: how many seconds a worker's unit of time lasts."""
    study = StudyFolder(folder)
    study.create(text.replace("trials: 16, wall: 150s", f"trials: {trials}, wall: {wall}"), {"scale": scale})


def search(folder: Path, observer: Any) -> Search:
    """Run or resume a study to its end."""
    from tuner.brain import Brain
    from tuner.executors.packed import PackedExecutor
    from tuner.study import Search, startup_of

    study = StudyFolder(folder)
    space: Space = parse_space(study.space.read_bytes(), str(study.space))
    brain = Brain(space, nothing, startup_of(space))
    with study.lock(), PackedExecutor(GPUS, WORKER) as executor:
        made = Search(study, space, nothing, executor, observer, Advice(brain), gpu=True)
        made.run()
    return made


def nothing(config: EngineConfig) -> tuple[str, ...]:
    """Everything can run on GPUs that do not exist."""
    return ()


class Advice:
    """A Brain in this process, as `study.Advisor` wants it."""

    prior: Any = "none"

    def __init__(self, brain: Brain) -> None:
        self.tell, self.ask = brain.tell, brain.ask


class Silent:
    """An observer that says nothing."""

    def trial_begins(self, *_: Any) -> None: ...
    def event(self, *_: Any) -> None: ...
    def trial_ends(self, *_: Any) -> None: ...
    def note(self, text: str) -> None:
        print(text, flush=True)


def times(config: EngineConfig) -> tuple[float, float]:
    """Return the units that a configuration takes to load and to measure: mixed, and always the same."""
    rng = random.Random(canonical(config_dict(config)))
    return rng.uniform(2.0, 5.0) + config.parallel.tensor / 4, rng.uniform(0.2, 0.6)


async def work(spec: TrialSpec) -> None:
    """Be a worker: hold the lease, load, measure in a window, and say what came of it."""

    def say(event: Event) -> None:
        os.write(1, event.model_dump_json().encode() + b"\n")

    scale = StudyFolder(Path(spec.study)).read_provenance()["scale"]
    load, window = times(spec.config)
    journal = Journal(spec, say)
    journal.begin("lease")
    async with lease(spec.lease, f"trial {spec.trial}", 300.0) as held:
        began = time.monotonic()
        journal.begin("ready")
        await asyncio.sleep(load * scale)
        async with measuring(spec, journal):
            opened = time.monotonic()
            levels = []
            for concurrency in spec.levels:
                with journal.level(concurrency) as done:
                    await asyncio.sleep(window * scale / len(spec.levels))
                    levels.append(measure(spec.config, concurrency))
                    done(levels[-1])
            closed = time.monotonic()
        note = Held(spec.trial, tuple(gpu.uuid for gpu in held.gpus), began, opened, closed, time.monotonic())
        fd = os.open(Path(spec.study) / "held.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, json.dumps(note.__dict__).encode() + b"\n")
        os.close(fd)
    journal.close(
        TrialRecord(
            trial=spec.trial,
            role=spec.role,
            state="measured",
            config=config_dict(spec.config),
            levels=tuple(levels),
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        asyncio.run(work(TrialSpec.model_validate_json(sys.stdin.buffer.read())))
    else:
        search(Path(sys.argv[1]), Silent())
