"""What the search itself costs: seconds of an ask and a tell at 200 trials, memory of its processes, packing."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tuner.packing import Job, conflicts, lower_bound, makespan, place
from tuner.sampling.process import THREADS

TIMED = """
import json, resource, sys, time
from benchmarks.search.studies import game
from tuner.brain import Brain
from tuner.sampling import SAMPLERS
from tuner.simulate import measured_again, next_row
import numpy as np
kind, trials = sys.argv[1], int(sys.argv[2])
made = game("dflash12k")
rng = np.random.default_rng(0)
brain = Brain(made.space, made.table.refusals, sampler=SAMPLERS[kind], pool=made.pool)
rows = [made.table.rows[i] for i in rng.permutation(len(made.table.rows))[:trials]]
for number, row in enumerate(rows):
    brain.tell(measured_again(row, number, rng))
times, cpu = [], []
for number in range(5):
    began, spent = time.perf_counter(), time.process_time()
    row, _ = next_row(brain, made.table, trials + number)
    brain.tell(measured_again(row, trials + number, rng))
    times.append(time.perf_counter() - began)
    cpu.append(time.process_time() - spent)
print(json.dumps({"seconds": times, "cpu": cpu, "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                  "torch": "torch" in sys.modules}))
"""


def ask_and_tell(kind: str, trials: int = 200) -> dict[str, Any]:
    """Time five asks and tells after so many trials, in a process of their own with one thread, as samplers have."""
    command = [sys.executable, "-c", TIMED, kind, str(trials)]
    environment = {**os.environ, **THREADS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=900)
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        "trials": trials,
        "median_s": round(statistics.median(found["seconds"]), 4),
        "median_cpu_s": round(statistics.median(found["cpu"]), 4),
        "rss_mb": round(found["rss_mb"]),
        "torch": found["torch"],
    }


def packing(plans: int = 200) -> dict[str, Any]:
    """Place mixed jobs on one and on four boxes, windows side by side or exclusive; makespan over the lower bound."""
    figures: dict[str, Any] = {}
    for boxes, count in ((1, plans), (4, plans // 20)):
        for exclusive in (False, True):
            found = [_placed(seed, boxes, exclusive) for seed in range(count)]
            ratios = [ratio for ratio, _ in found]
            figures[f"{boxes} boxes, {'exclusive' if exclusive else 'shared'} windows"] = {
                "plans": count,
                "mean": round(statistics.mean(ratios), 3),
                "max": round(max(ratios), 3),
                "within_1.10": round(sum(r <= 1.10 for r in ratios) / count, 3),
                "conflicts": sum(broken for _, broken in found),
            }
    return figures


def _placed(seed: int, boxes: int, exclusive: bool) -> tuple[float, int]:
    """Return a plan's makespan over the lower bound, and its conflicts."""
    rng = random.Random(seed)
    jobs = [
        Job(str(i), rng.choice((1, 1, 1, 2, 2, 4, 8)), rng.uniform(60, 180), rng.uniform(40, 120))
        for i in range(rng.choice((16, 24, 32)) * boxes)
    ]
    plan = place(jobs, boxes, exclusive=exclusive)
    ratio = makespan(plan) / lower_bound(jobs, boxes, exclusive=exclusive)
    return ratio, len(conflicts(plan, jobs, exclusive=exclusive))


COSTS: dict[str, Callable[[], dict[str, Any]]] = {
    "surrogate": lambda: ask_and_tell("surrogate"),
    "tpe": lambda: ask_and_tell("tpe"),
    "gp": lambda: ask_and_tell("gp"),
    "packing": packing,
}
