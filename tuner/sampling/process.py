"""The brain in a process of its own: the controller stays small, whatever a sampler loads.

JSON lines on stdin and stdout. To the process: first `Start`, then `Tell`, `Bar` and `Ask`; from it: an `Answer` to
every `Ask` and nothing else. It ends when its stdin does, so it cannot outlive the controller. It knows nothing of
the machine: an answer is an assignment, which the controller turns into a configuration and judges.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from engine.estimate import Machine
from tuner.errors import StudyError
from tuner.records import TrialRecord
from tuner.space import Assignment, Choices, FloatRange, Infeasible, Refusals, Space, parse_space
from tuner.suggest import Suggestion

if TYPE_CHECKING:  # the controller's side loads no optimiser
    from tuner.brain import Brain

COMMAND = (sys.executable, "-m", "tuner.sampling.process")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
STOP_SECONDS = 10.0
PriorState = Literal["none", "believed", "dropped"]
CAREFUL = 2000  # impossible points refused in a row before a space counts as exhausted


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Start(_Message):
    """What is searched and by whom. `left` are the values of each domain that static pruning left, by path."""

    kind: Literal["start"] = "start"
    text: str
    source: str
    seed: int
    sampler: str
    startup: int | None = None
    left: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    machine: Machine | None = Field(None, description="The prior's; null is without one.")


class Tell(_Message):
    """A record to learn from."""

    kind: Literal["tell"] = "tell"
    record: TrialRecord


class Bar(_Message):
    """A point that cannot run here and must not be suggested."""

    kind: Literal["bar"] = "bar"
    assignment: dict[str, Any]


class Ask(_Message):
    """A question: the point for this trial number."""

    kind: Literal["ask"] = "ask"
    number: int
    careful: bool = False


class Answer(_Message):
    """The point; `assignment` is None when every point has been tried. `gain`: see `Suggestion`; `prior`: what has
    become of the first guess."""

    assignment: dict[str, Any] | None
    repeat: int | None = None
    gain: float | None = None
    prior: PriorState = "none"


Message = Annotated[Start | Tell | Bar | Ask, Field(discriminator="kind")]
MESSAGE: TypeAdapter[Start | Tell | Bar | Ask] = TypeAdapter(Message)


class RemoteBrain:
    """A Brain elsewhere, with the same `tell` and `ask`; use as a context."""

    def __init__(
        self,
        space: Space,
        refusals: Refusals,
        startup: int | None = None,
        *,
        sampler: str = "surrogate",
        machine: Machine | None = None,
        impossible: Sequence[Assignment] = (),
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`space` may be narrowed by static pruning; `sampler` is a kind of tuner.sampling.SAMPLERS; `machine` gives a
        prior where its speed is known; `impossible` are points that cannot run, which it never suggests."""
        self.prior: PriorState = "none"
        self._space = space
        self._refusals = refusals
        self._impossible = list(impossible)
        left = {d.path: tuple(d.values) for d in space.domains if not isinstance(d, FloatRange)}
        self._start = Start(
            text=space.text,
            source=space.source,
            seed=space.file.study.seed,
            sampler=sampler,
            startup=startup,
            left=left,
            machine=machine,
        )
        self._command = tuple(command)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | THREADS,
            start_new_session=True,  # Ctrl-C is the controller's to handle
        )
        self._send(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with process:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # it has died with a message unread
                    process.stdin.close()
            process.terminate()  # it holds nothing that is not in the study, and may still be loading what it needs
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def tell(self, record: TrialRecord) -> None:
        """Learn from a record."""
        self._send(Tell(record=record))

    def ask(self, number: int, *, careful: bool = False) -> Suggestion | None:
        """Return the point for trial `number`; None when every point that can run has been tried.

        Raises:
            StudyError: the process ended.
        """
        while self._impossible:  # not before the first question: the process starts while the baseline runs
            self._send(Bar(assignment=self._impossible.pop()))
        for _ in range(CAREFUL):
            self._send(Ask(number=number, careful=careful))
            answer = self._answer()
            self.prior = answer.prior
            if answer.assignment is None:
                return None
            judged = self._space.judge(answer.assignment, self._refusals)
            if not (careful and isinstance(judged, Infeasible)):
                return Suggestion(answer.assignment, judged, answer.repeat, answer.gain)
            self._send(Bar(assignment=answer.assignment))
        return None

    def _process_or_fail(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise StudyError("the sampler's process is not running; use RemoteBrain as a context")
        return self._process

    def _send(self, message: Start | Tell | Bar | Ask) -> None:
        stdin = self._process_or_fail().stdin
        try:
            if stdin is not None:
                stdin.write(message.model_dump_json() + "\n")
                stdin.flush()
        except OSError as error:
            raise StudyError(f"the sampler's process ended: {error.strerror or error}; resume the study") from error

    def _answer(self) -> Answer:
        process = self._process_or_fail()
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise StudyError(f"the sampler's process ended with status {process.wait()}; resume the study")
        return Answer.model_validate_json(line)


def narrowed(space: Space, left: Mapping[str, Sequence[Any]]) -> Space:
    """Return the space with these values of each domain left, as static pruning does."""
    domains = []
    for domain in space.domains:
        values = left.get(domain.path)
        if values is None or isinstance(domain, FloatRange):
            domains.append(domain)
        elif isinstance(domain, Choices):
            domains.append(replace(domain, values=tuple(values)))
        else:
            domains.append(replace(domain, low=min(values), high=max(values)))
    return replace(space, domains=tuple(domains))


def serve() -> int:
    """Answer on stdout what is asked on stdin, until it ends."""
    brain: Brain | None = None
    for line in sys.stdin:
        message = MESSAGE.validate_json(line)
        if isinstance(message, Start):
            brain = _begin(message)
        elif brain is None:
            raise StudyError("the first message to the sampler's process must be `start`")
        elif isinstance(message, Tell):
            brain.tell(message.record)
        elif isinstance(message, Bar):
            brain.bar(message.assignment)
        else:
            print(_reply(brain, message).model_dump_json(), flush=True)
    return 0


def _begin(start: Start) -> Brain:
    from tuner.brain import Brain
    from tuner.prior import guessed
    from tuner.sampling import SAMPLERS, Pool
    from tuner.simulate import seeded

    space = narrowed(seeded(parse_space(start.text.encode(), start.source), start.seed), start.left)
    pool = guessed(Pool.of(space), start.machine) if start.machine is not None else None
    return Brain(space, lambda _: (), start.startup, sampler=SAMPLERS[start.sampler], pool=pool)


def _reply(brain: Brain, ask: Ask) -> Answer:
    from tuner.stop_rule import outlook

    expected = outlook(brain.view(ask.number), brain.sampler)
    gain = expected.gain if expected is not None and math.isfinite(expected.gain) else None
    found = brain.ask(ask.number, careful=ask.careful)
    prior = brain.prior(ask.number)
    if found is None:
        return Answer(assignment=None, gain=gain, prior=prior)
    return Answer(assignment=found.assignment, repeat=found.repeat, gain=gain, prior=prior)


def main() -> int:
    """Serve; when the controller is gone, end without a word, for nobody is left to read it."""
    try:
        return serve()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes there at exit
        return 0


if __name__ == "__main__":
    sys.exit(main())
