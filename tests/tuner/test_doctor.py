from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from engine.estimate import cpu_machine, gpu
from tuner import doctor


def table(results: Path) -> tuple[int, str]:
    out = io.StringIO()
    status = doctor.run(Console(file=out, width=1000, color_system=None), results)
    return status, out.getvalue()


def test_a_machine_that_can_run_trials(tmp_path: Path) -> None:
    status, text = table(tmp_path)
    assert status == 0
    for what in ("python", "torch", "processor", "GPUs", "leases", "backends", "ports", "disk", "supervision"):
        assert what in text
    assert "nothing outlives the tuner" in text
    assert "bad" not in text


def test_a_full_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda _: 1000)
    status, text = table(tmp_path)
    assert status == 2
    assert "256 MiB are needed" in text


def test_an_unsafe_lease_folder_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_LEASES", str(tmp_path / "leases"))
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases").chmod(0o777)
    status, text = table(tmp_path)
    assert status == 2
    assert "not a folder of yours alone" in text


def test_the_backends_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "backends.yaml"
    monkeypatch.setenv("TUNER_BACKENDS", str(path))
    assert "native only" in table(tmp_path)[1]
    path.write_text('sglang: {"0.5.17": {command: [bash, "[serve].sh"]}, "0.5.23": {command: [no-such-program]}}')
    path.chmod(0o600)
    monkeypatch.setattr(doctor, "detect_machine", lambda: cpu_machine())
    text = table(tmp_path)[1]
    assert "sglang 0.5.17: runs none, not dflash, ddtree, policies, captured graphs" in text
    assert "sglang 0.5.23: its command no-such-program is not found" in text
    monkeypatch.setattr(doctor, "detect_machine", lambda: gpu("H200"))
    assert "sglang 0.5.17: runs none, dflash, captured graphs, not ddtree, policies" in table(tmp_path)[1]
    path.write_text('vllm: {"0.33.0": {command: [bash]}}\nother: {"1": {command: [bash]}}')
    monkeypatch.setattr(doctor, "detect_machine", lambda: cpu_machine())
    text = table(tmp_path)[1]
    assert "vllm 0.33.0: nothing here: backend.kind" in text
    assert "other 1: unknown backend; known: native, sglang, vllm" in text
    path.write_text("sglang: 3")
    status, text = table(tmp_path)
    assert status == 2
    assert "backends.yaml: sglang" in text


def test_weaker_supervision_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "descendants", lambda _: [])
    status, text = table(tmp_path)
    assert status == 0
    assert "weaker here" in text
