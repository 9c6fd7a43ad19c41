"""What dead studies leave is found and ended; what lives is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests.tuner.smi import FakeSmi
from tests.waiting import alive, wait_until
from tuner import clean
from tuner.clean import DeadLock, HalfWritten, Quarantine, Stray, leftovers
from tuner.cli import app
from tuner.leases import fresh_port, runtime_folder, try_lock
from tuner.quarantine import Shut, shut_gpus
from tuner.supervise import MARK, marked, supervise

SLEEP = [sys.executable, "-I", "-S", "-c", "print('here', flush=True); import time; time.sleep(600)"]


@pytest.fixture
def stray() -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries our mark and has no watchdog."""
    env = {"PATH": os.environ["PATH"], MARK: "/1-feedfeedfeedfeed"}
    with subprocess.Popen(SLEEP, env=env, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        yield process
        process.kill()


def strays(folder: Path) -> dict[int, Stray]:
    return {found.pid: found for found in leftovers(folder) if isinstance(found, Stray)}


def test_a_stray_is_found_and_ended(tmp_path: Path, stray: subprocess.Popen[bytes]) -> None:
    found = strays(tmp_path)[stray.pid]
    assert "time.sleep(600)" in str(found)
    assert found.end() == ""
    assert not alive(stray.pid)
    assert found.end() == ""  # twice is once
    assert stray.pid not in strays(tmp_path)


def test_another_process_with_its_pid_is_left_alone(stray: subprocess.Popen[bytes]) -> None:
    assert Stray(stray.pid, psutil.Process(stray.pid).create_time() - 1, "an earlier one").end() == ""
    assert alive(stray.pid)


def test_what_a_watchdog_holds_is_no_stray(tmp_path: Path) -> None:
    with supervise(SLEEP, env={"PATH": os.environ["PATH"]}, log=tmp_path / "log") as process:
        wait_until(lambda: "here" in process.tail(), "the process started")
        assert process.pid in marked()
        assert not strays(tmp_path).keys() & set(process.tree())


def test_dead_locks_are_removed_and_held_ones_kept(tmp_path: Path) -> None:
    dead = runtime_folder() / "port-4711.lock"
    dead.touch()
    with fresh_port("alive") as port:
        [found] = [left for left in leftovers(tmp_path) if isinstance(left, DeadLock)]
        assert found.path == dead
        assert found.end() == ""
        assert not dead.exists()
        assert (runtime_folder() / f"port-{port}.lock").exists()
    dead.touch()
    fd = try_lock("port-4711", "taken meanwhile")
    assert fd is not None
    assert found.end() == ""
    assert dead.exists()
    os.close(fd)


def test_a_quarantine_is_lifted_only_when_the_memory_is_back(
    tmp_path: Path, smi: FakeSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.set([(0, 9000)], [])
    note = runtime_folder() / "gpu-GPU-0.quarantine"
    note.write_text(json.dumps(asdict(Shut("GPU-0", 0, 4, "9000 MiB in use", 0.0))))
    [held] = [left for left in leftovers(tmp_path) if isinstance(left, Quarantine)]
    assert "9000 MiB in use" in str(held)
    assert "still in use" in held.end()
    assert shut_gpus(runtime_folder())
    smi.set([(0, 10)], [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what is not seen is not known to be back
    assert not any(isinstance(left, Quarantine) for left in leftovers(tmp_path))
    assert shut_gpus(runtime_folder())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    [free] = [left for left in leftovers(tmp_path) if isinstance(left, Quarantine)]
    assert "its memory is back" in str(free)
    assert free.end() == ""
    assert shut_gpus(runtime_folder()) == ()


def test_half_written_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    study = tmp_path / "study"
    study.mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as writer:
        writer.wait()
    dead, living = study / f".front.json.{writer.pid}.tmp", study / f".front.json.{os.getpid()}.tmp"
    dead.touch()
    living.touch()
    assert [left.path for left in leftovers(tmp_path) if isinstance(left, HalfWritten)] == [dead]
    for left in leftovers(tmp_path):
        if isinstance(left, HalfWritten):
            assert left.end() == ""
    assert (dead.exists(), living.exists()) == (False, True)


def test_the_command_lists_and_asks(
    tmp_path: Path, stray: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean, "marked", lambda: {stray.pid: "/1"})  # not the strays of whoever else tests here
    command = ["clean", "--results", str(tmp_path)]
    listed = CliRunner().invoke(app, command)
    assert (listed.exit_code, f"process {stray.pid}" in listed.stdout) == (0, True)
    assert alive(stray.pid)
    ended = CliRunner().invoke(app, [*command, "--yes"])
    assert (ended.exit_code, ended.stdout.splitlines()[-1]) == (0, "Gone: 1.")
    wait_until(lambda: stray.poll() is not None, "the stray ended")
    monkeypatch.setattr(clean, "marked", dict)
    assert "Nothing is left" in CliRunner().invoke(app, command).stdout
