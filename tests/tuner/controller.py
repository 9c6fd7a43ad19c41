"""A controller like `tuner search`, in a process of its own that tests can kill.

python controller.py SPEC.json: runs the trial, prints each event as a line, exits 130 on Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tuner.running import FAKE_WORKER
from tuner.executors.local import LocalExecutor
from tuner.records import TrialSpec


def main(path: str) -> int:
    spec = TrialSpec.model_validate_json(Path(path).read_text(encoding="utf-8"))
    try:
        with LocalExecutor(FAKE_WORKER) as executor, executor.run(spec) as events:
            for event in events:
                print(event.model_dump_json(), flush=True)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
