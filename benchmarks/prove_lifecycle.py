"""The lifecycle's proof: servers with faults, kill -9 at random moments, searches that are killed and resumed, and
log tails of publicly described failures."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.fake_server.faults import BAD, GOOD, backend_for
from tests.fake_server.plan import FakeBackend, Plan
from tests.tuner.log_tails import OPEN, SEALED, score
from tests.tuner.rounds import VICTIMS, Round, finished, kill_and_resume, kill_round
from tests.tuner.running import make_spec, run_fake
from tuner.load.client import Endpoint
from tuner.load.workload import make_requests
from tuner.ready import NotReady, await_ready
from tuner.supervise import supervise

ROUNDS = 200
STUDIES = 10
KILLS_A_STUDY = 6
CHUNKS = 8  # of the rounds; every chunk is a step, so that the proof can be stopped and gone on with
STUDY_CHUNKS = 5
GONE_SECONDS = 5.0
DEATH_SECONDS = 1.0
DEATHS = 20
LEAST_RIGHT = 38
# Told right before any case was looked at; the last before a sealed one was.
FIRST = {"open": 16, "sealed": 17, "sealed_once_open_ones_were_right": 18}


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder of its own, with leases of its own."""
    with tempfile.TemporaryDirectory(prefix="lifecycle-") as name:
        before = os.environ.get("TUNER_LEASES")
        leases = Path(name) / "runtime"
        leases.mkdir(mode=0o700)
        os.environ["TUNER_LEASES"] = str(leases)
        try:
            yield Path(name)
        finally:
            if before is None:
                del os.environ["TUNER_LEASES"]
            else:
                os.environ["TUNER_LEASES"] = before


def _new(folder: Path, name: object) -> Path:
    below = folder / str(name)
    below.mkdir()
    return below


def faults() -> dict[str, Any]:
    """No bad server is called ready, no good one dead, and each fault has its kind."""
    false_ready, false_dead, wrong = [], [], []
    with _folder() as folder:
        for number, (name, case) in enumerate(GOOD.items()):
            record, _ = run_fake(_new(folder, number), case.plan, limits=case.limits)
            if record.failure is not None:
                false_dead.append(name)
        for number, (name, case) in enumerate(BAD.items(), len(GOOD)):
            with backend_for(case) as backend:
                record, _ = run_fake(_new(folder, number), case.plan, backend, limits=case.limits)
            failure = record.failure
            if failure is None or (failure.stage == "load" and case.stage != "load"):
                false_ready.append(name)
            elif failure.kind != case.kind or (case.stage and failure.stage != case.stage):
                wrong.append(f"{name}: {failure.kind} at {failure.stage}")
    figures = {"good": len(GOOD), "bad": len(BAD), "false_ready": false_ready, "false_dead": false_dead, "wrong": wrong}
    assert [false_ready, false_dead, wrong] == [[], [], []], figures
    return figures


def deaths() -> dict[str, Any]:
    """A server that is killed while it is waited for is noticed within a second."""
    with _folder() as folder:
        times = [asyncio.run(_death(_new(folder, number), number)) for number in range(DEATHS)]
    figures = {"deaths": len(times), "slowest_s": round(max(times), 3)}
    assert max(times) <= DEATH_SECONDS, figures
    return figures


async def _death(folder: Path, number: int) -> float:
    """Kill a server a little after its start; return the seconds until the wait for it has ended."""
    spec = make_spec(folder, Plan(ready_s=1e6))
    backend, port = FakeBackend(), 32_500 + number
    launch = backend.command(spec.config, folder / "config.yaml", "127.0.0.1", port)
    requests = make_requests(spec.workload, spec.served_name, spec.seed)
    with supervise(launch.argv, env=os.environ, log=folder / "log", port=port) as process:
        waiting = asyncio.ensure_future(
            await_ready(process, Endpoint("127.0.0.1", port), backend.probes, requests, timeout=60.0)
        )
        await asyncio.sleep(0.05 * number)
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        assert isinstance(await waiting, NotReady)
        return time.monotonic() - began


def kills(chunk: int) -> dict[str, Any]:
    """kill -9 of somebody at a random moment: nothing is left, and the failure is told as what it is."""
    chance = random.Random(f"kills {chunk}")
    rounds: list[Round] = []
    late = 0
    with _folder() as folder:
        while len(rounds) < ROUNDS // CHUNKS:
            victim = VICTIMS[len(rounds) % len(VICTIMS)]
            played = kill_round(_new(folder, len(rounds) + late), chance, victim, GONE_SECONDS)
            if played is None:
                late += 1
            else:
                rounds.append(played)
    figures = {
        "rounds": len(rounds),
        "too_late": late,
        "victims": dict(Counter(played.victim for played in rounds)),
        "stages": dict(Counter(played.stage for played in rounds)),
        "orphans": sum(played.orphans for played in rounds),
        "leaked_ports": sum(played.port_leaked for played in rounds),
        "stuck_leases": sum(played.stuck_leases for played in rounds),
        "slowest_gone_s": round(max(played.gone_s for played in rounds), 3),
        "unclean": [str(played) for played in rounds if not played.clean],
    }
    assert not figures["unclean"], figures
    return figures


def studies(chunk: int) -> dict[str, Any]:
    """A search over a table, killed and resumed: same sequence, same front, nothing twice, one trial lost at most."""
    chance = random.Random(f"studies {chunk}")
    with _folder() as folder:
        expected = finished(_new(folder, "undisturbed"))
        results = [
            kill_and_resume(_new(folder, number), chance, expected, KILLS_A_STUDY)
            for number in range(STUDIES // STUDY_CHUNKS)
        ]
    figures = {
        "studies": len(results),
        "trials_each": len(expected[0]),
        "kills": sum(result.kills for result in results),
        "trials_lost": sum(result.lost for result in results),
        "repeated": sum(result.repeated for result in results),
        "orphans": sum(result.orphans for result in results),
        "other_sequence": sum(not result.same_sequence for result in results),
        "other_front": sum(not result.same_front for result in results),
        "unclean": [str(result) for result in results if not result.clean],
    }
    assert not figures["unclean"], figures
    return figures


def log_tails() -> dict[str, Any]:
    """At least 38 of 40 publicly described failures are told right; `classify` calls none a success."""
    opened, sealed = score(OPEN), score(SEALED)
    right, cases = opened.right + sealed.right, opened.cases + sealed.cases
    figures = {
        "cases": cases,
        "right": right,
        "right_at_first": FIRST,
        "right_open": opened.right,
        "right_sealed": sealed.right,
        "wrong": [*opened.wrong, *sealed.wrong],
    }
    assert cases >= 40, figures
    assert right >= LEAST_RIGHT, figures
    return figures


STEPS = {
    "faults": faults,
    "deaths": deaths,
    **{f"kills {chunk}": partial(kills, chunk) for chunk in range(1, CHUNKS + 1)},
    **{f"studies {chunk}": partial(studies, chunk) for chunk in range(1, STUDY_CHUNKS + 1)},
    "log_tails": log_tails,
}
