"""What a machine offers: the table, and detection through a real nvidia-smi that the test writes."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from engine.errors import ConfigError
from engine.machine import GPU_NAMES, MIB, cpu_machine, detect_machine, gpu, gpu_machine, measure_cpu, usable_cores

TWO_H200 = "0, GPU-aaa1, NVIDIA H200, 143771\n1, GPU-bbb2, NVIDIA H200, 143771\n"
MIXED = "0, GPU-aaa1, NVIDIA H100 80GB HBM3, 81559\n1, GPU-bbb2, NVIDIA L4, 23034\n"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a folder first on PATH in which a test may place its own nvidia-smi."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


def install(program: Path, text: str, status: int = 0) -> None:
    """Write a program that prints `text` and exits with `status`."""
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {status}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("reported", "label"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_as_the_driver_spells_them(reported: str, label: str) -> None:
    assert gpu(reported).name == label


def test_every_row_can_be_found_by_its_own_name() -> None:
    for name in GPU_NAMES:
        machine = gpu(name, devices=8)
        assert (machine.name, machine.devices) == (name, 8)
        assert machine.bandwidth is not None
        assert machine.flops is not None
        assert 20 < machine.flops / machine.bandwidth < 500  # FLOP per byte of any GPU of these years


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 5090 Laptop GPU", "Tesla K80", "L400", ""])
def test_an_unknown_gpu_is_not_guessed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"known: .*H200"):
        gpu(name)


def test_detects_gpus(nvidia_smi: Path) -> None:
    install(nvidia_smi, TWO_H200)
    found = detect_machine(environ={})
    assert (found.kind, found.name, found.devices, found.memory) == ("cuda", "NVIDIA H200", 2, 143771 * MIB)
    assert (found.bandwidth, found.flops, found.source) == (4.8e12, 989e12, "datasheet")


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), ("1,0", 2), ("GPU-bbb2", 1), ("GPU-bbb", 1), ("0,7,1", 1), ("", 0), ("-1", 0)]
)
def test_sees_what_cuda_would_see(nvidia_smi: Path, visible: str, count: int) -> None:
    install(nvidia_smi, TWO_H200)
    found = detect_machine(environ={"CUDA_VISIBLE_DEVICES": visible})
    assert (found.kind, found.devices) == (("cuda", count) if count else ("cpu", 1))


def test_a_mixed_set_counts_as_its_smallest(nvidia_smi: Path) -> None:
    install(nvidia_smi, MIXED)
    found = detect_machine(environ={})
    assert (found.memory, found.bandwidth, found.flops) == (23034 * MIB, 300e9, 121e12)
    unknown = gpu_machine([("NVIDIA H200", 10), ("Tesla K80", 20)])
    assert (unknown.bandwidth, unknown.source) == (None, "unknown")
    assert "Tesla K80" in str(unknown.note)


def test_a_broken_driver_is_said(nvidia_smi: Path) -> None:
    install(nvidia_smi, "couldn't communicate with the driver\n", status=9)
    found = detect_machine(environ={})
    assert found.kind == "cpu"
    assert "failed (9): couldn't communicate" in str(found.note)
    with pytest.raises(ConfigError, match="couldn't communicate"):
        detect_machine("cuda", environ={})


def test_cpu_can_be_asked_for(nvidia_smi: Path) -> None:
    install(nvidia_smi, TWO_H200)
    assert detect_machine("cpu").kind == "cpu"


def test_this_cpu() -> None:
    found = cpu_machine()
    assert 0 < found.memory <= psutil.virtual_memory().total
    assert 1 <= found.cores == usable_cores() <= (os.cpu_count() or 1)
    assert found.name
    assert (found.bandwidth, found.source) == (None, "unknown")


def test_measured_figures_are_plausible() -> None:
    found = measure_cpu(cpu_machine(), seconds=0.05)
    assert found.source == "measured"
    assert found.bandwidth is not None
    assert found.flops is not None
    assert 1e7 < found.bandwidth < 1e13  # bounds that no load on the machine can break
    assert 1e7 < found.flops < 1e15
