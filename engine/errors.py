"""The engine's exceptions: one tree, each with the exit code of its cause.

EngineError
├── ConfigError          2   the config is invalid, or asks for what this engine or machine cannot do
│   └── NotYet           2   a valid config whose capability this version does not have
├── ModelError           3   model files are missing, truncated, of the wrong shape or of another family
├── OutOfMemory          4   weights, KV cache or a step do not fit
│   ├── OutOfMemoryInCapture   a CUDA graph's tensors do not fit
│   └── OutOfMemoryInTraffic   a step's tensors do not fit
├── GraphCaptureError    5   a CUDA graph could not be captured
├── KernelError         70   a GPU kernel does not compile or run on this device
└── PortError            6   the address is taken or not ours to bind
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit status of `python -m engine`."""

    OK = 0
    CONFIG = 2
    MODEL = 3
    MEMORY = 4
    GRAPH = 5
    PORT = 6
    INTERNAL = 70


class EngineError(Exception):
    """A problem with a known cause; its message is one line that says what to do."""

    exit = Exit.INTERNAL
    kind = "crashed"


class ConfigError(EngineError):
    """The config is invalid."""

    exit = Exit.CONFIG
    kind = "config"


class NotYet(ConfigError):
    """The config is valid, but this version of the engine cannot run it."""


class ModelError(EngineError):
    """Model files cannot be used."""

    exit = Exit.MODEL
    kind = "missing_file"


class UnsupportedModel(ModelError):
    """The model's family or feature is not implemented."""

    kind = "unsupported_model"


class OutOfMemory(EngineError):
    """Weights, KV cache or a step do not fit into memory."""

    exit = Exit.MEMORY
    kind = "oom_start"


class OutOfMemoryInCapture(OutOfMemory):
    """A CUDA graph's tensors do not fit beside weights and cache."""

    kind = "oom_capture"


class OutOfMemoryInTraffic(OutOfMemory):
    """A step's tensors do not fit beside weights and cache."""

    kind = "oom_load"


class GraphCaptureError(EngineError):
    """A CUDA graph could not be captured."""

    exit = Exit.GRAPH
    kind = "graph_capture"


class KernelError(EngineError):
    """A GPU kernel does not compile, or asks for more than this device has."""

    kind = "kernel_compile"


class PortError(EngineError):
    """The address cannot be bound."""

    exit = Exit.PORT
    kind = "port"


def is_full(error: Exception) -> bool:
    """Whether an error means that memory ran out: torch's own, or what the driver and the libraries say for it."""
    said = str(error).lower()
    full = ("out of memory", "alloc_failed", "can't allocate memory")  # torch, driver, Triton; cuBLAS; torch on a CPU
    return isinstance(error, MemoryError) or any(words in said for words in full)
