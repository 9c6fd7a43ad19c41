"""Seeded mutations of search-space files, for the property that none of them ends in a traceback."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from engine.estimate import cpu_machine
from tuner.dryrun import view
from tuner.errors import SpaceError
from tuner.feasible import StaticChecks, prune
from tuner.space import Space, parse_space

SPACES = sorted((Path(__file__).parents[3] / "search_spaces").glob("*.yaml"))

_WORDS = (
    "off", "no", "yes", "on", "true", "~", "null", "[]", "{}", "-1", "0", "1", "1e9", ".inf", ".nan", "1:30", "010",
    "0x1f", "999999999999999999999", "1.5", "none", "dflash", "ddtree", "draft.kind", "draft.layers", "graphs",
    "[1, 4]", "{int: [4, 1]}", "{float: [0, 1]}", "{choices: []}", "when", "*a", "&a [*a]", "!!python/object:os.system",
    "!x", "'", '"', "|", ">", "? ", "- ", "---", "...", "%YAML 9.9", "<<: *a", "2026-11-29", '"\\uD800"', '"\\0"',
    '"\\UFFFFFFFF"', "\t", "\x00", "\ufeff", "é", "𝄞", "tpot_ms_p50", "ttft_ms", "150s", "-5m", "1e400", "@", "`",
)  # fmt: skip


def mutate(text: str, rng: random.Random) -> bytes:
    """Return the file with one to four mistakes in it, of the kinds that people and accidents make."""
    data = text
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(_MUTATIONS)(data, rng)
    raw = data.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05 and raw:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    return raw


def _drop_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        del lines[rng.randrange(len(lines))]
    return "".join(lines)


def _swap_lines(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    if len(lines) > 1:
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
    return "".join(lines)


def _repeat_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "".join(lines)


def _cut(text: str, rng: random.Random) -> str:
    i, j = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    return text[:i] + text[min(j, i + 40) :]


def _truncate(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _insert(text: str, rng: random.Random) -> str:
    i = rng.randrange(len(text) + 1)
    return text[:i] + rng.choice(_WORDS) + text[i:]


def _replace_token(text: str, rng: random.Random) -> str:
    """Replace one word, number or bracket of the file by another word."""
    tokens = list(re.finditer(r"[\w.\-]+|[\[\]{}:,\"#]", text))
    if not tokens:
        return text
    token = rng.choice(tokens)
    return text[: token.start()] + rng.choice(_WORDS) + text[token.end() :]


def _typo(text: str, rng: random.Random) -> str:
    if len(text) < 2:
        return text
    i = rng.randrange(len(text) - 1)
    return rng.choice((text[:i] + text[i + 1 :], text[:i] + text[i + 1] + text[i] + text[i + 2 :]))


def _indent(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        i = rng.randrange(len(lines))
        lines[i] = rng.choice((" ", "  ", "\t", "      ")) + lines[i]
    return "".join(lines)


def _random_character(text: str, rng: random.Random) -> str:
    i = rng.randrange(len(text) + 1)
    return text[:i] + chr(rng.randrange(0x110000)) + text[i:]


def _nest(text: str, rng: random.Random) -> str:
    i = rng.randrange(len(text) + 1)
    return text[:i] + "[" * rng.choice((3, 30, 3000)) + text[i:]


_MUTATIONS = (
    _drop_line, _swap_lines, _repeat_line, _cut, _truncate, _insert, _replace_token, _replace_token, _replace_token,
    _typo, _typo, _indent, _random_character, _nest,
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of the mutated files."""

    files: int
    accepted: int
    refused: int


def survive(count: int, seed: int = 0) -> Outcome:
    """Read `count` mutated files.

    Raises:
        AssertionError: one ended in something else than a space that can be planned with, or problems with a
            position each.
    """
    originals = [path.read_text(encoding="utf-8") for path in SPACES]
    accepted = refused = 0
    checks = StaticChecks(cpu_machine())
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        data = mutate(rng.choice(originals), rng)
        try:
            space = parse_space(data, "space.yaml")
        except SpaceError as error:
            _check_problems(error, data, number)
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(f"file {number} of seed {seed} ended in {error!r}:\n{data!r}") from error
        try:
            _plan(space, checks)
        except Exception as error:
            raise AssertionError(f"file {number} of seed {seed} cannot be planned, {error!r}:\n{data!r}") from error
        accepted += 1
    return Outcome(count, accepted, refused)


def _plan(space: Space, checks: StaticChecks) -> None:
    """Do with an accepted file what `tuner search --dry-run` does."""
    json.dumps(space.file.model_dump(mode="json", by_alias=True), allow_nan=False).encode()
    console = Console(file=io.StringIO(), width=200)
    console.print(view(space, prune(space, checks), checks))


def _check_problems(error: SpaceError, data: bytes, number: int) -> None:
    lines = data.decode("utf-8", "replace").count("\n") + data.count(b"\r") + 2
    if not error.problems:
        raise AssertionError(f"file {number}: refused without a problem")
    for problem in error.problems:
        shown = problem.render("space.yaml")
        shown.encode()  # can be printed
        if not (1 <= problem.line <= lines and problem.column >= 1) or "\n" in shown:
            raise AssertionError(f"file {number}: {shown!r} of {data!r}")
