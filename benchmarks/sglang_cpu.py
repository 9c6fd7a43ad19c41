"""A real `tuner search` over SGLang's CPU server, the contract suite against it, and the records.

SGLang runs no speculation on a CPU, so the drafts of the space are pruned before any launch and the search measures
what is left. What it shows is the whole path: lease, launch, readiness, load, measurement, stop, front.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, write
from engine.backends import commands_file, find_command

SPACE = ROOT / "search_spaces" / "bundled_sglang_cpu.yaml"
SECONDS = 560.0
CONTRACT = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "sglang", "-rf", "tests/contract")


def search(space: Path, results: Path) -> tuple[int, str, float]:
    """Run the search; return (exit status, what it printed, seconds)."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tuner", "search", str(space), "--results", str(results), "--yes"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    return ended.returncode, ended.stdout + ended.stderr, time.monotonic() - began


def launch_text(path: Path) -> str | None:
    """Return a launch file without its comment, which holds this machine's command."""
    if not path.is_file():
        return None
    kept = (line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return "\n".join(kept) + "\n"


def without_paths(value: Any, folders: tuple[str, ...]) -> Any:
    """Return a JSON value whose strings name no folder of this machine."""
    if isinstance(value, str):
        for folder in folders:
            value = value.replace(folder, "…")
        return value
    if isinstance(value, list):
        return [without_paths(item, folders) for item in value]
    if isinstance(value, dict):
        return {key: without_paths(item, folders) for key, item in value.items()}
    return value


def contract() -> dict[str, Any]:
    """Run the contract suite against SGLang, and return what pytest counted."""
    command = [sys.executable, *CONTRACT]
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
        said, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        said, status = (error.stdout or b"").decode("utf-8", "replace"), -1
    print(said[-6000:])
    return {
        "command": list(CONTRACT),
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "said": [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))] + said.splitlines()[-1:],
    }


def main() -> None:
    """Search and write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--space", type=Path, default=SPACE)
    parser.add_argument("--out", type=Path, default=RESULTS / "sglang_cpu.json")
    arguments = parser.parse_args()
    version, _ = find_command("sglang", None)
    with tempfile.TemporaryDirectory() as folder:
        status, said, seconds = search(arguments.space, Path(folder))
        print(said)
        (study,) = Path(folder).iterdir()
        records = [json.loads(line) for line in (study / "trials.jsonl").read_text(encoding="utf-8").splitlines()]
        front = study / "front.json"
        found = {
            "server": f"sglang {version}, CPU",
            "space": arguments.space.name,
            "exit_status": status,
            "seconds": round(seconds, 1),
            "states": [record["state"] for record in records],
            "front": json.loads(front.read_text(encoding="utf-8")) if front.is_file() else None,
            "launch": launch_text(study / "launch.yaml"),
            "trials": records,
        }
        write(arguments.out, found)
        written = json.loads(arguments.out.read_text(encoding="utf-8"))
        names = (folder, str(arguments.out.parent), str(commands_file().parent), str(ROOT), str(Path.home()))
        known = without_paths(written, names)
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    known["contract"] = without_paths(contract(), names)
    arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(status or known["contract"]["status"])


if __name__ == "__main__":
    main()
