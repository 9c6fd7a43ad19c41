"""The server: what it gives, to whom, and that nothing but its own files and studies can be had."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from tests.tuner.dashboard.synthetic import append, make_study, trial
from tuner.cli import app as command_line
from tuner.dashboard.app import find_studies, make_app
from tuner.dashboard.live import LiveStudy
from tuner.errors import UsageError
from tuner.store import Journal, StudyFolder


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    folder = make_study(root / "first", 12)
    make_study(root / "second", 0)
    (folder.logs / "trial-0003.log").write_bytes(b"server says <b>hi</b>\n\xff\x00")
    (root / "secret.txt").write_text("secret")
    (folder.logs / "trial-0004.log").symlink_to(root / "secret.txt")
    return root


@pytest.fixture
def client(studies: Path) -> Iterator[TestClient]:
    with TestClient(make_app(lambda: find_studies([studies])), base_url="http://localhost:8080") as client:
        yield client


def test_the_page_and_its_files_come_with_a_strict_policy(client: TestClient) -> None:
    for path in (
        "/",
        "/static/app.js",
        "/static/base.css",
        "/static/vendor/echarts.min.js",
        "/static/vendor/inter.woff2",
    ):
        answer = client.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_studies_trials_and_logs_are_json(client: TestClient) -> None:
    assert client.get("/api/studies").json() == {
        "studies": [{"id": "first", "running": False}, {"id": "second", "running": False}]
    }
    study = client.get("/api/studies/first").json()
    assert len(study["trials"]) == 12
    assert study["live"]["state"] == "finished"
    log = client.get("/api/studies/first/trials/3/logs/server").json()
    assert log["text"] == "server says <b>hi</b>\n�\x00"
    rest = client.get(f"/api/studies/first/trials/3/logs/server?offset={log['end'] - 2}").json()
    assert (rest["start"], rest["text"]) == (log["end"] - 2, "�\x00")


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2f..%2fstore.py",
        "/static//etc/passwd",
        "/static/vendor/../../serve.py",
        "/api/studies/..%2fsecret.txt",
        "/api/studies/%2e%2e",
        "/api/studies/first%2f..%2fsecond",
        "/api/studies/first/trials/3/logs/..%2f..%2fspace.yaml",
        "/api/studies/first/trials/..%2f3/logs/server",
        "/api/studies/first/trials/4/logs/server",
        "/api/studies/first/trials/99999999999999999999/logs/server",
        "/api/studies/first/trials/3/logs/nothing",
        "/secret.txt",
    ],
)
def test_nothing_else_can_be_had(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "secret" not in answer.text or "no such" in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[x"}, 403),
        ({"origin": "http://localhost:9999"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"host": "evil.example"}, 421),
        ({"host": "localhost.evil.example:8080"}, 421),
        ({"host": "127.0.0.1:1"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"origin": "http://localhost:8080", "sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_other_origins_and_names_are_refused(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.get("/api/studies", headers=headers).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_shows(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/studies/first").status_code == 405


def test_a_query_that_makes_no_sense_is_refused(client: TestClient) -> None:
    assert client.get("/api/studies/first/events?since=x").status_code == 400
    assert client.get("/api/studies/first/trials/3/logs/server?offset=-1").status_code == 400
    assert client.get("/api/studies?" + "a" * 5000).status_code == 414
    assert client.get(f"/api/studies/first/trials/{'9' * 5000}/logs/server").status_code == 414


def test_elsewhere_than_on_loopback_a_token_is_needed(studies: Path) -> None:
    with pytest.raises(UsageError, match="token"):
        make_app(lambda: find_studies([studies]), host="0.0.0.0")
    app = make_app(lambda: find_studies([studies]), host="0.0.0.0", token="a-token")
    with TestClient(app, base_url="http://machine:8080", follow_redirects=False) as client:
        assert client.get("/api/studies").status_code == 401
        assert client.get("/api/studies?token=another").status_code == 401
        assert client.get("/api/studies", headers={"authorization": "Bearer a-token"}).status_code == 200
        welcome = client.get("/?token=a-token")
        assert (welcome.status_code, welcome.headers["location"]) == (303, "/")
        cookie = welcome.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert client.get("/api/studies").status_code == 200  # with the cookie


def test_a_study_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "broken", 1)
    folder.space.write_text("schema: 1\nstudy: [")
    with TestClient(make_app(lambda: find_studies([tmp_path])), base_url="http://localhost") as client:
        answer = client.get("/api/studies/broken")
    assert answer.status_code == 409
    assert "space.yaml:" in answer.json()["error"]


def test_studies_that_are_gone_say_so(tmp_path: Path) -> None:
    make_study(tmp_path / "results" / "one", 1)
    with TestClient(make_app(lambda: find_studies([tmp_path / "results"])), base_url="http://localhost") as client:
        (tmp_path / "results").rename(tmp_path / "elsewhere")
        for path in ("/api/studies", "/api/studies/one", "/api/studies/one/events?since=0"):
            answer = client.get(path)
            assert answer.status_code == 409, path
            assert "cannot be read" in answer.json()["error"]


def test_watchers_get_each_change_and_one_who_is_behind_starts_anew(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "study", 5, finish=False)

    async def scenario() -> None:
        live = LiveStudy(StudyFolder(folder.path), "study")
        version = json.loads(await live.whole())["version"]
        behind, watching = live.watch(version - 1), live.watch(version)
        assert (await anext(behind)).startswith(b"event: anew")
        next_ = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0)
        made = trial(random.Random(5), 5, 1.8e9)
        with Journal(folder) as journal:
            append(journal, [made])
        kind, changed = _message(await asyncio.wait_for(next_, 30))
        while kind != "delta":
            kind, changed = _message(await asyncio.wait_for(anext(watching), 30))
        assert [each["trial"] for each in changed["trials"]] == [5]
        assert changed["version"] == version + 1
        live.close()
        await behind.aclose()
        await watching.aclose()

    asyncio.run(scenario())


def _message(data: bytes) -> tuple[str, dict[str, Any]]:
    fields = dict(line.split(": ", 1) for line in data.decode().strip().split("\n"))
    return fields["event"], json.loads(fields["data"])


def test_watch_prints_the_essentials(studies: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(command_line, ["watch", str(studies / "first"), "--once"])
    assert shown.exit_code == 0, shown.output
    for words in ("synthetic", "finished", "Last trials", "Front", "Best at 16 in flight"):
        assert words in shown.output
    empty = CliRunner().invoke(command_line, ["watch", str(studies / "second"), "--once"])
    assert "0 of 1 launches" in empty.output


def test_what_is_no_study_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no study"):
        find_studies([tmp_path])
    with pytest.raises(UsageError, match="cannot be read"):
        find_studies([tmp_path / "nowhere"])
    assert os.listdir(tmp_path) == []
