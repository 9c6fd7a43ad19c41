"""The engine process with the fault that the environment names: `engine.worker`'s own command line."""

from __future__ import annotations

import os
import sys

from engine.worker import main
from tests.faults.catalogue import FAULTS
from tests.faults.fault import VARIABLE

if __name__ == "__main__":
    with FAULTS[os.environ[VARIABLE]].applied():
        sys.exit(main())
