"""`python -m tests.faults NAME serve CONFIG …`: `python -m engine serve` with one fault; `--list` names them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from engine import server
from engine.__main__ import main as engine_main
from tests.faults.catalogue import FAULTS, table
from tests.faults.fault import VARIABLE


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    parser.add_argument("name", nargs="?", choices=FAULTS, metavar="NAME", help="which fault")
    parser.add_argument("command", nargs="?", choices=["serve"])
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="what `python -m engine serve` takes")
    options = parser.parse_args(argv)
    if options.list:
        print(table())
        return 0
    if options.command is None:
        parser.error("name a fault and `serve CONFIG`, or ask for --list")
    fault = FAULTS[options.name]
    os.environ[VARIABLE] = fault.name
    server.WORKER = (sys.executable, "-m", "tests.faults.worker")
    with fault.applied() if fault.front else contextlib.nullcontext():
        return engine_main([options.command, *options.rest])


if __name__ == "__main__":
    sys.exit(main())
