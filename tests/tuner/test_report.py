"""The report: complete, self-contained, inert whatever the study is called or the logs say."""

from __future__ import annotations

import html.parser
import itertools
import re
from pathlib import Path

import pytest

from tests.tuner.make import config, level, record
from tests.tuner.spaces import SPACE
from tuner.records import Failure, TrialRecord
from tuner.report.chart import Axis, Mark, scale, scatter
from tuner.report.html import Html, tag
from tuner.report.page import page
from tuner.space import parse_space
from tuner.study import outcome_of

PROVENANCE = {"schema": 1, "time": 1.7e9, "machine": {"cpu": "Some CPU", "cores": 2, "gpus": []}, "argv": ["tuner"]}
EVIL = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>&\x1b[31m"


class Checker(html.parser.HTMLParser):
    """Collects tags, attributes and text; complains about what is not closed."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def render(records: list[TrialRecord], text: str = SPACE, provenance: dict[str, object] | None = None) -> Checker:
    space = parse_space(text.encode())
    checker = Checker()
    checker.feed(page(space, outcome_of(records, space), provenance or PROVENANCE, "launch: <yaml>", "serve it"))
    checker.close()
    assert checker.open == []
    return checker


RECORDS = [
    record(0, [level(1, 8.0, 120), level(4, 10.0, 380), level(8, 16.0, 480)]),
    record(1, [level(1, 4.0, 240), level(4, 9.0, 430), level(8, 15.0, 510)]),
    record(2),
]


def test_everything_is_there() -> None:
    page_ = render(RECORDS)
    for words in (
        "Recommended at 8 requests in flight: trial 1",
        "serve it",
        "launch: <yaml>",
        "tpot_ms_p50 (ms/token) · ← lower is better",
        "output_tok_s (tokens/s) · higher is better →",
        "4.00[3.80–4.20]",
        "oom_load at load",
        "out of memory",
        "What to do: lower it",
        "Some CPU, 2 cores",
        "ttft_ms_p90 ≤ 2000 at 8 in flight",
        SPACE.splitlines()[1],
    ):
        assert words in page_.text, words


def test_no_script_and_no_address_of_anywhere_else() -> None:
    page_ = render(RECORDS)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page_.tags)
    assert not [name for name, _ in page_.attributes if name in ("src", "href", "action") or name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page_.attributes


def test_what_comes_from_elsewhere_is_inert() -> None:
    failure = Failure(kind="crashed", stage="launch", evidence=(EVIL, "x" * 100_000), advice=EVIL)
    hostile = record(
        2, None, failure=failure.model_dump(), config=config(attention={"backend": EVIL.replace("\x1b", "")})
    )
    text = SPACE.replace("target: bundled", "target: '</style><script>x</script>'")
    page_ = render([*RECORDS[:2], hostile], text, PROVENANCE | {"argv": [EVIL], EVIL: {EVIL: EVIL}})
    assert "script" not in page_.tags
    assert "img" not in page_.tags
    assert EVIL[:30] in page_.text
    assert len(page_.text) < 60_000


@pytest.mark.parametrize("records", [[], RECORDS[:1], [record(0)], [record(0), record(1), record(2)]])
def test_small_studies_have_a_report(records: list[TrialRecord]) -> None:
    page_ = render(records)
    assert ("svg" in page_.tags) == bool(records and records[0].levels)


def test_one_objective_is_drawn_against_the_load() -> None:
    text = SPACE.replace("  - {metric: output_tok_s, goal: max, at: 8}\n", "")
    assert "requests in flight" in render(RECORDS, text).text


def test_unmeasured_values_are_dashes_not_points() -> None:
    page_ = render([record(0, [level(1, None, 120), level(8, 16.0, 480)])])
    assert "–" in page_.text


def test_text_and_attributes_are_escaped_and_html_is_not() -> None:
    assert tag("p", "<b>", Html("<i>x</i>"), class_='"a"') == '<p class="&quot;a&quot;">&lt;b&gt;<i>x</i></p>'
    assert tag("line", x1=1.0, x2=2.5) == '<line x1="1" x2="2.5"/>'
    assert tag("p", None, ["a", None, ["b"]]) == "<p>ab</p>"


@pytest.mark.parametrize("values", [[], [5.0], [0.0], [5.0, 5.0], [0.001, 0.002], [1.0, 1e6], [-3.0, 4.0], [1e-9, 1e9]])
def test_scales_cover_their_values_with_few_round_ticks(values: list[float]) -> None:
    drawn = scale(values, 0.0, 100.0)
    assert 3 <= len(drawn.ticks) <= 12
    assert all(-1e-6 <= drawn(value) <= 100 + 1e-6 for value in values)
    assert drawn(drawn.low) == 0
    assert drawn(drawn.high) == pytest.approx(100)


def test_the_stair_walks_along_the_front() -> None:
    def mark(x: float, y: float) -> Mark:
        return Mark(x, y, None, None, "none", 0, True, True, False, "")

    svg = scatter([mark(1, 1), mark(2, 2), mark(3, 4)], Axis("a", True), Axis("b", False))
    path = re.search(r'class="stair" d="([^"]+)"', svg)
    assert path is not None
    points = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path.group(1))]
    assert len(points) == 5
    assert all((a[0] == b[0]) != (a[1] == b[1]) for a, b in itertools.pairwise(points))
    assert points[1][1] == points[0][1]  # first right, at the same throughput


def test_a_study_of_many_trials_is_still_a_small_file(tmp_path: Path) -> None:
    """Also when all of them are tied, the worst case of the front's table."""
    levels = [level(1, 8.0, 120), level(4, 10.0, 380), level(8, 16.0, 480)]
    records = [record(i, levels) for i in range(400)]
    space = parse_space(SPACE.encode())
    text = page(space, outcome_of(records, space), PROVENANCE, None, "")
    assert len(text.encode()) < 1.6 * 2**20  # 4 MiB for a thousand
