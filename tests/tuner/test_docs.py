"""The references say what the types say, every field is explained, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from docs import generate
from tuner.records import FAILURES, METRIC_NAMES
from tuner.space import parse_space
from tuner.space.fields import all_paths

DOCUMENTS = sorted(generate.FOLDER.glob("*.md"))


def test_generated_parts_are_up_to_date() -> None:
    assert [path.name for path in generate.stale()] == [], "run: python -m docs.generate"


def test_every_part_is_used_once() -> None:
    used = [name for path in DOCUMENTS for _, name, _ in generate.PART.findall(path.read_text())]
    assert sorted(used) == sorted(generate.PARTS)


def test_a_changed_part_is_noticed_and_renewed() -> None:
    text = (generate.FOLDER / "failures.md").read_text()
    changed = text.replace("`oom_load`", "`oom_laod`")
    assert changed != text
    assert generate.filled(changed) == text


def test_everything_is_documented() -> None:
    text = {path.stem: path.read_text() for path in DOCUMENTS}
    assert all(f"`{kind}`" in text["failures"] for kind in FAILURES)
    assert all(f"`{path.rsplit('.', 1)[-1]}`" in text["config"] for path in all_paths())
    bases = {re.sub(r"_(mean|p\d+)$", "", name) for name in METRIC_NAMES}
    assert all(f"`{base}" in text["metrics"] for base in bases)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_example_of_the_space_file_loads() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (generate.FOLDER / "space-file.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        assert yaml.safe_load(block)
        assert parse_space(block.encode()).size() == 13
