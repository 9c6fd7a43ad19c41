"""The load generator's error against an exact server, beside other clients': `python -m benchmarks.load_error`.

Every error is the client's stamp against the server's own stamp of the same write, on one clock:

- `ttft_ms`: mean of (first token as the client saw it − as the server wrote it);
- `tpot`: mean time per token as the client has it over the server's, less 1;
- `tok_s`: c · Σ tokens / Σ cycle, where a client's cycle lasts from when a slot is free to when it sees the end, and
  the server's from when it got the request to its last write; so what a client loses between requests counts too;
- `stamp_ms_p99`: of all tokens' last stamps.

Peers are found in the machine-local backends file ($TUNER_BACKENDS): `aiohttp: {"3.14": {command: [PYTHON]}}`, where
that Python has aiohttp and uvloop, and `aiperf` and `guidellm` by their programs. One that is not listed is left out
and named. AIPerf and GuideLLM report averages only; they are compared with the averages of the server's log.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, write
from engine.backends import find_command
from engine.errors import EngineError
from tests.exact_server.run import Schedule, Served, exact

CHUNKS = 100  # of a request: a second of 10 ms each
ROUNDS = 4
STREAMS = (1, 16, 64, 128)
TOKENS = ((1, 1), (4, 4), (16, 16), (1, 16))  # a chunk
RUN_SECONDS = 240


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    client: str
    streams: int
    lo: int
    hi: int
    rounds: int = ROUNDS

    @property
    def tokens(self) -> int:
        """Tokens of a request."""
        return CHUNKS * (self.lo + self.hi) // 2


def python_of(client: str) -> list[str] | None:
    """Return the Python that has a client's library; None where this machine lists none."""
    if not client.startswith("aiohttp"):
        return [sys.executable]
    try:
        return list(find_command("aiohttp", None)[1].command)
    except EngineError:
        return None


def measure(case: Case, schedule: Schedule | None = None) -> dict[str, Any] | None:
    """Run one client against an exact server; None where the client is not installed.

    Raises:
        RuntimeError: the client failed.
    """
    python = python_of(case.client)
    if python is None:
        return None
    plan = schedule or Schedule(case.lo, case.hi)
    with exact(plan) as server:
        script = str(Path(__file__).with_name("load_clients.py"))
        url = f"http://127.0.0.1:{server.port}"
        numbers = map(str, (case.streams, case.rounds, case.tokens, 0))
        done = subprocess.run(
            [*python, script, case.client, url, *numbers],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{case.client}: {done.stderr[-500:]}")
        log = {served.number: served for served in server.log()}
    return errors(case, json.loads(done.stdout), log)


def errors(case: Case, said: dict[str, Any], log: dict[int, Served]) -> dict[str, Any]:
    """Compare a client's account with the server's."""
    pairs = [(request, log[request["number"]]) for request in said["requests"]]
    tokens = sum(served.tokens for _, served in pairs)
    cycle = math.fsum(request["ended"] - request["due"] for request, _ in pairs)
    truth = math.fsum(served.writes[-1][0] - served.received for _, served in pairs)
    tpots = [
        ((r["last"] - r["first"]) / (r["tokens"] - r["first_tokens"]), s.tpot) for r, s in pairs if s.tpot is not None
    ]
    stamps = sorted(1e3 * (request["last"] - served.writes[-1][0]) for request, served in pairs)
    counted = sum(request["tokens"] for request, _ in pairs)
    served_tokens = sum(served.tokens for served in log.values())  # with those of the warm-up
    return {
        "client": case.client,
        "streams": case.streams,
        "tokens_per_chunk": f"{case.lo}" if case.lo == case.hi else f"{case.lo}-{case.hi}",
        "requests": len(pairs),
        "missing": case.streams * case.rounds - len(pairs),
        "token_error": counted - tokens,
        "ttft_ms": 1e3 * statistics.fmean(request["first"] - served.writes[0][0] for request, served in pairs),
        "tpot": statistics.fmean(a for a, _ in tpots) / statistics.fmean(b for _, b in tpots) - 1,
        "tok_s": (counted / cycle) / (tokens / truth) - 1,
        "stamp_ms_p99": stamps[int(0.99 * (len(stamps) - 1))],
        "own_lag_ms_p99": 1e3 * said["own_lag_s"]["p99"] if "own_lag_s" in said else None,
        "cpu_s_per_mtok": 1e6 * said["cpu_s"] / (served_tokens if case.client == "ours" else counted),
        "server_late_ms": _lateness(log.values()),
    }


def _lateness(log: Iterable[Served]) -> float:
    """Return by how much the server's own chunks missed their 10 ms, on average: the bench's own quality."""
    gaps = [abs((after[0] - before[0]) * 1e3 - 10) for served in log for before, after in pairwise(served.writes)]
    return statistics.fmean(gaps) if gaps else 0.0


def errors_of_averages(said: dict[str, float], streams: int, log: Sequence[Served]) -> dict[str, float]:
    """Compare a client that reports averages only (`ttft_ms`, `tpot_ms`, `tok_s`) with those of the server's log.

    The truth is what an ideal client of so many streams would report of the requests that were served.
    """
    whole = [served for served in log if served.tpot is not None]
    seconds = math.fsum(served.writes[-1][0] - served.received for served in whole)
    ttft = statistics.fmean(served.writes[0][0] - served.received for served in whole)
    tpot = statistics.fmean(served.tpot or 0.0 for served in whole)
    return {
        "ttft_ms": said["ttft_ms"] - 1e3 * ttft,
        "tpot": said["tpot_ms"] / (1e3 * tpot) - 1,
        "tok_s": said["tok_s"] / (streams * sum(served.tokens for served in whole) / seconds) - 1,
    }


def row(found: dict[str, Any]) -> str:
    """Return one line of the table."""
    return (
        f"{found['client']:15} {found['streams']:4} {found['tokens_per_chunk']:>5}  tokens {found['token_error']:+d}"
        f"  tok/s {found['tok_s']:+8.2%}  TPOT {found['tpot']:+8.3%}  TTFT {found['ttft_ms']:+9.3f} ms"
        f"  CPU {found['cpu_s_per_mtok']:6.2f} s/Mtok"
    )


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", nargs="+", default=["ours", "httpx", "aiohttp", "aiohttp+uvloop"])
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS / "load_error.json")
    arguments = parser.parse_args()
    found = []
    for client in arguments.clients:
        for streams in arguments.streams:
            for lo, hi in TOKENS:
                result = measure(Case(client, streams, lo, hi, arguments.rounds))
                if result is None:
                    print(f"{client}: not listed in the backends file; left out")
                    continue
                found.append(result)
                print(row(result), flush=True)
    write(arguments.out, {"rows": found})


if __name__ == "__main__":
    main()
