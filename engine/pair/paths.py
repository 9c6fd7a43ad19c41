"""Where the bundled pair's files lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent
TARGET = ROOT / "target"
DRAFT = ROOT / "draft"
WORKLOAD = ROOT / "workload.jsonl"
TRAINING = ROOT / "training.json"
