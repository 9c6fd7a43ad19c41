"""`engine.server` with the fake engine process: python -m tests.engine.serve_fake FOLDER --worker JSON."""

from __future__ import annotations

import argparse
import json
import sys

from engine.config import EngineConfig
from engine.front.limits import Limits
from engine.server import Service, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--limits", type=json.loads, default={})
    parser.add_argument("--worker", type=json.loads, default=[], help="the fake engine process's options")
    parser.add_argument("--plain", action="store_true", help="as where httptools and uvloop are not installed")
    options = parser.parse_args()
    if options.plain:
        sys.modules |= {"httptools": None, "uvloop": None}  # type: ignore[dict-item]
    config = EngineConfig.model_validate({"model": {"target": options.folder}})
    worker = (sys.executable, "-m", "tests.engine.fake_worker", *options.worker)
    sys.exit(run(Service(config, options.host, options.port, "tiny"), worker, Limits(**options.limits)))
