"""What a fault is, and how one gets into live code and out of it again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any

VARIABLE = "ENGINE_FAULT"  # names the fault to the engine process


class Setting(StrEnum):
    """`draft.kind` of a server that runs the faulty code; `policy` where an entry of such a kind is in force."""

    NONE = "none"
    DFLASH = "dflash"
    DDTREE = "ddtree"
    POLICY = "policy"


EVERY = (Setting.NONE, Setting.DFLASH, Setting.DDTREE, Setting.POLICY)
DRAFTED = (Setting.DFLASH, Setting.DDTREE, Setting.POLICY)
CHAIN = (Setting.DFLASH, Setting.POLICY)
TREE = (Setting.DDTREE, Setting.POLICY)


class Need(StrEnum):
    """What a workload must have for the fault to show. None of these: the greedy text of a short prompt shows it."""

    SAMPLED = "temperature above 0"
    TOP_K = "top_k"
    TOP_P = "top_p below 1"
    SEED = "the same seed twice"
    DRAWN_DRAFTS = "draft.sample: probabilistic"
    FLOAT32 = "float32 (in bfloat16 a tie, and right)"
    BATCH = "several requests at once"
    RAGGED = "prompts of different lengths at once"
    RETIRED = "a request ends while two others run"
    CANCELLED = "a request is cancelled, or ends by a stop string, while another runs and a third comes"
    FALLING_LOAD = "a request that has run without speculation gets it back"
    LONG = "a context of hundreds of tokens"
    PAGE = "more tokens than a KV page"
    CHUNKED = "a prompt longer than memory.prefill_chunk"
    EOS = "an eos token before a round's last token"
    STOP = "a stop string"
    LOGPROBS = "logprobs"
    LENGTH = "max_tokens that is not a round's end"


class Shows(StrEnum):
    """How the fault shows."""

    TEXT = "text differs"
    DISTRIBUTION = "sampled distribution differs"
    ACCEPTANCE = "acceptance only"
    ANSWER = "usage, logprobs or stop wrong"


@dataclass
class Patches:
    """Functions of live code that have been replaced, and how to put them back."""

    _undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __call__(self, where: str) -> Callable[[Callable[..., Any]], None]:
        """Return a decorator that puts its function in place of `where`, "module:Class.method" or "module:function".

        The function gets the original before the call's own arguments.
        """
        module, _, path = where.partition(":")
        *outer, name = path.split(".")
        owner = functools.reduce(getattr, outer, import_module(module))

        def install(function: Callable[..., Any]) -> None:
            original = getattr(owner, name)

            @functools.wraps(function)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs)

            self._undo.append((owner, name, vars(owner)[name]))  # a class method as its class holds it
            setattr(owner, name, replacement)

        return install

    def undo(self) -> None:
        """Put the originals back."""
        while self._undo:
            setattr(*self._undo.pop())


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        wrong: what is wrong, one line.
        settings: where it can show.
        shows: how it shows there.
        needs: all that a workload must have.
        front: the mistake is in the HTTP front's process, not in the engine's.
        patch: puts it into live code.
    """

    name: str
    wrong: str
    settings: tuple[Setting, ...]
    shows: Shows
    needs: tuple[Need, ...]
    front: bool
    patch: Callable[[Patches], None]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make the mistake in this process's code until the block ends; what is built in it keeps nothing of it."""
        patches = Patches()
        try:
            self.patch(patches)
            yield
        finally:
            patches.undo()


def fault(
    wrong: str, settings: tuple[Setting, ...], shows: Shows, needs: tuple[Need, ...] = (), front: bool = False
) -> Callable[[Callable[[Patches], None]], Fault]:
    """Return a decorator that makes a patch function a `Fault` of its name."""

    def make(patch: Callable[[Patches], None]) -> Fault:
        return Fault(patch.__name__, wrong, settings, shows, needs, front, patch)

    return make
