"""Where a result comes from: versions, commit, machine, command line and seed, with secrets taken out."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.estimate import cpu_name, host_memory, usable_cores
from tuner.machine import MachineError, look_at_gpus

SCHEMA = 1
REDACTED = "[redacted]"
GIT_SECONDS = 10.0
PACKAGES = ("dflash-tuner", "torch", "optuna", "pydantic", "numpy", "tokenizers", "safetensors", "triton")
_ENVIRONMENT = re.compile(r"^(CUDA_|NCCL_|OMP_|MKL_|TORCH|PYTORCH_|TRITON_|SGLANG_|VLLM_|TUNER_|HF_)")
_SECRET = re.compile(r"token(?!i[sz])|key|secret|password|passwd|credential", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_COUNTS = re.compile(r"(max|kv|output|prompt|num|batch|prefill|speculative)[\w.-]*tokens$", re.IGNORECASE)


def collect(argv: Sequence[str], seed: int, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the provenance of a study that starts now, as JSON.

    `identity` holds what must be equal for results to be comparable: a study is resumed only where it is.
    """
    gpus: list[dict[str, Any]] = []
    driver = trouble = None
    try:
        look = look_at_gpus()
        gpus = [{"index": g.index, "name": g.name, "memory_mib": g.memory_total} for g in look.gpus]
        driver = look.driver
    except MachineError as error:
        trouble = str(error)
    versions = {name: version for name in PACKAGES if (version := package_version(name)) is not None}
    machine = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": host_memory(),
        "gpus": gpus,
        "driver": driver,
        "gpu_trouble": trouble,
        "platform": platform.platform(),
    }
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "argv": redact_argv(argv),
        "seed": seed,
        "python": platform.python_version(),
        "versions": versions,
        "git": git_state(Path(__file__).resolve().parent),
        "machine": machine,
        "environment": redact({k: v for k, v in sorted(environ.items()) if _ENVIRONMENT.match(k)}),
        "identity": {
            "engine": versions.get("dflash-tuner"),
            "torch": versions.get("torch"),
            "gpus": [gpu["name"] for gpu in gpus],
            "driver": driver,
            "cpu": machine["cpu"],
        },
    }


def package_version(name: str) -> str | None:
    """Return an installed distribution's version without importing it, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return {commit, dirty} of the checkout that holds `folder`; None outside of one, or without git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "dirty": bool(changed.strip())}


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words],  # noqa: S607  # the user's git, wherever it is
        capture_output=True,
        text=True,
        timeout=GIT_SECONDS,
        check=True,
    ).stdout


def is_secret(name: str) -> bool:
    """Tell whether a key or flag names a secret. `max_tokens` and its like count tokens and are none."""
    return bool(_SECRET.search(name)) and not _COUNTS.search(name)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return the arguments with the values of secret flags, and logins in URLs, taken out."""
    clean: list[str] = []
    hide = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            clean.append(REDACTED)
            hide = False
            continue
        secret = word.startswith("-") and is_secret(name)
        clean.append(f"{name}={REDACTED}" if secret and equals else _URL_LOGIN.sub(f"{REDACTED}@", word))
        hide = secret and not equals
    return clean


def redact(document: Any) -> Any:
    """Return a JSON document with the values of secret keys, and logins in URLs, taken out."""
    if isinstance(document, Mapping):
        return {
            key: REDACTED if is_secret(str(key)) and isinstance(value, str | bytes) and value else redact(value)
            for key, value in document.items()
        }
    if isinstance(document, list | tuple):
        return [redact(value) for value in document]
    if isinstance(document, str):
        return _URL_LOGIN.sub(f"{REDACTED}@", document)
    return document
