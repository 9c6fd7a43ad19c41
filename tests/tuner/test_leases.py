from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tuner.smi import FakeSmi
from tests.waiting import wait_until
from tuner.leases import (
    LeaseError,
    NotLeased,
    foreign_use,
    fresh_port,
    held_locks,
    lease,
    runtime_folder,
    try_lock,
)
from tuner.machine import MachineError, look_at_gpus
from tuner.records import LeaseRequest

CPU = LeaseRequest()


async def take(request: LeaseRequest, timeout: float = 0.3) -> tuple[str, dict[str, str]]:
    async with lease(request, "test", timeout) as held:
        names = ",".join(lock.name for lock in held_locks())
        return names, held.environment


def refused(request: LeaseRequest, timeout: float = 0.3) -> NotLeased:
    with pytest.raises(NotLeased) as caught:
        asyncio.run(take(request, timeout))
    return caught.value


# --- the folder ---


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What /tmp is to tuners that are told nothing."""
    monkeypatch.delenv("TUNER_LEASES")
    monkeypatch.setattr("tuner.leases.SHARED", tmp_path)
    return tmp_path


def test_the_folder_is_private_and_the_same_in_every_session(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = shared / "session"
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    folder = runtime_folder()
    fd = try_lock("cpu-0", "me")
    assert fd is not None
    session.rmdir()  # the user has logged out
    assert runtime_folder() == folder == shared / f"dflash-tuner-{os.getuid()}"
    assert try_lock("cpu-0", "another trial") is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    os.close(fd)


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_folder_that_others_can_enter_is_refused(shared: Path, mode: int) -> None:
    runtime_folder().chmod(mode)
    with pytest.raises(LeaseError, match="not a folder of yours alone"):
        runtime_folder()


def test_a_link_is_refused(shared: Path) -> None:
    (shared / "elsewhere").mkdir(mode=0o700)
    (shared / f"dflash-tuner-{os.getuid()}").symlink_to(shared / "elsewhere")
    with pytest.raises(LeaseError):
        runtime_folder()


def test_another_folder_is_used_only_where_it_can_be(shared: Path) -> None:
    assert runtime_folder({"TUNER_LEASES": str(shared / "mine")}) == shared / "mine"
    with pytest.raises(LeaseError, match="set TUNER_LEASES"):
        runtime_folder({"TUNER_LEASES": str(shared / "absent" / "mine")})


# --- CPU slots ---


def test_one_trial_at_a_time_has_the_cpu(smi: FakeSmi) -> None:
    async def run() -> None:
        async with lease(CPU, "first", 1) as held:
            assert held.cpu_slots == (0,)
            assert held.environment == {"CUDA_VISIBLE_DEVICES": ""}
            assert [(lock.name, lock.holder, lock.pid) for lock in held_locks()] == [("cpu-0", "first", os.getpid())]
            with pytest.raises(NotLeased) as caught:
                await take(CPU)
            assert caught.value.kind == "no_progress"
        assert held_locks() == ()
        assert (await take(CPU))[0] == "cpu-0"

    asyncio.run(run())
    assert smi.gpus.exists()


def test_a_waiting_trial_gets_the_lease_and_is_told_why_it_waits() -> None:
    told: list[str] = []

    async def run() -> None:
        async def second() -> None:
            async with lease(CPU, "second", 20, told.append):
                pass

        async with lease(CPU, "first", 1):
            task = asyncio.create_task(second())
            while not told:
                await asyncio.sleep(0.01)
        await task

    asyncio.run(run())
    assert told == ["waiting: other trials hold the CPU"]


def test_a_killed_holder_frees_its_lease() -> None:
    code = "import sys, time; from tuner.leases import try_lock; fd = try_lock('cpu-0', 'child'); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        wait_until(lambda: [lock.pid for lock in held_locks()] == [child.pid], "the child holds the lease")
        assert try_lock("cpu-0", "me") is None
        child.kill()
        child.wait()
    fd = try_lock("cpu-0", "me")
    assert fd is not None
    os.close(fd)


def test_more_than_the_machine_has_is_refused_at_once() -> None:
    assert refused(LeaseRequest(cpus=2), timeout=600).kind == "config"
    assert refused(LeaseRequest(gpus=99), timeout=600).kind == "config"


# --- GPUs ---


def test_no_tool_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look_at_gpus().gpus == ()


def test_gpus_are_leased_whole_and_named_to_the_server(smi: FakeSmi) -> None:
    smi.set([(0, 4), (1, 4), (2, 4)], [])
    names, environment = asyncio.run(take(LeaseRequest(gpus=2)))
    assert names == "gpu-GPU-0,gpu-GPU-1"
    assert environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert held_locks() == ()


def test_two_trials_share_no_gpu(smi: FakeSmi) -> None:
    smi.set([(0, 4), (1, 4), (2, 4)], [])

    async def run() -> None:
        async with lease(LeaseRequest(gpus=1), "a", 1) as first, lease(LeaseRequest(gpus=2), "b", 1) as second:
            assert [gpu.index for gpu in first.gpus] == [0]
            assert [gpu.index for gpu in second.gpus] == [1, 2]
            with pytest.raises(NotLeased) as caught:
                await take(LeaseRequest(gpus=1))
            assert caught.value.kind == "no_progress"

    asyncio.run(run())


def test_a_gpu_with_someone_elses_process_is_never_leased(smi: FakeSmi) -> None:
    smi.set([(0, 9000), (1, 4)], [(0, 4711)])
    assert asyncio.run(take(LeaseRequest(gpus=1)))[1]["CUDA_VISIBLE_DEVICES"] == "1"
    error = refused(LeaseRequest(gpus=2))
    assert error.kind == "foreign_gpu_process"
    assert error.evidence == ("GPU 0: pid 4711 python3, 9000 MiB",)
    assert held_locks() == ()


def test_memory_without_a_visible_process_is_someone_elses_too(smi: FakeSmi) -> None:
    smi.set([(0, 70_000)], [])
    assert list(foreign_use(look_at_gpus()).values()) == [["GPU 0: 70000 MiB in use by processes not shown to us"]]
    assert refused(LeaseRequest(gpus=1)).kind == "foreign_gpu_process"


def test_what_the_driver_does_not_tell_is_no_crash(smi: FakeSmi) -> None:
    smi.set([(0, 4)], [])
    smi.apps.write_text("GPU-0, [N/A], a, name with, commas, [N/A]\n\nnoise\n")
    assert [line for signs in foreign_use(look_at_gpus()).values() for line in signs] == [
        "GPU 0: pid unknown a,name with,commas"
    ]


def test_a_lock_whose_file_was_removed_is_not_taken_for_held() -> None:
    fd = try_lock("port-1", "a")
    assert fd is not None
    (runtime_folder() / "port-1.lock").unlink()
    again = try_lock("port-1", "b")
    assert again is not None
    assert [lock.holder for lock in held_locks()] == ["b"]
    os.close(fd)
    os.close(again)


def test_our_own_trial_on_a_gpu_is_waited_for_not_blamed(smi: FakeSmi) -> None:
    smi.set([(0, 4)], [])

    async def run() -> None:
        async with lease(LeaseRequest(gpus=1), "a", 1):
            smi.set([(0, 9000)], [(0, 4711)])  # its server now runs
            with pytest.raises(NotLeased) as caught:
                await take(LeaseRequest(gpus=1), timeout=0.6)
            assert caught.value.kind == "no_progress"

    asyncio.run(run())


def test_the_users_own_restriction_is_kept(smi: FakeSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.set([(0, 4), (1, 4)], [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in look_at_gpus().gpus] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    assert [gpu.index for gpu in look_at_gpus().gpus] == [0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert look_at_gpus().gpus == ()


def test_a_tool_that_fails_is_an_error_not_an_empty_machine(smi: FakeSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.set([(0, 4)], [], status=9)
    with pytest.raises(MachineError, match="nvidia-smi failed"):
        look_at_gpus()
    smi.program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("tuner.machine.QUERY_SECONDS", 0.2)
    with pytest.raises(MachineError, match="did not answer"):
        look_at_gpus()


def test_a_tool_that_fails_is_waited_for(smi: FakeSmi) -> None:
    told: list[str] = []

    async def run() -> None:
        async def second() -> str:
            async with lease(LeaseRequest(gpus=1), "second", 60, told.append) as held:
                return held.environment["CUDA_VISIBLE_DEVICES"]

        smi.set([(0, 4)], [], status=9)
        task = asyncio.create_task(second())
        while not told:
            await asyncio.sleep(0.01)
        smi.set([(0, 4)], [])
        assert await task == "0"

    asyncio.run(run())
    assert told[0].startswith("waiting: nvidia-smi failed")


def test_a_tool_that_fails_for_too_long_is_no_configurations_fault(smi: FakeSmi) -> None:
    smi.set([(0, 4)], [], status=9)
    error = refused(LeaseRequest(gpus=1))
    assert error.kind == "no_progress"
    assert "nvidia-smi failed" in str(error)
    assert held_locks() == ()


# --- ports ---


def test_a_port_is_free_and_held() -> None:
    with fresh_port("a") as one, fresh_port("b") as two:
        assert one != two
        assert {lock.name for lock in held_locks()} == {f"port-{one}", f"port-{two}"}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", one))
    assert held_locks() == ()
    assert list(runtime_folder().glob("port-*")) == []


def test_taken_ports_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("random.sample", lambda *_: [port])
        with pytest.raises(NotLeased) as caught, fresh_port("a"):
            pass
    assert caught.value.kind == "port"
    assert held_locks() == ()
