"""One server of each backend for the whole suite, started and stopped as the tuner does it.

The native engine always takes part. Foreign servers are opted in with their marker (`-m sglang`) and found in the
machine's backends file; without the marker their tests are not collected. On a GPU SGLang computes in bfloat16, which
its kernels ask for, and takes part with DFLASH, too; what is compared then allows for near-ties.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import backends
from engine.backends import Backend, find_command
from engine.config import EngineConfig
from engine.estimate import detect_machine
from engine.pair.workload import load_workload
from tuner.leases import fresh_port
from tuner.load.client import Endpoint
from tuner.load.workload import make_requests
from tuner.ready import Ready, await_ready
from tuner.records import Workload
from tuner.supervise import Supervised, supervise

HOST = "127.0.0.1"
READY_SECONDS = 280.0  # a first start compiles kernels; beyond five times of what a busy machine takes
FOREIGN = ("sglang", "vllm")

# float32, so that equal computations have equal argmaxes whatever the order of summation.
COMMON: dict[str, Any] = {
    "model": {"target": "bundled", "dtype": "float32"},
    "memory": {"max_running": 8, "kv_tokens": 8192},
}
ON_GPU = detect_machine().kind == "cuda"
SGLANG = {**COMMON, "backend": {"kind": "sglang"}}
if ON_GPU:
    SGLANG["model"] = {"target": "bundled", "dtype": "bfloat16"}
CONFIGS: dict[str, dict[str, Any]] = {
    "native": {**COMMON, "draft": {"kind": "none"}},
    "native-dflash": {**COMMON, "draft": {"kind": "dflash", "block_size": 8}},
    "sglang": {**SGLANG, "draft": {"kind": "none"}},
    "sglang-dflash": {**SGLANG, "draft": {"kind": "dflash", "block_size": 8}},
}


@dataclass(frozen=True)
class Served:
    """A ready server."""

    name: str
    config: EngineConfig
    backend: Backend
    process: Supervised
    endpoint: Endpoint
    info: dict[str, Any]

    @property
    def exact(self) -> bool:
        """Whether equal texts can be asked of it."""
        return self.config.model.dtype == "float32"

    @property
    def scores(self) -> bool:
        """Whether it gives log-probabilities: SGLang refuses them with DFLASH."""
        return self.name != "sglang-dflash"

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.endpoint.host}:{self.endpoint.port}"

    def get(self, path: str) -> httpx.Response:
        """GET a path."""
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """POST a JSON body."""
        return httpx.post(self.url + path, json=body, timeout=120)

    def complete(self, prompt: tuple[int, ...] | str, **fields: Any) -> dict[str, Any]:
        """Return the body of a greedy completion of 200."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)  # type: ignore[assignment]
        body = {"model": self.config.model.target, "prompt": prompt, "max_tokens": 16, "temperature": 0, **fields}
        reply = self.post("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the servers that were not opted in; deselected and counted, not skipped."""
    asked = config.getoption("-m") or ""
    left = [item for item in items for name in FOREIGN if name in item.keywords and name not in asked]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Token ids of a few bundled prompts."""
    return [tuple(entry.token_ids) for entry in load_workload()[:5]]


@pytest.fixture(
    scope="session",
    params=[
        "native",
        "native-dflash",
        pytest.param("sglang", marks=pytest.mark.sglang),
        *([pytest.param("sglang-dflash", marks=pytest.mark.sglang)] if ON_GPU else []),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A ready server; at the end it is stopped, and nothing of it may be left."""
    yield from serve(request.param, tmp_path_factory.mktemp(request.param))


def serve(name: str, folder: Path) -> Iterator[Served]:
    """Start a server, wait for it as the tuner does, and prove it gone afterwards."""
    config = EngineConfig.model_validate(CONFIGS[name])
    if config.backend.kind != "native":
        find_command(config.backend.kind, None)  # says which file to write
    backend = backends.get(config)
    path = folder / "config.yaml"
    path.write_text(config.model_dump_json(), encoding="utf-8")
    requests = make_requests(Workload(), config.model.target, 0)
    with fresh_port("contract", HOST) as port:
        launch = backend.command(config, path, HOST, port)
        with supervise(
            launch.argv, env={**os.environ, **launch.env}, log=folder / "server.log", grace=30.0, port=port
        ) as process:
            endpoint = Endpoint(HOST, port)
            ready = asyncio.run(await_ready(process, endpoint, backend.probes, requests, timeout=READY_SECONDS))
            assert isinstance(ready, Ready), f"{ready}\n{process.tail()}"
            yield Served(name, config, backend, process, endpoint, ready.info)
            stopped = process.stop(30.0)
    assert stopped.gone, stopped
    assert stopped.port_free, stopped
