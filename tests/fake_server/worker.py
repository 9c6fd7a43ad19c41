"""`tuner.worker` with the fake backend: the command that tests give to an executor."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fake_server.plan import FakeBackend
from tuner.worker import main

if __name__ == "__main__":
    sys.exit(main(backend=FakeBackend()))
