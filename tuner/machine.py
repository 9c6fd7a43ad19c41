"""What this machine has: GPUs and who uses them (`nvidia-smi`), the processor's name, memory and disk."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from tuner.errors import TunerError
from tuner.executors.base import Gpu

QUERY_SECONDS = 20.0


class MachineError(TunerError):
    """The machine's tools do not answer."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU. `memory_used` in MiB. None where the driver does not tell."""

    gpu: str
    pid: int | None
    name: str
    memory_used: int | None


@dataclass(frozen=True)
class Gpus:
    """A look at the GPUs: all of them (those that CUDA_VISIBLE_DEVICES leaves), their users, the driver."""

    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    driver: str | None = None


def look_at_gpus() -> Gpus:
    """Ask `nvidia-smi`; a machine without it has no GPUs.

    Raises:
        MachineError: `nvidia-smi` is there and fails, or does not answer in time.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return Gpus()
    rows = _query(program, "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version")
    gpus = tuple(
        Gpu(int(index), uuid, name, _number(total) or 0, _number(used) or 0)
        for index, uuid, name, total, used, _ in rows
    )
    shown = _visible(gpus)
    users = _query(program, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    uuids = {gpu.uuid for gpu in shown}
    processes = tuple(
        GpuProcess(uuid, _number(pid), ",".join(name), _number(used))
        for uuid, pid, *name, used in users
        if uuid in uuids
    )
    return Gpus(shown, processes, rows[0][5] if rows else None)


def _query(program: str, what: str) -> list[list[str]]:
    try:
        answer = subprocess.run(
            [program, what, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"nvidia-smi did not answer in {QUERY_SECONDS:.0f} s: a GPU or the driver hangs") from error
    if answer.returncode:
        words = " ".join((answer.stdout + answer.stderr).split())
        if "no devices were found" in words.lower():
            return []
        raise MachineError(f"nvidia-smi failed: {words[:200]}")
    width = what.count(",") + 1
    return [
        [part.strip() for part in line.split(",")]
        for line in answer.stdout.splitlines()
        if line.count(",") >= width - 1
    ]


def _number(text: str) -> int | None:
    """Return a whole number; None for `[N/A]` and its like."""
    return int(text) if text.isdigit() else None


def _visible(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Keep what the tuner's own CUDA_VISIBLE_DEVICES allows."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return gpus
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    return tuple(gpu for gpu in gpus if str(gpu.index) in names or any(gpu.uuid.startswith(n) for n in names))


def cpu_name() -> str:
    """Return the processor's model name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except FileNotFoundError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return how many cores this process may use (affinity and container quota)."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()[:2]
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that holds `folder` (or its nearest existing parent)."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def memory_bytes() -> int:
    """Return the memory that this process may use: the host's, or the container's if that is less."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
