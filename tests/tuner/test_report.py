"""The report: the page and its data in one file that runs nothing but itself, and stays small."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.dashboard.synthetic import make_study
from tuner.dashboard.payload import whole_of
from tuner.dashboard.study import StudyReader
from tuner.report import page as report
from tuner.report.bundle import script
from tuner.report.page import page, write_report
from tuner.store import StudyFolder

EXAMPLE = StudyFolder(Path(__file__).parents[2] / "results" / "example")
EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>&\x1b[31m"


class Parts(html.parser.HTMLParser):
    """Collects tags, attributes, and what scripts and styles hold."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.raw: list[tuple[str, str]] = []
        self.inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = tag if tag in ("script", "style") else None
        if self.inside is not None:
            self.raw.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.raw[-1] = (self.raw[-1][0], self.raw[-1][1] + data)


def parts(text: str) -> Parts:
    parsed = Parts()
    parsed.feed(text)
    parsed.close()
    return parsed


def data_of(text: str) -> dict[str, Any]:
    embedded = re.search(r'id="embedded">([A-Za-z0-9+/=]*)</script>', text)
    assert embedded is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(embedded.group(1))))
    return found


def test_the_report_holds_what_the_dashboard_shows(tmp_path: Path) -> None:
    write_report(EXAMPLE, tmp_path / "report.html")
    embedded = data_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    expected = json.loads(json.dumps(whole_of(StudyReader(EXAMPLE), "example")))
    assert {k: embedded[k] for k in ("trials", "derived", "study")} == {
        k: expected[k] for k in ("trials", "derived", "study")
    }
    assert embedded["left_out"] == []


def test_nothing_is_loaded_from_anywhere_and_only_its_own_scripts_run() -> None:
    text = page(whole_of(StudyReader(EXAMPLE), "example"))
    found = parts(text)
    assert found.tags.count("script") == 3
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name in ("src", "action") or name.startswith("on")]
    policy = next(value for name, value in found.attributes if name == "content" and value and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src" not in policy  # falls back to 'none'
    for tag, content in found.raw:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert (f"'sha256-{digest}'" in policy) == (tag == "style" or "function" in content)


DECLARED = re.compile(
    r"^(?:export )?(?:async )?(?:function|class|const|let) (?:\{[^}]*\}|([A-Za-z_$][\w$]*))", re.MULTILINE
)


def _names(files: dict[str, str]) -> dict[str, list[str]]:
    """Return {top-level name: modules that declare it}."""
    found: dict[str, list[str]] = {}
    for module, text in files.items():
        for name in filter(None, DECLARED.findall(text)):
            found.setdefault(name, []).append(module)
    return found


def test_the_modules_can_be_put_one_after_another() -> None:
    root = resources.files("tuner.dashboard").joinpath("static")
    files = {entry.name: entry.read_text(encoding="utf-8") for entry in root.iterdir() if entry.name.endswith(".js")}
    assert {name: where for name, where in _names(files).items() if len(where) > 1} == {}
    bundled = script()
    assert not re.search(r"^(import|export) ", bundled, re.MULTILINE)
    assert "</script" not in bundled
    assert sorted(re.findall(r"^// ([a-z]+\.js)$", bundled, re.MULTILINE)) == sorted(files)
    page_ = root.joinpath("index.html").read_text(encoding="utf-8")
    assert all(f"/static/{name}" in page_ for name in files)  # each is preloaded
    assert max(text.count("\n") for text in files.values()) <= 600


def test_what_comes_from_elsewhere_is_data_only() -> None:
    study = whole_of(StudyReader(EXAMPLE), EVIL)
    study["trials"][0]["label"] = EVIL
    text = page(study)
    assert parts(text).tags.count("script") == 3
    assert "img" not in parts(text).tags
    assert data_of(text)["trials"][0]["label"] == EVIL


@pytest.mark.parametrize("count", [0, 1, 12])
def test_small_studies_have_a_report(tmp_path: Path, count: int) -> None:
    folder = make_study(tmp_path / "study", count)
    write_report(folder)
    assert len(data_of(folder.report.read_text(encoding="utf-8"))["trials"]) == count


def test_a_report_that_would_be_too_large_goes_without_its_least_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    study = whole_of(StudyReader(EXAMPLE), "example")
    whole = len(page(study).encode())
    monkeypatch.setattr(report, "LARGEST", whole + report.SPACE_FOR_PAGE - 3000)
    small = page(study)
    assert len(small.encode()) < whole
    embedded = data_of(small)
    assert embedded["left_out"]
    assert [trial["points"][0][4] for trial in embedded["trials"] if trial["points"]] == [
        trial["points"][0][4] for trial in study["trials"] if trial["points"]
    ]


def test_a_report_is_never_larger_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = whole_of(StudyReader(make_study(tmp_path / "study", 300)), "many")
    study["trials"] = [trial | {"label": f"{i * 7919:x}" * 40} for i, trial in enumerate(study["trials"])]
    empty = len(report.document("many – tuning report", "").encode())
    monkeypatch.setattr(report, "LARGEST", empty + report.SPACE_FOR_PAGE + 60_000)
    small = page(study)
    assert len(small.encode()) <= report.LARGEST
    embedded = data_of(small)
    assert "not on the front" in embedded["left_out"][-1]
    left = {trial["trial"] for trial in embedded["trials"]}
    assert {point[0] for point in embedded["derived"]["front"]} <= left
    assert 0 < len(left) < 300
