"""Cells played by several processes. A module of its own: a spawned process cannot import what `__main__` defines."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice
from typing import Any

from benchmarks.search.studies import Cell, run
from tuner.sampling.process import THREADS


def play(cell: Cell) -> tuple[Cell, dict[str, Any]]:
    """Play one cell; return it with its figures and the CPU seconds it took."""
    began = time.process_time()
    figures = run(cell)
    return cell, figures | {"cpu_s": round(time.process_time() - began, 1)}


def play_all(cells: Sequence[Cell], jobs: int, deadline: float | None) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield cells as they finish; start none after the deadline (of the monotonic clock)."""
    left = (cell for cell in cells if deadline is None or time.monotonic() < deadline)
    if jobs == 1:
        yield from map(play, left)
        return
    os.environ.update(THREADS)  # of the processes that are spawned
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(play, cell) for cell in islice(left, jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            running |= {pool.submit(play, cell) for cell in islice(left, len(done))}
