from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from tests.browser.chrome import Browser, chromium
from tests.tuner.dashboard.synthetic import make_study
from tests.waiting import wait_until
from tuner.dashboard.app import find_studies, make_app


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a browser these tests are skipped by name; where one is required, they fail."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if chromium() is None and os.environ.get("REQUIRE_BROWSER") != "1":
                item.add_marker(pytest.mark.skip(reason="no Chromium on this machine"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    make_study(root / "mid", 40, name="mid")
    make_study(root / "one", 1, name="one")
    make_study(root / "empty", 0, name="empty")
    return root


@pytest.fixture(scope="session")
def address(results: Path) -> Iterator[str]:
    """A dashboard over `results`, in a thread: http://localhost:PORT/."""
    config = uvicorn.Config(
        make_app(lambda: find_studies([results])), port=0, log_level="warning", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), "the dashboard starts", 60)
    assert server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://localhost:{port}/"
    server.should_exit = True
    thread.join(30)
