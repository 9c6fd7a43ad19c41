"""The command line as users meet it: processes, exit statuses, output."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from engine.config import load_launch
from tests.tuner.spaces import PAIR, SMOKE, write
from tests.tuner.test_study import begin
from tests.waiting import alive, wait_until
from tuner.labels import with_interval
from tuner.session import load_outcome
from tuner.space import load_space
from tuner.store import StudyFolder
from tuner.tables import FrontTable

TINY = str(Path(__file__).parent / "tiny_tuner.py")
KIMI = Path(__file__).parents[2] / "search_spaces" / "kimi_k2.6_8gpu.yaml"
LIMIT = 120


def tuner(*words: str, cwd: Path, tiny: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TINY] if tiny else [sys.executable, "-m", "tuner"]
    return subprocess.run(
        [*command, *words], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "100", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a search was run to its end."""
    folder = tmp_path_factory.mktemp("cli")
    done = tuner("search", str(write(folder)), "--trials", "5", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "output.txt").write_text(done.stdout)
    return folder


def test_a_search_says_what_it_does_and_how_to_serve_the_winner(study: Path) -> None:
    said = (study / "output.txt").read_text()
    assert said.startswith("small: 13 of 50 points can run here")
    assert "left out: draft.layers = 3: draft.layers: the drafter has 2 layers, not 3" in said
    assert "trial 0 (baseline): none" in said
    assert "trial 0: load c=8: 13.5 ms/tok, 593 tok/s" in said
    assert "4 of 5 trials done after" in said
    assert "× base" in said
    assert "5 configurations measured" in said
    assert "Report:  results/small/report.html" in said
    assert "-m engine serve results/small/launch.yaml --port 8000" in said
    assert "\x1b" not in said
    files = {path.name for path in (study / "results" / "small").iterdir()}
    assert {"space.yaml", "provenance.json", "events.jsonl", "trials.jsonl", "front.json", "launch.yaml"} <= files


def test_a_second_search_points_to_resume_and_fresh_starts_anew(study: Path, tmp_path: Path) -> None:
    again = tuner("search", str(study / "space.yaml"), cwd=study)
    assert again.returncode == 2
    assert "go on with `tuner resume results/small`" in again.stderr
    assert again.stderr.count("\n") == 1


def test_front(study: Path) -> None:
    shown = tuner("front", "results/small", cwd=study)
    assert shown.returncode == 0
    assert "dflash" in shown.stdout
    entries = json.loads(tuner("front", "results/small", "--json", cwd=study).stdout)
    assert entries == json.loads((study / "results/small/front.json").read_text())


def test_show(study: Path) -> None:
    shown = tuner("show", "results/small", "0", cwd=study)
    assert "Trial 0: baseline, measured: none" in shown.stdout
    assert "memory.max_running" in shown.stdout
    assert "c=1: 10.00 ms a round × 1.00 tokens = 10.00 ms a token" in shown.stdout
    assert json.loads(tuner("show", "results/small", "0", "--json", cwd=study).stdout)["role"] == "baseline"
    absent = tuner("show", "results/small", "99", cwd=study)
    assert absent.returncode == 2
    assert "there is no trial 99; recorded are 0 to" in absent.stderr


def test_pick(study: Path) -> None:
    best = tuner("pick", "results/small", "--load", "1", cwd=study)
    assert best.returncode == 0
    assert "Recommended at 1 requests in flight" in best.stdout
    assert "Why: c=1: " in best.stdout
    assert "Next best: trial " in best.stdout
    assert "Policy by requests in flight" in best.stdout
    unmet = tuner("pick", "results/small", "--slo", "tpot_ms_p50<0.1", cwd=study)
    assert unmet.returncode == 3
    assert "does not meet the limits" in unmet.stdout
    wrong = tuner("pick", "results/small", "--slo", "tpot<1", cwd=study)
    assert wrong.returncode == 2
    assert "did you mean" in wrong.stderr
    point = json.loads(tuner("pick", "results/small", "--load", "1", "--json", cwd=study).stdout)
    assert point["concurrency"] == 1


def test_export(study: Path, tmp_path: Path) -> None:
    printed = tuner("export", "results/small", cwd=study)
    assert yaml.safe_load(printed.stdout)["study"]["name"] == "small"
    path = tmp_path / "launch.yaml"
    written = tuner("export", "results/small", "--load", "1", "-o", str(path), cwd=study)
    assert str(path) in written.stdout
    assert load_launch(path).entries[0].config.draft.kind == "dflash"
    journal = tmp_path / "optuna.journal"
    written = tuner("export", "results/small", "--format", "optuna-journal", "-o", str(journal), cwd=study)
    assert f"optuna-dashboard {journal}" in written.stdout
    assert journal.stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_report_is_written_where_asked(study: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert tuner("report", "results/small", "-o", str(path), cwd=study).returncode == 0
    assert path.read_text().startswith("<!doctype html>")
    assert tuner("report", "results/small", "-o", str(tmp_path / "no" / "page.html"), cwd=study).returncode == 2


def test_resume_of_a_finished_study_launches_nothing(study: Path) -> None:
    before = (study / "results/small/trials.jsonl").read_bytes()
    assert tuner("resume", "results/small", cwd=study).returncode == 0
    assert (study / "results/small/trials.jsonl").read_bytes() == before


def test_dry_run_launches_nothing_and_makes_no_folder(tmp_path: Path) -> None:
    shown = tuner("search", str(write(tmp_path)), "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0
    for words in (
        "Points: 50, of which 13 can run here; 74% pruned statically",
        "never: draft.layers = 3: draft.layers: the drafter has 2 layers, not 3",
        "never: graphs = ",
        "Memory per device",
        "Launches: at most 14, then up to 3 to confirm",
        "Wall time: at most about 2m 30s",
    ):
        assert words in shown.stdout, words
    assert not (tmp_path / "results").exists()


def test_a_dry_run_of_what_cannot_run_names_no_launches(tmp_path: Path) -> None:
    shown = tuner("search", str(KIMI), "--dry-run", "--machine", "H200", cwd=tmp_path)
    assert shown.returncode == 0
    assert "The baseline cannot run here: parallel: needs 8 GPUs, this machine has 1" in shown.stdout
    assert "Launches" not in shown.stdout


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_narrow_terminal_breaks_no_number(study: Path, width: int) -> None:
    space, outcome = load_outcome(StudyFolder(study / "results/small"))
    narrow = Console(width=width, record=True, file=io.StringIO())
    narrow.print(FrontTable(outcome, space))
    shown = narrow.export_text()
    for point in outcome.front:
        for name in ("tpot_ms_p50", "output_tok_s"):
            assert with_interval(point.metrics[name], point.intervals[name]) in shown


def test_a_terminal_of_few_characters_gets_question_marks(study: Path) -> None:
    command = [sys.executable, "-m", "tuner", "front", "results/small"]
    done = subprocess.run(
        command, cwd=study, env=environment() | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"? base" in done.stdout


def test_a_long_study_asks_first(tmp_path: Path) -> None:
    path = write(tmp_path, SMOKE.replace("wall: 150s", "wall: 9h").replace("concurrency:", "window: 10m, concurrency:"))
    asked = tuner("search", str(path), cwd=tmp_path)
    assert asked.returncode == 2
    assert "Wall time: at most about" in asked.stdout
    assert "add --yes" in asked.stderr
    assert tuner("search", str(path), "--yes", "--trials", "1", cwd=tmp_path).returncode == 0


def test_a_bad_space_file_is_exit_2_with_file_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path, SMOKE.replace("goal: min", "goal: mni").replace("seed: 0", "seed: x"))
    bad = tuner("search", str(path), cwd=tmp_path)
    assert bad.returncode == 2
    lines = bad.stderr.splitlines()
    assert [line.startswith(f"{path}:") for line in lines] == [True, True]
    assert "did you mean min?" in lines[1]
    absent = tuner("search", "nowhere.yaml", cwd=tmp_path)
    assert (absent.returncode, absent.stderr) == (2, "nowhere.yaml:1:1: cannot be read: No such file or directory\n")


def test_nothing_feasible_is_exit_3(tmp_path: Path) -> None:
    path = write(tmp_path, SMOKE.replace("max: 2000", "max: 1"))
    done = tuner("search", str(path), "--trials", "2", cwd=tmp_path)
    assert done.returncode == 3
    assert "meets the constraints" in done.stderr
    assert "misses a constraint" in done.stdout
    assert not (tmp_path / "results/small/launch.yaml").exists()


def begun(folder: Path, trials: int) -> Path:
    """Make a study's folder, as `tuner search` does before its first trial, and return it."""
    return begin(folder, trials=trials).folder.path


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_in_order_and_leaves_no_process(tmp_path: Path, signal_: signal.Signals) -> None:
    study = begun(tmp_path, trials=2)
    (study / "misbehave.json").write_text('{"1": "hang"}')
    command = [sys.executable, TINY, "resume", "results/small"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        wait_until((study / "hanging").exists, "the trial hangs", LIMIT)
        wait_until(lambda: (study / "hanging").read_text().isdigit(), "its number", LIMIT)
        running.send_signal(signal_)
        _, errors = running.communicate(timeout=LIMIT)
    assert running.returncode == 130
    assert "Go on with:  tuner resume results/small" in errors
    assert "Traceback" not in errors
    pid = int((study / "hanging").read_text())
    wait_until(lambda: not alive(pid), "the worker is gone", LIMIT)
    (study / "misbehave.json").unlink()
    assert tuner("resume", "results/small", cwd=tmp_path).returncode == 0


def test_two_searches_do_not_share_a_study(tmp_path: Path) -> None:
    study = begun(tmp_path, trials=2)
    (study / "misbehave.json").write_text('{"1": "hang"}')
    command = [sys.executable, TINY, "resume", "results/small"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as running:
        wait_until((study / "hanging").exists, "the trial hangs", LIMIT)
        for words in (("resume", "results/small"), ("search", "space.yaml", "--fresh")):
            refused = tuner(*words, cwd=tmp_path)
            assert refused.returncode == 2
            assert "is running this study" in refused.stderr
        running.send_signal(signal.SIGINT)
        assert running.wait(LIMIT) == 130


def test_schema_is_json_schema_that_the_bundled_space_meets(tmp_path: Path) -> None:
    printed = json.loads(tuner("schema", cwd=tmp_path, tiny=False).stdout)
    assert printed["properties"]["search"]["properties"]["draft.block_size"]
    assert printed["$defs"]["EngineConfig"]["properties"]["memory"]
    assert "entries" in json.loads(tuner("schema", "--launch", cwd=tmp_path, tiny=False).stdout)["properties"]
    assert "draft" in json.loads(tuner("schema", "--config", cwd=tmp_path, tiny=False).stdout)["properties"]


def test_init_writes_a_space_that_loads(tmp_path: Path) -> None:
    words = ("init", "--target", str(PAIR / "target"), "--draft", str(PAIR / "draft"), "-o", "mine.yaml")
    assert tuner(*words, cwd=tmp_path, tiny=False).returncode == 0
    assert load_space(tmp_path / "mine.yaml").file.study.name == "mine"
    again = tuner(*words, cwd=tmp_path, tiny=False)
    assert again.returncode == 2
    assert "--force" in again.stderr
    shown = tuner("search", "mine.yaml", "--dry-run", cwd=tmp_path, tiny=False)
    assert "can run here" in shown.stdout


def test_a_reader_that_leaves_early_is_no_error(study: Path) -> None:
    command = f"{sys.executable} -m tuner schema | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=study,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_one_line_and_exit_2(study: Path) -> None:
    for words in (["schema"], ["front", "results/small"], ["show", "results/small", "0", "--json"]):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "tuner", *words]
            done = subprocess.run(
                command, cwd=study, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert (done.returncode, done.stderr) == (2, "tuner: the output: cannot be written: No space left on device\n")


def test_a_search_whose_reader_leaves_is_interrupted_not_done(tmp_path: Path) -> None:
    command = f"{sys.executable} {TINY} search {write(tmp_path)} --trials 5 | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 130
    assert "Go on with:  tuner resume results/small" in done.stderr
    assert "Traceback" not in done.stderr
    assert tuner("resume", "results/small", cwd=tmp_path).returncode == 0


def test_output_that_is_closed_is_no_traceback(study: Path) -> None:
    command = f"{sys.executable} -m tuner front results/small >&-"
    done = subprocess.run(
        ["bash", "-c", command], cwd=study, env=environment(), stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_out_follows_links_and_replaces_no_device(study: Path, tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file.yaml"
    os.mkfifo(pipe)
    link.symlink_to(file)
    for command in ("export", "report"):
        done = tuner(command, "results/small", "--out", str(pipe), cwd=study)
        assert (done.returncode, done.stderr) == (2, f"tuner: {pipe}: cannot be written: is no plain file\n")
        assert pipe.is_fifo()
        assert tuner(command, "results/small", "--out", str(link), cwd=study).returncode == 0
        assert link.is_symlink()
        assert file.stat().st_size > 0


def test_a_server_that_no_command_starts_is_told_before_anything_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_BACKENDS", str(tmp_path / "backends.yaml"))
    refused = tuner("search", str(KIMI.with_name("bundled_sglang_cpu.yaml")), "--yes", cwd=tmp_path)
    assert refused.returncode == 2
    assert "backend sglang needs a command" in refused.stderr
    assert not (tmp_path / "results").exists()


CTRL_C = """
import sys

class CtrlC:
    def find_spec(self, name, *_):
        if name == "tuner.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from tuner.__main__ import main
main()
"""


def test_ctrl_c_while_the_command_line_is_loaded_leaves_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CTRL_C, "schema"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
