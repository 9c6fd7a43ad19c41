"""The dashboard's proof: first paint and updates with 1,000 trials, the report's size, 50 clients beside a search."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import ROOT
from tests.browser.chrome import Browser
from tests.tuner.dashboard.synthetic import append, make_study, trial
from tests.tuner.spaces import SMOKE
from tuner.report.page import LARGEST, write_report
from tuner.store import Journal

TRIALS = 1000
LOADS = 7
APPENDS = 10
CLIENTS = 50
ROUNDS = 4
DRAWN = "performance.getEntriesByName('drawn').length * performance.getEntriesByName('first-contentful-paint').length"
TIMES = (
    "({first_contentful_paint: performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000,"
    " drawn: performance.getEntriesByName('drawn')[0].startTime / 1000,"
    " points: echarts.getInstanceByDom(document.querySelector('.chart')).getOption().series"
    ".flatMap((s) => s.type === 'scatter' ? s.data : []).length})"
)


@contextlib.contextmanager
def dashboard(results: Path) -> Iterator[str]:
    """Run `tuner dashboard`; yield its address."""
    command = [sys.executable, "-m", "tuner", "dashboard", str(results), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, "the dashboard does not start"
            address = found.group()
            for study in httpx.get(f"{address}api/studies", timeout=60).json()["studies"]:  # it has read them all
                httpx.get(f"{address}api/studies/{study['id']}", timeout=60)
            yield address
        finally:
            process.terminate()


def first_paint() -> dict[str, Any]:
    """From opening the address to everything drawn; each load in a browser profile without cache."""
    with tempfile.TemporaryDirectory() as folder:
        make_study(Path(folder) / "big", TRIALS, name="big")
        loads = []
        with dashboard(Path(folder)) as address, Browser() as browser:
            for _ in range(LOADS):
                page = browser.page()
                page.go(f"{address}#big/front", DRAWN)
                loads.append(page.run(TIMES))
                page.close()
    figures = {name: [round(load[name], 3) for load in loads] for name in ("first_contentful_paint", "drawn")}
    medians = {f"{name}_median": statistics.median(values) for name, values in figures.items()}
    assert loads[0]["points"] > 3000, f"only {loads[0]['points']} points are drawn"
    # Nothing is painted before all is drawn, so the first paint shows every point.
    slowest = max(medians.values())
    assert slowest < 1.0, f"first painted after {slowest:.2f} s, 1 s wanted: {figures}"
    return medians | figures | {"points": loads[0]["points"], "trials": TRIALS}


def updates() -> dict[str, Any]:
    """From appending a record, with TRIALS in the study and a page open, to the page showing it."""
    with tempfile.TemporaryDirectory() as folder:
        study = make_study(Path(folder) / "big", TRIALS, name="big", finish=False)
        seconds = []
        with dashboard(Path(folder)) as address, Browser() as browser, study.lock(), Journal(study) as journal:
            page = browser.page()
            page.go(f"{address}#big/front", DRAWN)
            for i in range(APPENDS):
                made = trial(random.Random(i), TRIALS + i, 1.8e9 + 100 * i)
                append(journal, [made])
                began = time.monotonic()
                page.wait(f"document.documentElement.dataset.trials === '{TRIALS + i + 1}'")
                seconds.append(round(time.monotonic() - began, 3))
    assert max(seconds) < 2.0, f"shown after {seconds} s, 2 s wanted"
    return {"seconds": seconds, "median": statistics.median(seconds), "max": max(seconds)}


def report_size() -> dict[str, Any]:
    """The report of TRIALS trials, opened from its file."""
    with tempfile.TemporaryDirectory() as folder:
        study = make_study(Path(folder) / "big", TRIALS, name="big")
        write_report(study)
        size = study.report.stat().st_size
        with Browser() as browser:
            page = browser.page()
            page.go(f"file://{study.report}", DRAWN)
            loaded = page.run(TIMES)
            assert page.errors() == [], page.errors()
    assert size <= LARGEST, f"{size / 1e6:.2f} MB"
    return {"bytes": size, "drawn_s": round(loaded["drawn"], 3), "points": loaded["points"]}


def clients() -> dict[str, Any]:
    """A search of computed trials, alone and with CLIENTS that follow it, in turns: seconds a trial."""
    alone, watched, messages = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        with dashboard_of_nothing(results) as address:
            for i in range(ROUNDS):
                alone.append(_search(results, f"alone{i}"))
                seconds, received = asyncio.run(_watched(results, f"watched{i}", address))
                watched.append(seconds)
                messages += received
    ratio = statistics.median(watched) / statistics.median(alone)
    assert messages >= CLIENTS * ROUNDS, f"the clients got {messages} messages only"
    assert ratio < 1.10, f"{CLIENTS} clients slow the search to {ratio:.2f} times its time: {alone} against {watched}"
    figures = {"seconds_alone": alone, "seconds_watched": watched, "ratio_of_medians": round(ratio, 3)}
    return figures | {"clients": CLIENTS, "messages": messages}


@contextlib.contextmanager
def dashboard_of_nothing(results: Path) -> Iterator[str]:
    """Run `tuner dashboard` over a folder that gets its studies later."""
    make_study(results / "first", 1, name="first")
    with dashboard(results) as address:
        yield address


def _command(results: Path, name: str) -> tuple[list[str], dict[str, str]]:
    space = results / f"{name}.yaml"
    space.write_text(SMOKE.replace("name: small", f"name: {name}").replace("wall: 150s", "wall: 600s"))
    environment = os.environ | {"TUNER_LEASES": str(results / "leases"), "PYTHONPATH": str(ROOT)}
    tuner = [sys.executable, str(ROOT / "tests" / "tuner" / "tiny_tuner.py")]
    return [*tuner, "search", str(space), "--results", str(results), "--yes"], environment


def _search(results: Path, name: str) -> float:
    command, environment = _command(results, name)
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return round(time.monotonic() - began, 2)


async def _watched(results: Path, name: str, address: str) -> tuple[float, int]:
    """Search while CLIENTS follow from the moment the study exists."""
    search = asyncio.create_task(asyncio.to_thread(_search, results, name))
    study = f"{address}api/studies/{name}"
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        while not (results / name / "trials.jsonl").exists():
            assert not search.done(), f"the search ended without a study: {search.exception()!r}"
            await asyncio.sleep(0.01)
        received = [0]

        async def follow() -> None:
            version = (await client.get(study)).json()["version"]
            async with client.stream("GET", f"{study}/events?since={version}") as stream:
                async for line in stream.aiter_lines():
                    received[0] += line.startswith("data:")

        followers = [asyncio.create_task(follow()) for _ in range(CLIENTS)]
        seconds = await search
        for follower in followers:
            follower.cancel()
        ended = await asyncio.gather(*followers, return_exceptions=True)
    broken = [error for error in ended if not isinstance(error, asyncio.CancelledError)]
    assert not broken, f"{len(broken)} clients were cut off: {broken[0]!r}"
    return seconds, received[0]


def browser_tests() -> dict[str, Any]:
    """Every view on its data, hostile studies, live updates, themes and keyboard."""
    command = [sys.executable, "-m", "pytest", "tests/browser", "tests/tuner/dashboard", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"REQUIRE_BROWSER": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    words = done.stdout.strip().splitlines()
    assert done.returncode == 0, words[-1] if words else done.stderr[-200:]
    return {"passed": sum(line.split("[")[0].count(".") for line in words)}


STEPS = {
    "browser tests": browser_tests,
    "first paint": first_paint,
    "updates": updates,
    "report": report_size,
    "clients": clients,
}
