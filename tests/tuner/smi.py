"""An `nvidia-smi` for machines without GPUs."""

from __future__ import annotations

from pathlib import Path

SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) cat "{gpus}" ;;
  --query-compute-apps*) cat "{apps}" ;;
esac
exit {status}
"""


class FakeSmi:
    """An `nvidia-smi` on the PATH that prints what the test wrote."""

    def __init__(self, folder: Path) -> None:
        self.gpus, self.apps, self.program = folder / "gpus", folder / "apps", folder / "nvidia-smi"
        self.set([], [])

    def set(self, gpus: list[tuple[int, int]], apps: list[tuple[int, int]], status: int = 0) -> None:
        """gpus: (index, MiB used). apps: (GPU index, pid)."""
        rows = [f"{index}, GPU-{index}, NVIDIA H200, 143771, {used}, 570.1" for index, used in gpus]
        self.gpus.write_text("".join(row + "\n" for row in rows))
        self.apps.write_text("".join(f"GPU-{index}, {pid}, python3, 9000\n" for index, pid in apps))
        self.program.write_text(SMI.format(gpus=self.gpus, apps=self.apps, status=status))
        self.program.chmod(0o755)
