from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner import provenance
from tuner.provenance import REDACTED, collect, git_state, is_secret, redact, redact_argv


def test_collects_what_a_result_rests_on() -> None:
    found = collect(["tuner", "search", "x.yaml"], 7, {"CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "hf_abc", "HOME": "/h"})
    assert json.loads(json.dumps(found)) == found
    assert found["seed"] == 7
    assert found["argv"] == ["tuner", "search", "x.yaml"]
    assert found["versions"]["torch"]
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_bytes"] > 2**28
    assert found["environment"] == {"CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": REDACTED}
    assert set(found["identity"]) == {"engine", "torch", "gpus", "driver", "cpu"}
    assert "hf_abc" not in json.dumps(found)


def test_the_commit_and_whether_it_is_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    state = git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {**state, "dirty": True}


@pytest.mark.parametrize("name", ["HF_TOKEN", "--api-key", "admin_key", "password", "AWS_SECRET_ACCESS", "--token"])
def test_secrets_are_known_by_their_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "output_tokens", "--max-total-tokens", "kv_tokens", "--tokenizer", "model"]
)
def test_counts_of_tokens_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


@given(st.text(alphabet="abcdef0123456789", min_size=8, max_size=20))
def test_no_secret_survives(secret: str) -> None:
    argv = ["tuner", "--api-key", secret, f"--token={secret}", f"https://user:{secret}@host/x", "--seed", "3"]
    document = {"env": {"HF_TOKEN": secret}, "list": [{"password": secret}], "url": f"http://{secret}@h/", "n": 3}
    assert secret not in json.dumps(redact_argv(argv))
    assert secret not in json.dumps(redact(document))
    assert redact_argv(argv)[-2:] == ["--seed", "3"]
    assert redact(document)["n"] == 3


def test_no_gpu_tool_is_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise provenance.MachineError("nvidia-smi failed: x")

    monkeypatch.setattr(provenance, "look_at_gpus", broken)
    assert collect([], 0, {})["machine"]["gpu_trouble"] == "nvidia-smi failed: x"
