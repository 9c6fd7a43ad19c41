"""A GPU whose memory does not come back is shut, and opens when it has."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_server.plan import Plan
from tests.tuner.running import run_fake
from tests.tuner.smi import FakeSmi
from tuner.executors.base import Gpu
from tuner.leases import NotLeased, await_turn, lease, runtime_folder
from tuner.machine import look_at_gpus
from tuner.quarantine import HeldBack, not_back, prove_back, shut_gpus
from tuner.records import LeaseRequest
from tuner.supervise import Exit, Stopped
from tuner.trial import not_gone


async def leased(gpus: int = 1) -> tuple[Gpu, ...]:
    async with lease(LeaseRequest(gpus=gpus), "test", 0.3) as held:
        return held.gpus


def test_memory_that_comes_back_shuts_nothing(smi: FakeSmi) -> None:
    smi.set([(0, 4), (1, 4)], [])
    gpus = asyncio.run(leased(2))
    smi.set([(0, 100), (1, 4)], [])  # the driver's own share may grow a little
    assert prove_back(gpus, runtime_folder(), 5) == ()
    assert shut_gpus(runtime_folder()) == ()


@pytest.mark.parametrize(("used", "apps"), [(4000, []), (4, [(0, 4711)])])
def test_a_gpu_that_does_not_come_back_is_passed_over(
    smi: FakeSmi, used: int, apps: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.set([(0, 4), (1, 4)], [])
    [gpu] = asyncio.run(leased())
    smi.set([(0, used), (1, 4)], apps)
    [held] = prove_back([gpu], runtime_folder(), 0.1)
    assert held.line.startswith(f"GPU 0: {used} MiB in use, 4 before the launch")
    assert held.line.endswith("quarantined")
    assert held.used == bool(apps)
    monkeypatch.setattr("tuner.leases.IDLE_MIB", 10_000)  # the quarantine alone decides
    [other] = asyncio.run(leased())
    assert other.index == 1  # the study goes on
    with pytest.raises(NotLeased) as caught:
        asyncio.run(leased(2))
    assert caught.value.kind == "foreign_gpu_process"
    assert "GPU 0" in caught.value.evidence[0]


def test_it_opens_when_the_memory_is_back(smi: FakeSmi) -> None:
    smi.set([(0, 4)], [])
    [gpu] = asyncio.run(leased())
    smi.set([(0, 500)], [])
    assert prove_back([gpu], runtime_folder(), 0.1)
    with pytest.raises(NotLeased):
        asyncio.run(leased())
    smi.set([(0, 5)], [])
    assert asyncio.run(leased())[0].index == 0
    assert shut_gpus(runtime_folder()) == ()


def test_a_driver_that_fails_proves_nothing(smi: FakeSmi) -> None:
    smi.set([(0, 4)], [])
    [gpu] = asyncio.run(leased())
    smi.set([(0, 4)], [], status=9)
    [held] = prove_back([gpu], runtime_folder(), 0.1)
    assert "nvidia-smi failed" in held.line


def test_a_gpu_that_vanished_is_shut(smi: FakeSmi) -> None:
    smi.set([(0, 4), (1, 4)], [])
    look = look_at_gpus()
    gone = replace(look, gpus=look.gpus[1:])
    assert not_back(look.gpus, gone) == {"GPU-0": HeldBack("GPU 0: the driver does not show it any more")}


def test_an_unreadable_note_shuts_the_gpu_until_it_is_empty(smi: FakeSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.leases.IDLE_MIB", 10_000)  # the quarantine alone decides
    path = runtime_folder() / "gpu-GPU-0.quarantine"
    path.write_text("{", encoding="utf-8")
    smi.set([(0, 4000)], [])
    with pytest.raises(NotLeased):
        asyncio.run(leased())
    assert path.exists()
    smi.set([(0, 4)], [])
    assert asyncio.run(leased())[0].index == 0
    assert not path.exists()


def test_what_is_not_gone_is_a_failure_of_the_stop() -> None:
    clean = Stopped(Exit(None, 9), gone=True, forced=False, survivors=(), seconds=0.1, port_free=True)
    assert not_gone(clean) is None  # SGLang ends itself with SIGKILL on SIGTERM
    assert not_gone(None) is None
    hidden = HeldBack("GPU 0: 4000 MiB in use, 4 before the launch; quarantined")
    named = HeldBack("GPU 1: 4000 MiB in use, 4 before the launch (pid 4711 python3); quarantined", used=True)
    for stopped, held_back, words in (
        (clean, (hidden,), "4000 MiB"),
        (clean, (named, hidden), "4711"),  # what nobody is seen to use may be ours
        (replace(clean, port_free=False), (named,), "port is still taken"),
        (replace(clean, gone=False, survivors=(42,)), (named,), "42"),
    ):
        failure = not_gone(stopped, held_back)
        assert failure is not None
        assert (failure.kind, failure.stage) == ("crashed", "stop")
        assert words in failure.evidence[0]


def test_a_stranger_that_came_during_a_good_trial_is_named_and_its_config_is_not_blamed(
    tmp_path: Path, smi: FakeSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prove(gpus: Sequence[Gpu], folder: Path) -> tuple[HeldBack, ...]:
        smi.set([(0, 9000)], [(0, 4711)])
        return prove_back(gpus, folder, 0.1)

    monkeypatch.setattr("tuner.trial.prove_back", prove)
    smi.set([(0, 4)], [])
    record, _ = run_fake(tmp_path, Plan(), lease=LeaseRequest(gpus=1))
    assert record.levels
    assert record.failure is not None
    assert (record.failure.kind, record.failure.stage) == ("foreign_gpu_process", "stop")
    assert "pid 4711" in record.failure.evidence[0]
    assert "end the process" in record.failure.advice
    assert record.blameless


def test_starts_are_staggered() -> None:
    told: list[str] = []

    noted: list[float] = []

    async def start() -> None:
        await await_turn(0.4, told.append)
        noted.append(float((runtime_folder() / "start.turn").read_text(encoding="ascii")))

    async def run() -> None:
        await asyncio.gather(start(), start(), start())

    asyncio.run(run())
    assert all(later - earlier >= 0.4 for earlier, later in itertools.pairwise(sorted(noted)))
    assert len(set(noted)) == 3
    assert len(told) == 2


def test_a_turn_noted_before_a_reboot_does_not_bind(tmp_path: Path) -> None:
    (runtime_folder() / "start.turn").write_text(str(time.monotonic() + 1e6), encoding="ascii")
    asyncio.run(asyncio.wait_for(await_turn(600.0), 30))
