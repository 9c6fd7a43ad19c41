"""A server's life: bound port, readiness, drain, and every way to die, with no process left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.errors import PortError
from engine.server import bind
from tests.engine.serving import ROOT, Served, fake, raw_request, started, text_folder
from tests.waiting import DEADLINE, alive, wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("model"))


class Reading:
    """A streamed request, read by a thread."""

    def __init__(self, served: Served, max_tokens: int = 400) -> None:
        self.events: list[dict[str, Any] | str] = []
        self._served, self._max_tokens = served, max_tokens
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: self.events or not self._thread.is_alive(), "the first chunk")

    def _read(self) -> None:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": self._max_tokens, "stream": True}
        with self._served.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    self.events.append(data if data == "[DONE]" else json.loads(data))

    def end(self) -> list[dict[str, Any] | str]:
        """Wait for the answer's end and return its events."""
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the stream never ended"
        return self.events


def error_of(event: dict[str, Any] | str) -> str:
    assert isinstance(event, dict)
    message: str = event["error"]["message"]
    return message


def test_the_front_is_light() -> None:
    """Neither torch nor transformers, and nothing heavy before the engine process has been started."""
    code = (
        "import sys, engine.server; early = set(sys.modules); import engine.front.life; "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), "
        "sorted({'uvicorn', 'tokenizers', 'jinja2', 'prometheus_client'} & early))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[] []"


def test_port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "tests.engine.serve_fake", str(folder), "--port", port]
        with started(command) as served:
            assert served.process.wait(DEADLINE) == 6
            event = served.event("exit")
    assert [event] == served.events
    assert (event["code"], event["kind"]) == (6, "port")
    assert "choose another --port" in event["message"]
    assert served.lines == [json.dumps(event)]


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 70000, "0 for any free one"),
        ("no.such.host.invalid", 0, "use 127.0.0.1"),
        ("192.0.2.1", 0, "--host"),
    ],
)
def test_addresses_that_cannot_be_bound(host: str, port: int, words: str) -> None:
    with pytest.raises(PortError, match=words):
        bind(host, port)


def test_alive_but_not_ready_while_loading(folder: Path) -> None:
    with fake(folder, "--ready-after", "1000", ready=False) as served, served.client() as client:
        assert client.get("/health").status_code == 200
        for answer in (
            client.get("/ready"),
            client.get("/server_info"),
            client.post("/v1/completions", json={"model": "tiny", "prompt": "a"}),
        ):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "not_ready"
        assert client.get("/metrics").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        os.kill(served.process.pid, signal.SIGTERM)
        assert served.ended()["code"] == 0


def test_a_known_cause_while_loading(folder: Path) -> None:
    fatal = {"code": 4, "kind": "oom_start", "message": "the KV cache does not fit: lower memory.kv_tokens"}
    with fake(folder, "--fatal", json.dumps(fatal), ready=False) as served:
        event = served.ended()
    assert event == {"event": "exit", **fatal}
    assert sum("exit" in line for line in served.lines) == 1


def test_missing_text_files(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with fake(folder, "--ready-after", "1000", ready=False) as served:
        event = served.ended()
    assert (event["code"], event["kind"]) == (3, "missing_file")
    assert "tokenizer.json: missing" in event["message"]


FATAL = {"code": 4, "kind": "oom_load", "message": "out of memory: lower memory.max_running"}


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exit:9", 70, "exited with status 9; its last lines: last words"),
        (f"signal:{int(signal.SIGKILL)}", 70, "killed by SIGKILL"),
        (f"fatal:{json.dumps(FATAL)}", 4, "lower memory.max_running"),
        ("garbage", 70, "bad frame"),
    ],
)
def test_death_of_the_engine_process(folder: Path, how: str, code: int, words: str) -> None:
    """A stream ends with an error event, a waiting request with 503, the server with the cause."""
    with fake(folder, "--die-when", "waiting", "--die-by", how, "--delay", "0.05", "--max-running", "1") as served:
        reading = Reading(served)
        with served.client() as client:
            waiting = client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 400})
        assert waiting.status_code == 503
        assert "has died" in waiting.json()["error"]["message"]
        events = reading.end()
        assert "has died" in error_of(events[-1])
        assert "[DONE]" not in events
        event = served.ended()
    assert event["code"] == code
    assert words in event["message"]
    assert "\n" not in event["message"]


def test_drain_finishes_what_runs(folder: Path) -> None:
    with fake(folder, "--delay", "0.01") as served, served.client() as client:
        reading = Reading(served, max_tokens=60)
        os.kill(served.process.pid, signal.SIGTERM)
        served.event("draining")
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
        late = client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert late.status_code == 503
        assert "shutting down" in late.json()["error"]["message"]
        events = reading.end()
        assert events[-1] == "[DONE]"
        text = "".join(e["choices"][0]["text"] for e in events if isinstance(e, dict))
        assert text == "hello" * 60
        event = served.ended()
    assert event == {"event": "exit", "code": 0, "kind": "stopped", "message": "SIGTERM: all requests finished"}


def test_drain_is_bounded(folder: Path) -> None:
    """What still runs when the time is up ends with an error, and the status is 0."""
    slow = ("--delay", "0.05", "--ignore-drain")
    with fake(folder, *slow, limits={"drain_seconds": 0.3}) as served:
        reading = Reading(served)
        os.kill(served.process.pid, signal.SIGTERM)
        events = reading.end()
        assert "shutting down" in error_of(events[-1])
        event = served.ended()
    assert (event["code"], event["message"]) == (0, "SIGTERM: 1 open requests were ended")


def test_second_signal_ends_the_wait(folder: Path) -> None:
    with fake(folder, "--delay", "0.05", limits={"drain_seconds": 1000}) as served:
        reading = Reading(served)
        os.kill(served.process.pid, signal.SIGINT)
        served.event("draining")
        os.kill(served.process.pid, signal.SIGINT)
        assert "shutting down" in error_of(reading.end()[-1])
        assert served.ended()["code"] == 0


def test_signal_to_the_whole_group_drains_too(folder: Path) -> None:
    """As a terminal's Ctrl-C does: the engine process must not die of it."""
    with fake(folder, "--delay", "0.01") as served:
        reading = Reading(served, max_tokens=60)
        os.killpg(served.process.pid, signal.SIGINT)
        assert reading.end()[-1] == "[DONE]"
        assert served.ended()["message"] == "SIGINT: all requests finished"


def test_death_during_the_drain_is_no_success(folder: Path) -> None:
    with fake(folder, "--delay", "0.05", "--die-when", "draining", "--die-by", "exit:9") as served:
        reading = Reading(served)
        os.kill(served.process.pid, signal.SIGTERM)
        assert "has died" in error_of(reading.end()[-1])
        assert served.ended()["code"] == 70


def test_a_stalled_reader_does_not_hold_up_the_end(folder: Path) -> None:
    long = ("--rows", "100", "--max-len", "1000000")
    with (
        fake(folder, *long, limits={"drain_seconds": 0.3}) as served,
        socket.create_connection(("127.0.0.1", served.port)) as reader,
    ):
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 900000, "stream": True})
        reader.sendall(raw_request(body))
        assert reader.recv(10)
        os.kill(served.process.pid, signal.SIGTERM)
        assert served.ended()["code"] == 0


def test_death_of_the_front_ends_the_engine_process(folder: Path) -> None:
    with fake(folder) as served:
        os.kill(served.process.pid, signal.SIGKILL)
        wait_until(lambda: not alive(served.engine_pid), "the engine process's end")


def test_death_of_the_front_while_loading(folder: Path) -> None:
    with fake(folder, "--ready-after", "1000", ready=False) as served:
        os.kill(served.process.pid, signal.SIGKILL)
        wait_until(lambda: not alive(served.engine_pid), "the engine process's end")
