"""What this machine has beside what the engine must know: who uses its GPUs, and room on its disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from engine.estimate import NoAnswer, nvidia_smi, visible_gpus
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
    try:
        rows = nvidia_smi("--query-gpu=index,uuid,name,memory.total,memory.used,driver_version", QUERY_SECONDS)
        if rows is None:
            return Gpus()
        users = nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", QUERY_SECONDS) or []
    except NoAnswer as error:
        raise MachineError(str(error)) from error
    rows = [row for row in rows if len(row) == 6]
    gpus = [
        Gpu(int(index), uuid, name, _number(total) or 0, _number(used) or 0)
        for index, uuid, name, total, used, _ in rows
    ]
    shown = tuple(visible_gpus(gpus))
    uuids = {gpu.uuid for gpu in shown}
    processes = tuple(
        GpuProcess(uuid, _number(pid), ",".join(name), _number(used))
        for uuid, pid, *name, used in (row for row in users if len(row) >= 4)
        if uuid in uuids
    )
    return Gpus(shown, processes, rows[0][5] if rows else None)


def _number(text: str) -> int | None:
    """Return a whole number; None for `[N/A]` and its like."""
    return int(text) if text.isdigit() else None


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that holds `folder` (or its nearest existing parent)."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
