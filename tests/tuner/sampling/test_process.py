"""The brain in its own process suggests what the brain here would, and leaves with its controller."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from engine.config import EngineConfig
from tests.tuner.make import measure
from tests.tuner.spaces import SPACE
from tuner.brain import Brain
from tuner.errors import StudyError
from tuner.records import TrialRecord, config_dict
from tuner.sampling.process import COMMAND, Ask, RemoteBrain, Start
from tuner.space import Infeasible, parse_space

WIDE = SPACE.replace("choices: [4, 8]", "choices: [2, 4, 6, 8, 10, 12, 14, 16]").replace(
    "  graphs: {choices: [{kind: eager}, {kind: captured, batch_sizes: [1, 4]}]}\n", ""
)


def nothing(config: EngineConfig) -> tuple[str, ...]:
    return ()


def answered(config: EngineConfig, number: int) -> TrialRecord:
    levels = tuple(measure(config, level) for level in (1, 4, 8))
    role = "search" if number else "baseline"
    return TrialRecord(trial=number, role=role, state="measured", config=config_dict(config), levels=levels)


@pytest.mark.parametrize("sampler", ["surrogate", "tpe"])
def test_there_and_here_suggest_the_same(sampler: str) -> None:
    from tuner.sampling import SAMPLERS

    space = parse_space(WIDE.encode())
    here = Brain(space, nothing, 4, sampler=SAMPLERS[sampler])
    found = space.baseline(nothing)
    assert not isinstance(found, Infeasible)
    with RemoteBrain(space, nothing, 4, sampler=sampler) as there:
        config = found[0]
        for number in range(8):
            record = answered(config, number)
            here.tell(record)
            there.tell(record)
            one, other = here.ask(number + 1), there.ask(number + 1)
            assert one is not None
            assert one == other
            assert isinstance(one.judged, EngineConfig)
            config = one.judged


def test_careful_points_can_run_and_an_exhausted_space_says_so() -> None:
    space = parse_space(WIDE.encode())

    def only_none(config: EngineConfig) -> tuple[str, ...]:
        return () if config.draft.kind == "none" else ("no drafter here",)

    with RemoteBrain(space, only_none, 4) as there:
        found = there.ask(1, careful=True)
        assert found is not None
        assert isinstance(found.judged, EngineConfig)
        there.tell(answered(found.judged, 1))
        assert there.ask(2, careful=True) is None


@pytest.mark.parametrize("sampler", ["surrogate", "tpe"])
def test_impossible_points_are_not_suggested(sampler: str) -> None:
    space = parse_space(WIDE.encode())

    def small(config: EngineConfig) -> tuple[str, ...]:
        return () if getattr(config.draft, "block_size", 2) == 2 else ("too large",)

    impossible = [point for point in space.points() if isinstance(space.judge(point, small), Infeasible)]
    with RemoteBrain(space, small, 2, sampler=sampler, impossible=impossible) as there:
        number = 0
        while (found := there.ask(number)) is not None:
            assert isinstance(found.judged, EngineConfig)
            there.tell(answered(found.judged, number))
            number += 1
    assert number == len(list(space.points())) - len(impossible)


def test_a_dead_process_is_a_study_error_that_says_what_to_do() -> None:
    space = parse_space(WIDE.encode())
    dead = RemoteBrain(space, nothing, command=(sys.executable, "-c", "raise SystemExit(3)"))
    with dead as there, pytest.raises(StudyError, match="resume the study"):
        there.ask(1)
    with pytest.raises(StudyError, match="not running"):
        there.ask(1)


def test_the_process_leaves_when_its_controller_is_killed() -> None:
    code = (
        "import sys\nfrom tests.tuner.sampling.test_process import WIDE, nothing\n"
        "from tuner.sampling.process import RemoteBrain\nfrom tuner.space import parse_space\n"
        "with RemoteBrain(parse_space(WIDE.encode()), nothing) as there:\n"
        "    there.ask(1)\n    print(there._process.pid, flush=True)\n    sys.stdin.read()\n"
    )
    controller = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with controller:
        assert controller.stdout is not None
        child = psutil.Process(int(controller.stdout.readline()))
        controller.kill()
        psutil.wait_procs([child], timeout=60)
        assert not child.is_running()


def test_nobody_left_to_answer_is_no_error() -> None:
    """A controller killed after a question: the answer has no reader, and the process ends without a traceback."""
    start = Start(text=WIDE, source="wide.yaml", seed=0, sampler="random")
    questions = f"{start.model_dump_json()}\n{Ask(number=1).model_dump_json()}\n"
    read, write = os.pipe()
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    os.close(read)
    _, errors = process.communicate(questions.encode(), timeout=60)
    assert (process.returncode, errors) == (0, b"")


def test_the_controllers_side_loads_no_optimiser() -> None:
    code = "import sys, tuner.sampling.process; assert not {'torch', 'optuna'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
