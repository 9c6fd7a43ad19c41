from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tests.waiting import alive, wait_until
from tuner import watchdog
from tuner.executors.local import WORKER_LOG_CAP
from tuner.supervise import LOG_CAP, Exit, Supervised, listens, supervise
from tuner.watchdog import TAIL_BYTES, Log

ZOO = Path(__file__).parent / "zoo.py"
ENV = {"PATH": os.environ["PATH"]}


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def pids(path: Path, count: int) -> list[int]:
    wait_until(lambda: path.exists() and len(path.read_text().split()) == count, f"{count} processes started")
    return [int(word) for word in path.read_text().split()]


def open_files(pid: int) -> list[str]:
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(fd))
    return found


def ended(process: Supervised) -> Exit:
    wait_until(lambda: process.poll() is not None, "the process ended")
    assert process.exit is not None
    return process.exit


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        ("print('out'); import sys; sys.stderr.write('err'); sys.exit(3)", Exit(3, None), "exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", Exit(None, 11), "signal 11 (SIGSEGV)"),
    ],
)
def test_tells_how_a_process_ended(tmp_path: Path, code: str, expected: Exit, words: str) -> None:
    with supervise(python(code), env=ENV, log=tmp_path / "log") as process:
        assert ended(process) == expected
        assert str(process.exit) == words
        stopped = process.stop()
    assert stopped.gone
    assert not stopped.forced
    if expected.code:
        assert process.tail() == "out\nerr" or sorted(process.tail().split()) == ["err", "out"]


def test_a_program_that_does_not_exist_says_so(tmp_path: Path) -> None:
    with supervise(["/nowhere/server"], env=ENV, log=tmp_path / "log") as process:
        assert ended(process) == Exit(127, None)
    assert process.tail() == "cannot start /nowhere/server: No such file or directory\n"


def test_the_death_of_a_process_wakes_who_waits(tmp_path: Path) -> None:
    with supervise(python("import time; time.sleep(0.2)"), env=ENV, log=tmp_path / "log") as process:
        assert asyncio.run(asyncio.wait_for(process.wait(), 30)) == Exit(0, None)


def test_stop_lets_a_polite_process_leave(tmp_path: Path) -> None:
    with supervise([sys.executable, str(ZOO), str(tmp_path / "pids"), "polite"], env=ENV, log=tmp_path / "log") as p:
        wait_until(lambda: "started" in p.tail(), "the process started")
        stopped = p.stop(30)
    assert (stopped.exit, stopped.gone, stopped.forced) == (Exit(0, None), True, False)
    assert p.tail() == "started\nbye\n"


def test_stop_ends_everything_below(tmp_path: Path) -> None:
    modes = ["deaf", "session", "cleaned", "orphan", "crowd"]
    with supervise([sys.executable, str(ZOO), str(tmp_path / "pids"), *modes], env=ENV, log=tmp_path / "log") as p:
        wait_until(lambda: "started" in p.tail(), "the process started")
        everyone = pids(tmp_path / "pids", 24)
        assert set(everyone) <= set(p.tree())
        stopped = p.stop(0.3)
    assert (stopped.gone, stopped.forced, stopped.survivors) == (True, True, ())
    assert [pid for pid in everyone if alive(pid)] == []
    assert p.stop() is stopped


def test_what_a_dead_server_leaves_is_ended(tmp_path: Path) -> None:
    with supervise([sys.executable, str(ZOO), str(tmp_path / "pids"), "orphan"], env=ENV, log=tmp_path / "log") as p:
        everyone = pids(tmp_path / "pids", 2)
        os.kill(everyone[0], signal.SIGKILL)
        assert ended(p) == Exit(None, 9)
        wait_until(lambda: not alive(everyone[1]), "the orphan ended")
        assert p.stop().gone


def test_a_shell_wrapper_does_not_hide_its_server(tmp_path: Path) -> None:
    line = f"{sys.executable} {ZOO} {tmp_path / 'pids'} polite; true"
    with supervise(["/bin/bash", "-c", line], env=ENV, log=tmp_path / "log") as process:
        wait_until(lambda: "started" in process.tail(), "the process started")
        stopped = process.stop(30)
    assert (stopped.gone, stopped.forced) == (True, False)
    assert "bye" in process.tail()


def test_a_killed_watchdog_takes_the_tree_with_it(tmp_path: Path) -> None:
    """In a process of its own, which adopts the orphans."""
    code = f"""
import os, sys, signal
sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from tests.waiting import alive, wait_until
from tuner.supervise import supervise
argv = [sys.executable, {str(ZOO)!r}, {str(tmp_path / "pids")!r}, "deaf", "session", "orphan"]
with supervise(argv, env=dict(os.environ), log=Path({str(tmp_path / "log")!r}), adopt=True) as process:
    wait_until(lambda: "started" in process.tail(), "started")
    os.kill(process._dog.pid, signal.SIGKILL)
    wait_until(lambda: process.poll() is not None, "the death was seen")
    stopped = process.stop(0.2)
print(stopped.gone, stopped.forced, stopped.survivors)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True True ()\n", done.stderr
    assert [pid for pid in pids(tmp_path / "pids", 3) if alive(pid)] == []


def test_kill_9_of_the_holder_ends_the_tree_and_frees_its_lease(tmp_path: Path) -> None:
    code = f"""
import os, sys, fcntl, time
sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from tuner.supervise import supervise
fd = os.open({str(tmp_path / "lock")!r}, os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
argv = [sys.executable, {str(ZOO)!r}, {str(tmp_path / "pids")!r}, "deaf", "session", "orphan"]
with supervise(argv, env=dict(os.environ), log=Path({str(tmp_path / "log")!r}), keep=[fd]) as process:
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as holder:
        everyone = pids(tmp_path / "pids", 3)
        with (tmp_path / "lock").open("r+") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            holder.kill()
            fcntl.flock(lock, fcntl.LOCK_EX)  # free only when the last process is gone
            assert [pid for pid in everyone if alive(pid)] == []


def test_watchdogs_killed_together_leave_strays_that_are_found_by_their_mark(tmp_path: Path) -> None:
    """The worker dies with its watchdog and so adopts no orphans: what they started falls to nobody but us."""
    inner = f"""
import os, sys
sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from tuner.supervise import supervise
argv = [sys.executable, {str(ZOO)!r}, {str(tmp_path / "pids")!r}, "deaf", "session", "orphan"]
with supervise(argv, env=dict(os.environ), log=Path({str(tmp_path / "inner")!r}), adopt=True) as process:
    print("dog", process._dog.pid, flush=True)
    process._read_until(lambda: False, 600)
"""
    with supervise([sys.executable, "-c", inner], env=dict(os.environ), log=tmp_path / "log") as outer:
        everyone = pids(tmp_path / "pids", 3)
        wait_until(lambda: "dog" in outer.tail(), "the inner watchdog started")
        dogs = [outer._dog.pid, int(outer.tail().split()[1])]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that neither acts before it dies
            for dog in dogs:
                os.kill(dog, number)
        wait_until(lambda: outer.poll() is not None, "the death was seen")
        stopped = outer.stop(0.2)
    assert (stopped.gone, stopped.survivors) == (True, ())
    assert [pid for pid in everyone if alive(pid)] == []


def test_the_logs_of_a_trial_are_capped(tmp_path: Path) -> None:
    code = "import os\nfor _ in range(70): os.write(1, b'x' * 2**20)\nos.write(1, b'THE END')"
    with supervise(python(code), env=ENV, log=tmp_path / "log") as process:
        assert ended(process) == Exit(0, None)
        process.stop()
        assert process.log_size() + WORKER_LOG_CAP + 2 * TAIL_BYTES <= 64 * 2**20
        assert process.tail(100).endswith("xTHE END")
        assert process.log_size() > LOG_CAP


def test_the_server_does_not_inherit_the_lease(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    code = "import os; print(sorted(os.listdir('/proc/self/fd')), flush=True)"
    with supervise(python(code), env=ENV, log=tmp_path / "log", keep=[fd]) as process:
        ended(process)
    os.close(fd)
    assert len(process.tail().split(",")) == 4  # 0, 1, 2 and the listing itself


def test_a_flood_of_output_neither_blocks_nor_fills_the_disk(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.write('x' * 3_000_000); sys.stdout.write('THE END'); sys.stdout.flush()"
    with supervise(python(code), env=ENV, log=tmp_path / "log") as process:
        assert ended(process) == Exit(0, None)
        assert process.log_size() == 3_000_007
        assert process.tail(100).endswith("xTHE END")


def test_a_server_that_closes_its_output_is_not_listened_to_any_more(tmp_path: Path) -> None:
    code = "import os, sys, time; print(os.readlink('/proc/self/fd/1'), file=open(sys.argv[1], 'w'), flush=True); "
    code += "[os.close(fd) for fd in (1, 2)]; time.sleep(600)"
    with supervise([*python(code), str(tmp_path / "pipe")], env=ENV, log=tmp_path / "log") as process:
        wait_until(lambda: (tmp_path / "pipe").exists() and (tmp_path / "pipe").read_text() != "", "the pipe's name")
        pipe = (tmp_path / "pipe").read_text().strip()
        assert pipe.startswith("pipe:")
        wait_until(lambda: pipe not in open_files(process._dog.pid), "the watchdog has left the pipe")
        stopped = process.stop(5)
    assert (stopped.gone, stopped.forced) == (True, False)


def test_a_log_keeps_its_head_and_its_end(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "log"), cap=1000)
    log.write(b"a" * 600)
    log.write(b"b" * 600)
    log.write(b"c" * 300_000)
    log.write(b"the end")
    log.flush()
    text = (tmp_path / "log").read_bytes()
    assert text.startswith(b"a" * 600 + b"b" * 400 + b"\n[38063 bytes left out]\n")
    assert text.endswith(b"cthe end")
    assert len(text) < 1000 + 256 * 1024 + 50


def test_a_full_disk_is_reported_not_raised(tmp_path: Path) -> None:
    log = Log("/dev/full", cap=1000)
    log.write(b"words")
    assert "No space left" in log.error


def test_what_we_may_not_see_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user with /proc mounted hidepid=1, without being one."""
    hidden, sent = os.getppid(), []

    def look(path: str, mode: str) -> IO[bytes]:
        if path == f"/proc/{hidden}/stat":
            raise PermissionError(path)
        return open(path, mode)

    def kill(pid: int, number: int) -> None:
        if pid == hidden:
            raise PermissionError(pid)
        sent.append((pid, number))

    monkeypatch.setattr(watchdog, "open", look, raising=False)
    monkeypatch.setattr(os, "kill", kill)
    assert os.getpid() in watchdog.processes()
    assert hidden not in watchdog.processes()
    watchdog.send([hidden, 1], signal.SIGTERM)
    assert sent == [(1, signal.SIGTERM)]


def test_who_listens(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert listens([os.getpid()], port) is True
        assert listens([1], port) is False
        assert listens([], port) is False
    assert listens([os.getpid()], port) is None
    assert tmp_path.exists()


def test_a_port_that_stays_taken_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.supervise.PORT_SECONDS", 0.1)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with supervise(python("pass"), env=ENV, log=tmp_path / "log", port=port) as process:
            assert process.stop().port_free is False
    with supervise(python("pass"), env=ENV, log=tmp_path / "log", port=port) as process:
        assert process.stop().port_free is True
