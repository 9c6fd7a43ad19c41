"""Every mistake in a space file is reported at its line and column, with a hint; none is a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tuner.space import mutate
from tests.tuner.spaces import SPACE
from tuner.errors import SpaceError
from tuner.space import Infeasible, load_space, parse_space

# (text in SPACE, what it is replaced by, line, column of the problem, words of the message, words of the hint)
MISTAKES = [
    ("draft.kind: [none", "draft.kind: [off", 7, 16, "YAML reads off as a boolean", "is `none`"),
    ("max_running: 16", "max_running: no", 5, 25, "YAML reads no as a boolean", '"no"'),
    ("target: bundled", "target: on", 4, 19, "YAML reads on as a boolean", '"on"'),
    ("prompts: bundled", "prompts: yes", 11, 21, "YAML reads yes as a boolean", '"yes"'),
    ("kind: eager}", "kind: off}", 10, 29, "YAML reads off as a boolean", ""),
    ("name: small", "off: small", 2, 9, "reads the key off as a boolean", '"off"'),
    ("draft.kind: [none", "draft.kind: [nnoe", 7, 16, "'nnoe' is not one of", "did you mean none?"),
    ("draft.block_size", "draft.blocksize", 8, 3, "is no config field", "did you mean draft.block_size?"),
    ("max_running: 16", "max_runing: 16", 5, 12, "is no config field", "did you mean memory.max_running?"),
    ("max_running: 16", "max_len: 16", 5, 12, "is no config field", "did you mean model.max_len?"),
    ("objectives:", "objectivs:", 12, 1, "no such key", "did you mean objectives?"),
    ("goal: min", "gaol: min", 13, 27, "no such key", "did you mean goal?"),
    ("choices: [4, 8]", "choicess: [4, 8]", 8, 21, "one of choices, int, float", "did you mean choices?"),
    ("batch_sizes", "batch_size", 10, 54, "no such field", "did you mean batch_sizes?"),
    ("kind: captured", "kind: captred", 10, 44, "'captred' is not one of", "did you mean captured?"),
    ("kind: local", "kind: ray", 17, 18, "'ray' is not one of local, packed", ""),
    ("max_running: 16", "max_running: many", 5, 25, "a valid integer", ""),
    ("memory: {max_running: 16}", "memory: 5", 5, 11, "a mapping is meant", ""),
    ("seed: 0", "seed: x", 2, 28, "a valid integer", ""),
    ("choices: [4, 8]", "choices: [4, x]", 8, 35, "a valid integer", ""),
    ("choices: [4, 8]", "choices: [1, 8]", 8, 32, "greater than or equal to 2", ""),
    ("choices: [4, 8]", "choices: []", 8, 31, "an empty list", "at least one"),
    ("choices: [4, 8]", "choices: [4, 4]", 8, 35, "listed twice", "remove one"),
    ("choices: [4, 8]", "choices: 4", 8, 31, "choices is a list", "[a, b]"),
    ("int: [1, 4]", "int: [4, 1]", 9, 23, "the range is empty: 4 to 1", "[1, 4]"),
    ("int: [1, 4]", "int: [1]", 9, 23, "two numbers", ""),
    ("int: [1, 4]", "int: [0, 4]", 9, 24, "greater than 0", ""),
    ("int: [1, 4]", "float: [1, 4]", 9, 25, "takes whole numbers", "int:"),
    ("int: [1, 4]", "int: [1, 4], step: 0", 9, 37, "step is a whole number", ""),
    ("int: [1, 4]", "int: [1, 4], log: true, step: 2", 9, 48, "exclude each other", ""),
    ("int: [1, 4]", "int: [1, 4], lgo: true", 9, 31, "lgo means nothing", "did you mean log?"),
    ("{int: [1, 4], when: {draft.kind: [dflash]}}", "3", 9, 17, "a domain is meant", "engine"),
    ("[4, 8], when: {draft.kind: [dflash]}", "[4, 8]", 8, 3, "does not exist for draft.kind none", "when:"),
    ("when: {draft.kind: [dflash]}}\n  draft.l", "when: {draft.knd: [dflash]}}\n  draft.l", 8, 46,
     "not searched", "did you mean draft.kind?"),
    ("[4, 8], when: {draft.kind: [dflash]}", "[4, 8], when: {draft.kind: [dflsh]}", 8, 59,
     "draft.kind is never 'dflsh'", "did you mean dflash?"),
    ("[4, 8], when: {draft.kind: [dflash]}", "[4, 8], when: {draft.kind: dflash}", 8, 58,
     "a non-empty list", "[dflash]"),
    ("when: {draft.kind: [dflash]}}\n  draft.layers: {int: [1, 4], when: {draft.kind: [dflash]}",
     "when: {draft.layers: [1]}}\n  draft.layers: {int: [1, 4], when: {draft.block_size: [4]}", 8, 45,
     "leads back", "circle"),
    ("choices: [{kind: eager}, ", "choices: [eager, ", 10, 22, "a mapping is meant", "graphs.kind: [eager"),
    ("memory: {max_running: 16}", "graphs: {kind: eager}", 10, 3, "graphs is searched, and graphs.kind", "remove"),
    ("  graphs: {choices", "  draft: [{kind: none}]\n  graphs: {choices", 8, 3, "is a part of draft", "one or the"),
    ("model: {target: bundled}", "model: {}", 4, 3, "the baseline (no speculation) is impossible", ""),
    ("schema: 1\n", "", 1, 1, "the file has no schema", ""),
    ("schema: 1", "schema: 2", 1, 9, "2 is not one of 1", ""),
    ("wall: 150s", "wall: 150x", 2, 58, "expected a duration", ""),
    ("wall: 150s", "wall: 1:30", 2, 58, "another base", ""),
    ("trials: 16, wall: 150s", "", 2, 39, "a budget needs", ""),
    ("wall: 150s", "gpu_hours: -1", 2, 63, "greater than 0", ""),
    ("name: small", "name: ../x", 2, 15, "is no name", "letters"),
    ("name: small", "name: 2026-11-29", 2, 15, "as a date", '"2026-11-29"'),
    ("metric: tpot_ms_p50", "metric: tpot_p50", 13, 14, "did you mean tpot_ms_p50?", ""),
    ("metric: tpot_ms_p50", "metric: tpot_ms", 13, 14, "needs a statistic", ""),
    ("metric: output_tok_s,", "metric: tpot_ms_p50,", 14, 14, "a front needs two metrics", ""),
    ("goal: max, at: 8", "goal: max, at: 9", 14, 43, "9 is not in workload.concurrency", "1, 4, 8"),
    ("max: 2000, at: 8", "max: 2000, at: 3", 15, 52, "3 is not in workload.concurrency", ""),
    ("max: 2000", "max: .inf", 15, 42, "not a finite number", ""),
    ("max: 2000, ", "", 15, 15, "either max or min", ""),
    ("load: 8", "load: 7", 16, 38, "7 is not in workload.concurrency", ""),
    ("ttft_ms_p90<500", "ttft_ms<500", 16, 13, "needs a statistic", ""),
    ("ttft_ms_p90<500", "__import__('os')", 16, 13, "is no limit", ""),
    ("[1, 4, 8]", "[8, 4]", 11, 62, "must ascend", "[4, 8]"),
    ("[1, 4, 8]", "[0, 4]", 11, 63, "greater than 0", ""),
    ("[1, 4, 8]", "8", 11, 62, "tuple", ""),
    ("seed: 0", "seed: 010", 2, 28, "another base", ""),
    ("seed: 0", "seed: 99999999999999999999", 2, 28, "too large", ""),
    ("seed: 0,", "seed: 0, seed: 1,", 2, 31, "given twice", "line 2"),
    ("  memory", "\tmemory", 5, 1, "not YAML", "never tabs"),
    ("executor: {kind: local}", "<<: {kind: local}", 17, 1, "merge keys", ""),
    ("target: bundled", "target: !!python/name:os.system x", 4, 19, "means nothing here", "remove"),
    ("target: bundled", 'target: "a\\0b"', 4, 19, "a control character", ""),
    ("target: bundled", 'target: "\\uD800"', 4, 19, "surrogate", ""),
]  # fmt: skip


def problems_of(data: bytes) -> SpaceError:
    with pytest.raises(SpaceError) as caught:
        parse_space(data, "space.yaml")
    return caught.value


@pytest.mark.parametrize(("old", "new", "line", "column", "message", "hint"), MISTAKES)
def test_mistake_is_reported_at_its_place(old: str, new: str, line: int, column: int, message: str, hint: str) -> None:
    assert old in SPACE
    error = problems_of(SPACE.replace(old, new, 1).encode())
    found = [(p.line, p.column, p.message, p.hint) for p in error.problems]
    places = [(p.message, p.hint) for p in error.problems if (p.line, p.column) == (line, column)]
    assert places, found
    assert any(message in m and hint in h for m, h in places), found
    assert str(error).startswith("space.yaml:")


@pytest.mark.parametrize(
    ("data", "line", "column", "message"),
    [
        (b"", 1, 1, "the file is empty"),
        (b"# only a comment\n", 1, 1, "the file is empty"),
        (b"- 1\n", 1, 1, "expected a mapping"),
        (b"hello", 1, 1, "expected a mapping"),
        (b"schema: 1\nstudy: \xff\n", 2, 8, "not UTF-8"),
        (b"a: \x00", 1, 4, "a control character"),
        (b"a: &a [*a]", 1, 4, "contains itself"),
        (b"a: [1", 1, 6, "not YAML"),
        (b"a: 1\n---\nb: 2", 2, 1, "single document"),
        (b"[" * 5000, 1, 1, "nested deeper"),
        (b"a: " + b"[" * 40 + b"]" * 40, 1, 28, "nested deeper"),
        (b"x" * 300_000, 1, 1, "more than"),
        (b"? [1, 2]\n: 3\n", 1, 3, "a key must be a word"),
    ],
)
def test_what_is_no_space_at_all(data: bytes, line: int, column: int, message: str) -> None:
    error = problems_of(data)
    assert [(p.line, p.column) for p in error.problems if message in p.message] == [(line, column)], str(error)


def test_alias_bomb_is_bounded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 9)]
    error = problems_of("\n".join(lines).encode())
    assert any("aliases are expanded" in p.message for p in error.problems)


def test_several_problems_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = SPACE.replace("seed: 0", "seed: x").replace("goal: min", "goal: mni").replace("[4, 8]", "[4, x]")
    lines = [p.line for p in problems_of(text.encode()).problems]
    assert lines == [2, 8, 13]


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(SpaceError, match=r"/dev/zero:1:1: longer than 4 MiB"):
        load_space(Path("/dev/zero"))


def test_missing_file_and_missing_prompts(tmp_path: Path) -> None:
    with pytest.raises(SpaceError, match="cannot be read"):
        load_space(tmp_path / "absent.yaml")
    with pytest.raises(SpaceError, match="cannot be read"):
        load_space(tmp_path)
    path = tmp_path / "space.yaml"
    path.write_text(SPACE.replace("prompts: bundled", f"prompts: {tmp_path}/none.jsonl"))
    with pytest.raises(SpaceError, match=r"space.yaml:11:21: there is no file"):
        load_space(path)


@pytest.mark.parametrize("path", mutate.SPACES, ids=lambda path: path.name)
def test_every_committed_space_loads(path: Path) -> None:
    space = load_space(path)
    assert not isinstance(space.baseline(lambda config: ()), Infeasible)


def test_300_mutated_files_end_in_no_traceback() -> None:
    outcome = mutate.survive(300, seed=0)
    assert outcome.refused > 100
    assert outcome.accepted > 10
