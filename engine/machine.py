"""What the machine offers: devices, memory, bandwidth, arithmetic. No torch.

Bandwidth and FLOP/s come from the vendors' datasheets (dense bfloat16, float32 accumulation); `measure_cpu`
measures both on a CPU, where no datasheet says what the machine at hand was built with.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import psutil

from engine.errors import ConfigError, EngineError

GIB = 2**30
MIB = 2**20
NVIDIA_SMI_SECONDS = 20.0


@dataclass(frozen=True)
class Machine:
    """One host, or the part of it that a server may use.

    `memory` is bytes per device (the host's for a CPU), `bandwidth` bytes/s and `flops` bfloat16 FLOP/s of
    one device, None where nobody has said or measured. `cores` are the CPU cores this process may use.
    `bfloat16`: whether bfloat16 products run at speed, else `dtype: auto` means float32. `note` says what
    detection could not find out.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    memory: int
    bandwidth: float | None
    flops: float | None
    devices: int = 1
    cores: int = 1
    source: Literal["datasheet", "measured", "unknown"] = "datasheet"
    bfloat16: bool = True
    note: str | None = None


# (part of the device's name, bytes, bytes/s, dense bfloat16 FLOP/s); the first match counts, so the more
# specific names come first.
_GPUS: tuple[tuple[str, float, float, float], ...] = (
    ("MI355X", 288e9, 8.0e12, 2516e12),
    ("MI325X", 256e9, 6.0e12, 1307e12),
    ("MI300X", 192e9, 5.3e12, 1307e12),
    ("GB200", 186e9, 8.0e12, 2500e12),
    ("B300", 270e9, 8.0e12, 2250e12),
    ("B200", 180e9, 8.0e12, 2250e12),
    ("GH200", 96e9, 4.0e12, 989e12),
    ("H200 NVL", 141e9, 4.8e12, 836e12),
    ("H200", 141e9, 4.8e12, 989e12),
    ("H100 NVL", 94e9, 3.9e12, 836e12),
    ("H100 PCIe", 80e9, 2.0e12, 756e12),
    ("H100", 80e9, 3.35e12, 989e12),
    ("H800", 80e9, 3.35e12, 989e12),
    ("H20", 96e9, 4.0e12, 148e12),
    ("A100-SXM4-40GB", 40e9, 1.555e12, 312e12),
    ("A100-PCIE-40GB", 40e9, 1.555e12, 312e12),
    ("A100 80GB PCIe", 80e9, 1.935e12, 312e12),
    ("A100", 80e9, 2.039e12, 312e12),
    ("A800", 80e9, 2.039e12, 312e12),
    ("L40S", 48e9, 864e9, 362e12),
    ("L40", 48e9, 864e9, 181e12),
    ("L20", 48e9, 864e9, 119.5e12),
    ("L4", 24e9, 300e9, 121e12),
    ("A10G", 24e9, 600e9, 70e12),
    ("A10", 24e9, 600e9, 125e12),
    ("A40", 48e9, 696e9, 149.7e12),
    ("RTX PRO 6000", 96e9, 1.792e12, 500e12),
    ("RTX 6000 Ada", 48e9, 960e9, 364e12),
    ("RTX A6000", 48e9, 768e9, 154.8e12),
    ("RTX 5090", 32e9, 1.792e12, 209.5e12),
    ("RTX 5080", 16e9, 960e9, 112.6e12),
    ("RTX 4090", 24e9, 1.008e12, 165.2e12),
    ("RTX 4080", 16e9, 716.8e9, 97.5e12),
    ("RTX 3090", 24e9, 936e9, 71e12),
)
GPU_NAMES = tuple(row[0] for row in _GPUS)


def _row(name: str) -> tuple[str, float, float, float] | None:
    words = f" {name.lower()} "
    if "laptop" in words:  # sold under the desktop card's name, with other figures
        return None
    return next((row for row in _GPUS if _has_words(words, row[0].lower())), None)


def _has_words(text: str, words: str) -> bool:
    """Whether `words` stand in `text` on word boundaries: L4 is not L40."""
    start = text.find(words)
    while start >= 0:
        before, after = text[start - 1 : start], text[start + len(words) : start + len(words) + 1]
        if not before.isalnum() and not after.isalnum():
            return True
        start = text.find(words, start + 1)
    return False


def gpu(name: str, devices: int = 1) -> Machine:
    """Return a machine of `devices` GPUs by name, from the datasheet: to plan for hardware that is elsewhere.

    Raises:
        ConfigError: no such GPU in the table.
    """
    row = _row(name)
    if row is None:
        raise ConfigError(f"GPU {name!r} is not in the table; known: {', '.join(GPU_NAMES)}")
    label, memory, bandwidth, flops = row
    return Machine(label, "cuda", int(memory), bandwidth, flops, devices, os.cpu_count() or 1)


def usable_cores() -> int:
    """Return how many CPU cores this process may use: affinity and the container's quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        cores = os.cpu_count() or 1
    quota = _first_words(Path("/sys/fs/cgroup/cpu.max"))
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def host_memory() -> int:
    """Return the bytes of memory this process may use: the host's, or the container's limit."""
    total: int = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        words = _first_words(Path(path))
        if words and words[0].isdigit() and int(words[0]) > 0:
            total = min(total, int(words[0]))
    return total


def _first_words(path: Path) -> list[str]:
    """Return the words of a small system file, none where the system has no such file."""
    if not path.is_file():
        return []
    return path.read_text(encoding="ascii", errors="replace").split()


def cpu_name() -> str:
    """Return the CPU's model name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU has what fast bfloat16 products need: AVX-512 on x86, the bf16 feature on Arm.

    False where the system does not say (macOS): float32 is the safe choice there.
    """
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return False
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return {"avx512bw", "avx512vl", "avx512dq"} <= flags or "bf16" in flags
    return False


def cpu_machine(note: str | None = None) -> Machine:
    """Return this host as a CPU machine; bandwidth and FLOP/s are unknown until `measure_cpu`."""
    return Machine(
        name=cpu_name(),
        kind="cpu",
        memory=host_memory(),
        bandwidth=None,
        flops=None,
        cores=usable_cores(),
        source="unknown",
        bfloat16=cpu_has_bfloat16(),
        note=note,
    )


@dataclass(frozen=True)
class _Gpu:
    index: str
    uuid: str
    name: str
    memory: int


class Listed(Protocol):
    """A GPU as nvidia-smi lists it."""

    @property
    def index(self) -> int | str: ...

    @property
    def uuid(self) -> str: ...


AnyGpu = TypeVar("AnyGpu", bound=Listed)


def visible_gpus(gpus: Sequence[AnyGpu], environ: Mapping[str, str] = os.environ) -> list[AnyGpu]:
    """Keep what CUDA_VISIBLE_DEVICES leaves, in its order; an unknown entry ends the list, as in CUDA."""
    asked = environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return list(gpus)
    kept: list[AnyGpu] = []
    for word in (part.strip() for part in asked.split(",")):
        match = [g for g in gpus if word and (str(g.index) == word or g.uuid.startswith(word))]
        if not match:
            break
        kept.append(match[0])
    return kept


class NoAnswer(EngineError):
    """nvidia-smi is there and does not answer."""


def nvidia_smi(query: str, seconds: float = NVIDIA_SMI_SECONDS) -> list[list[str]] | None:
    """Return the cells of `nvidia-smi QUERY` by row; None on a machine without nvidia-smi.

    Raises:
        NoAnswer: it fails, or does not answer in time.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    argv = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"nvidia-smi did not answer in {seconds:.0f} s: a GPU or the driver hangs") from error
    except OSError as error:
        raise NoAnswer(f"nvidia-smi could not be run: {error}") from error
    if done.returncode:
        words = " ".join((done.stdout + done.stderr).split())
        if "no devices were found" in words.lower():
            return []
        raise NoAnswer(f"nvidia-smi failed ({done.returncode}): {words[:200]}")
    rows = csv.reader(io.StringIO(done.stdout), skipinitialspace=True)
    return [[cell.strip() for cell in row] for row in rows]


def _query_gpus() -> tuple[list[_Gpu], str | None]:
    """Return the GPUs that nvidia-smi lists, and why there are none when it exists but fails."""
    try:
        rows = nvidia_smi("--query-gpu=index,uuid,name,memory.total")
    except NoAnswer as error:
        return [], str(error)
    found = [row for row in rows or [] if len(row) == 4 and row[3].isdigit()]
    return [_Gpu(index, uuid, name, int(memory) * MIB) for index, uuid, name, memory in found], None


def detect_machine(kind: Literal["auto", "cpu", "cuda"] = "auto", environ: Mapping[str, str] = os.environ) -> Machine:
    """Return what this process may use: the visible NVIDIA GPUs (smallest of them counts), else the CPU.

    Raises:
        ConfigError: `kind` is cuda and no GPU is visible.
    """
    if kind == "cpu":
        return cpu_machine()
    listed, trouble = _query_gpus()
    gpus = visible_gpus(listed, environ)
    if not gpus:
        if kind == "cuda":
            raise ConfigError(f"no visible NVIDIA GPU ({trouble or 'see nvidia-smi and CUDA_VISIBLE_DEVICES'})")
        return cpu_machine(trouble)
    return gpu_machine([(g.name, g.memory) for g in gpus])


def gpu_machine(gpus: list[tuple[str, int]]) -> Machine:
    """Return the machine of these (name, memory bytes) devices; a mixed set counts as its smallest device."""
    rows = [_row(name) for name, _ in gpus]
    known = [row for row in rows if row is not None]
    complete = len(known) == len(gpus)
    unknown = sorted({name for (name, _), row in zip(gpus, rows, strict=True) if row is None})
    return Machine(
        name=gpus[0][0],
        kind="cuda",
        memory=min(memory for _, memory in gpus),
        bandwidth=min(row[2] for row in known) if complete else None,
        flops=min(row[3] for row in known) if complete else None,
        devices=len(gpus),
        cores=usable_cores(),
        source="datasheet" if complete else "unknown",
        note=None if complete else f"no datasheet figures for {', '.join(unknown)}: no roofline",
    )


def measure_cpu(machine: Machine, seconds: float = 0.2) -> Machine:
    """Measure a CPU's read bandwidth and float32 matrix product in about `seconds`, with numpy.

    float32, because numpy has no bfloat16: on a CPU with bfloat16 units the compute roof is higher than this.
    """
    import numpy as np  # only here: everything else in this module must stay cheap to import

    vector = np.ones(16 * MIB, dtype=np.float32)
    other = np.ones_like(vector)
    matrix = np.ones((768, 768), dtype=np.float32)
    read = _best_seconds(lambda: np.dot(vector, other), seconds / 2)
    product = _best_seconds(lambda: matrix @ matrix, seconds / 2)
    return dataclasses.replace(
        machine,
        bandwidth=(vector.nbytes + other.nbytes) / read,
        flops=2 * 768**3 / product,
        source="measured",
    )


def _best_seconds(work: Callable[[], object], budget: float) -> float:
    best, end = float("inf"), time.perf_counter() + budget
    while True:
        start = time.perf_counter()
        work()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best
