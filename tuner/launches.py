"""From a decided launch to its record: where it runs, what it is told, and what is written down meanwhile.

Several launches are one batch: placed on the machine's GPUs (`tuner.packing`), written down before the first of them
starts, and recorded as each ends. A batch that a death cut is so finished by whoever resumes, and nothing of it is
measured twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from tuner.acceptance import peer_of
from tuner.budget import split_seconds, trial_seconds
from tuner.errors import StudyError
from tuner.executors.base import Executor
from tuner.packing import Job, lower_bound, makespan, place
from tuner.pick import slo_of
from tuner.racing import race_of
from tuner.records import Event, LeaseRequest, Limits, Planned, Role, TrialRecord, TrialSpec, config_dict
from tuner.space import Space
from tuner.store import Journal, StudyFolder

SECONDS = (60.0, 60.0)  # to load and to measure, of a launch that is like none before


@dataclass(frozen=True)
class Packed:
    """How well a batch used the machine: wall seconds, and a time that no schedule of these trials beats."""

    first: int
    trials: int
    makespan: float
    bound: float

    def to_json(self) -> dict[str, float | int]:
        """Return what is recorded."""
        ratio = round(self.makespan / self.bound, 4) if self.bound > 0 else 1.0
        return {
            "first": self.first,
            "trials": self.trials,
            "makespan": round(self.makespan, 3),
            "bound": round(self.bound, 3),
            "ratio": ratio,
        }


class Launcher:
    """Runs launches of one study. The caller has entered the executor and holds the study's lock."""

    def __init__(self, folder: StudyFolder, space: Space, executor: Executor, *, gpu: bool) -> None:
        """`gpu`: whether servers run on GPUs here."""
        self._folder = folder
        self._space = space
        self._executor = executor
        self._gpu = gpu
        self._reference = folder.read_reference()
        self.exclusive = False  # whether windows must not overlap
        self.packed: list[Packed] = []
        self._took = 0.0

    @property
    def room(self) -> int:
        """How many GPUs trials may share out; 0: one trial at a time."""
        return len(self._executor.gpus)

    def spec(self, planned: Planned, records: Sequence[TrialRecord], devices: tuple[str, ...] = ()) -> TrialSpec:
        """Return what the worker of a launch is told."""
        file, config, role = self._space.file, planned.config, planned.role
        alone = not devices or not self.exclusive
        return TrialSpec(
            study=str(self._folder.path.absolute()),
            trial=planned.trial,
            role=role,
            config=config,
            workload=file.workload,
            levels=self._space.levels,
            seed=file.study.seed,
            served_name=config.model.target,
            slo=slo_of(file.pick).uppers(),
            limits=Limits.of(file.workload, file.executor.ready),
            lease=LeaseRequest(gpus=self._gpus(planned), devices=devices, exclusive=not alone),
            reference=None if role == "baseline" else self._reference,
            score=planned.score,
            peer=peer_of(records, config),
            race=race_of(records, self._space, config.draft.kind) if role == "search" and file.strategy.race else None,
        )

    def _gpus(self, planned: Planned) -> int:
        return planned.config.parallel.gpus if self._gpu else 0

    def run(
        self,
        planned: Sequence[Planned],
        records: Sequence[TrialRecord],
        journal: Journal,
        begins: Callable[[TrialSpec], None],
        tell: Callable[[Event], None],
    ) -> Iterator[TrialRecord]:
        """Run launches, and yield their records as they end.

        Args:
            records: what is known when they start.
            begins, tell: called with each spec, and with each event.

        Raises:
            StudyError: the executor ended without a record of each.
        """
        specs = self._placed(planned, records)
        missing = {each.trial: each for each in planned}
        began = time.monotonic()
        for spec in specs:
            begins(spec)
        with self._executor.run_all(specs) as events:
            for event in events:
                if event.reference is not None:
                    self._reference = event.reference
                    self._folder.write_reference(event.reference)
                    event = event.model_copy(update={"reference": None})
                journal.event(event)
                tell(event)
                if event.record is not None:
                    yield self._completed(missing.pop(event.trial), event.record)
        if missing:
            raise StudyError(f"trial {min(missing)}: the executor ended without a record")
        self._took = time.monotonic() - began

    def _placed(self, planned: Sequence[Planned], records: Sequence[TrialRecord]) -> list[TrialSpec]:
        """Return the specs of a batch in the order of their starts, each with its GPUs."""
        devices = self._executor.gpus
        if not devices or len(planned) == 1:
            return [self.spec(each, records) for each in planned]
        jobs = [self._job(each, records) for each in planned]
        slots = place(jobs, size=_power(len(devices)), exclusive=self.exclusive)
        named = {str(each.trial): each for each in planned}
        return [
            self.spec(named[slot.job.name], records, tuple(devices[index] for index in slot.gpus))
            for slot in sorted(slots, key=lambda slot: (slot.start, int(slot.job.name)))
        ]

    def seconds(self, configs: Sequence[EngineConfig], records: Sequence[TrialRecord], role: Role = "search") -> float:
        """Return how long a batch of launches of these configurations will probably take."""
        planned = [Planned(trial=index, role=role, config=config) for index, config in enumerate(configs)]
        jobs = [self._job(each, records) for each in planned]
        return makespan(place(jobs, size=_power(max(1, self.room)), exclusive=self.exclusive))

    def _job(self, planned: Planned, records: Sequence[TrialRecord]) -> Job:
        """Return what a launch will probably take: what the last one with as many GPUs did, of its backend and with
        windows as long if there is one."""
        gpus, backend, raced = self._gpus(planned), planned.config.backend.kind, planned.role == "search"
        like = [r for r in records if r.state == "measured" and r.gpus == gpus]
        like = [r for r in like if r.config["backend"]["kind"] == backend] or like
        like = [r for r in like if (r.role == "search") == raced] or like
        load, measure = split_seconds(like[-1]) if like else SECONDS
        return Job(str(planned.trial), self._block(gpus), load, measure)

    def _block(self, gpus: int) -> int:
        """Return the size of the aligned block that so many GPUs are taken from."""
        return min(_power(self.room), 1 << max(0, gpus - 1).bit_length())

    def _completed(self, planned: Planned, said: TrialRecord) -> TrialRecord:
        """Return a worker's record with what only the controller knows."""
        return said.model_copy(
            update={
                "trial": planned.trial,
                "role": planned.role,
                "config": config_dict(planned.config),
                "of": planned.of,
                "gain": planned.gain,
                "gpus": self._gpus(planned),
                "synthetic": said.synthetic or planned.config.synthetic,
            }
        )

    def account(self, done: Sequence[TrialRecord]) -> Packed:
        """Return how well the batch that has just run used the machine."""
        jobs = [Job(str(r.trial), self._block(r.gpus), *split_seconds(r)) for r in done if trial_seconds(r) > 0]
        bound = lower_bound(jobs, size=_power(self.room), exclusive=self.exclusive)
        packed = Packed(min(r.trial for r in done), len(done), self._took, bound)
        self.packed.append(packed)
        return packed


def _power(count: int) -> int:
    """Return the largest power of two that is not above: blocks are aligned."""
    return 1 << (count.bit_length() - 1) if count else 1
