"""Every view in a real browser, asserted on its data; what is hostile stays inert; what is new shows up."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import LaunchFile
from tests.browser.chrome import Browser, Page
from tests.tuner.dashboard.synthetic import append, make_study, trial
from tuner.dashboard.payload import whole_of
from tuner.dashboard.study import StudyReader
from tuner.labels import number
from tuner.records import METRIC_NAMES, Event, Failure
from tuner.report.page import write_report
from tuner.store import Journal, StudyFolder

DRAWN = "document.documentElement.dataset.trials !== undefined"
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{7*7}}\'"&'


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.page()
    yield page
    page.close()


@pytest.fixture(scope="module")
def mid(results: Path) -> dict[str, Any]:
    return json.loads(json.dumps(whole_of(StudyReader(StudyFolder(results / "mid")), "mid")))


def go(page: Page, address: str, place: str, view: str) -> None:
    page.go("about:blank")
    page.go(f"{address}#{place}", f"{DRAWN} && document.documentElement.dataset.view === '{view}'")


def option(page: Page, number_: int = 0) -> Any:
    """What the n-th chart draws."""
    return page.run(
        "(() => { const data = (s) => (s.data ?? []).map((d) => d?.value ?? d);"
        f" const o = echarts.getInstanceByDom(document.querySelectorAll('.chart')[{number_}]).getOption();"
        " const series = o.series.map((s) => ({id: s.id, type: s.type, data: data(s)}));"
        " const named = (axes) => (axes ?? []).map(({name, data}) => ({name, data}));"
        " return {series, x: named(o.xAxis), y: named(o.yAxis), parallel: named(o.parallelAxis)}; })()"
    )


def value(row: list[Any], name: str) -> Any:
    return row[4][METRIC_NAMES.index(name)]


def points_of(mid: dict[str, Any]) -> list[tuple[dict[str, Any], list[Any]]]:
    return [(each, row) for each in mid["trials"] for row in each["points"]]


def test_the_front_draws_every_point_the_stair_and_the_baseline(page: Page, address: str, mid: dict[str, Any]) -> None:
    go(page, address, "mid/front", "front")
    drawn = option(page)
    by_id = {series["id"]: series["data"] for series in drawn["series"] if "id" in series}
    front = [[t, c] for t, c, *_ in mid["derived"]["front"]]
    expected = [[value(row, "tpot_ms_p50"), value(row, "output_tok_s")] for _, row in points_of(mid)]
    drawn_front = [xy for name, data in by_id.items() if name.startswith("front/") for xy in data]
    dominated = [xy for name, data in by_id.items() if name.startswith("dominated/") for xy in data]
    assert sorted(drawn_front + dominated) == sorted(expected)
    assert len(drawn_front) == len(front) == len(by_id["stair"])
    assert [c for *_, c in by_id["baseline"]] == [1, 4, 16, 48]
    assert "tpot_ms_p50 (ms/token) · lower is better" in drawn["x"][0]["name"]
    assert "output_tok_s (tokens/s) · higher is better" in drawn["y"][0]["name"]
    best = mid["derived"]["recommendation"]
    assert f"{best['speedup']:.2f}" in page.text(".hero")
    assert f"trial {best['trial']}" in page.text(".hero")
    failed = [each for each in mid["trials"] if each["state"] == "failed"]
    assert page.text(".failures").count("✕") == len(failed)
    assert page.run("document.querySelectorAll('tr[data-point]').length") == len(front)
    assert page.errors() == []


def test_the_launch_command_of_a_point_writes_a_valid_launch_file(page: Page, address: str) -> None:
    go(page, address, "mid/front", "front")
    page.click("tr[data-point] button")
    command = page.text(".detail .command pre")
    first, _, rest = command.partition("\n")
    body, _, serve = rest.rpartition("\nYAML\n")
    assert first.startswith("cat > trial-")
    assert serve.endswith("--port 8000")
    assert "LAUNCH_FILE" not in serve
    assert LaunchFile.model_validate(yaml.safe_load(body)).entries[0].config.model.target == "bundled"


def test_curves_show_crossover_and_baseline(page: Page, address: str, mid: dict[str, Any]) -> None:
    go(page, address, "mid/curves", "curves")
    page.wait("document.querySelector('#crossover')?.innerText.length > 20")
    assert "rossover" in page.text("#crossover")
    baseline = next(each for each in mid["trials"] if each["role"] == "baseline")
    expected = [[row[0], value(row, "output_tok_s")] for row in baseline["points"]]
    assert expected in [series["data"] for series in option(page)["series"]]
    assert "requests in flight" in option(page)["x"][0]["name"]
    ones = [[level, 1] for level, _ in expected]
    assert ones in [series["data"] for series in option(page, 1)["series"]]


def test_parallel_coordinates_can_be_brushed(page: Page, address: str, mid: dict[str, Any]) -> None:
    go(page, address, "mid/parallel", "parallel")
    measured = [each for each in mid["trials"] if each["points"]]
    assert f"{len(measured)} of {len(measured)}" in page.text("#brushed")
    box = page.run(
        "(() => { const r = document.querySelector('.chart').getBoundingClientRect(); return [r.x, r.y, r.height]; })()"
    )
    axes = option(page)["parallel"]
    assert axes[0]["name"] == "draft.kind"
    x, top = box[0] + 60, box[1] + 54
    height = box[2] - 80
    step = height / len(axes[0]["data"])
    kinds = axes[0]["data"]
    middle = top + height - (kinds.index("ddtree") + 0.5) * step
    page.drag(x, middle - 0.3 * step, x, middle + 0.3 * step)
    wanted = sum(each["kind"] == "ddtree" for each in measured)
    page.wait(f"document.querySelector('#brushed').innerText.startsWith('{wanted} of ')")


def test_the_table_sorts_filters_and_compares(page: Page, address: str, mid: dict[str, Any]) -> None:
    go(page, address, "mid/trials", "trials")
    listed = [each for each in mid["trials"] if each["state"] != "infeasible"]
    assert page.run("document.querySelectorAll('#trials tbody tr').length") == len(listed)
    page.click('#trials button[data-key="output_tok_s@48"]')
    page.click('#trials button[data-key="output_tok_s@48"]')
    speeds = {each["trial"]: value(row, "output_tok_s") for each, row in points_of(mid) if row[0] == 48}
    best = max(speeds, key=speeds.__getitem__)
    assert page.text("#trials tbody tr td:nth-child(2)") == f"#{best}"
    assert page.run("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "descending"
    page.run("(() => { const i = document.querySelector('input[type=search]'); i.value = 'ddtree output_tok_s@48>9000';"
             " i.dispatchEvent(new Event('input')); })()")  # fmt: skip
    kinds = {each["trial"]: each["kind"] for each in mid["trials"]}
    wanted = sum(kinds[t] == "ddtree" and speed > 9000 for t, speed in speeds.items())
    assert page.text("#count") == f"{wanted} of {len(mid['trials'])}"
    baseline = next(each["trial"] for each in mid["trials"] if each["role"] == "baseline")
    go(page, address, f"mid/trials/compare%3D{baseline}%2C{best}", "trials")
    assert "draft.kind" in page.text("#diff")
    row = page.run("[...document.querySelectorAll('#paired tbody tr')].find((r) => r.innerText.includes('output_tok_s')"
                   " && r.cells[1].innerText === '48').innerText")  # fmt: skip
    assert number(speeds[best]).replace(" ", "\u2009") in row
    assert f"{100 * (speeds[best] / speeds[baseline] - 1):.1f} %" in row
    assert "better" in row
    assert "all loads" in page.text("#paired")


def test_a_trial_shows_its_course_rounds_acceptance_and_what_ran(page: Page, address: str, mid: dict[str, Any]) -> None:
    best = mid["derived"]["recommendation"]["trial"]
    shown = next(each for each in mid["trials"] if each["trial"] == best)
    go(page, address, f"mid/trial/{best}", "trial")
    assert page.run("document.querySelectorAll('.stages .lane i.load').length") == 4
    assert page.run("document.querySelectorAll('#rounds .track').length") == 4
    bars = [series["data"] for series in option(page)["series"]]
    assert bars == [[pytest.approx(100 * v) for v in shown["server"][str(c)]["by_position"]] for c in (1, 4, 16, 48)]
    assert "bfloat16" in page.text("#resolved tr.differs") or "bfloat16" in page.text("#resolved")
    assert "bound by" in page.text("#headroom")
    failed = next(each for each in mid["trials"] if each["state"] == "failed")
    go(page, address, f"mid/trial/{failed['trial']}", "trial")
    assert failed["failure"]["evidence"][-1] in page.text("#evidence")
    assert failed["failure"]["advice"] in page.text("main")


def test_the_study_page_shows_progress_slots_hypervolume_and_importance(
    page: Page, address: str, mid: dict[str, Any]
) -> None:
    go(page, address, "mid/study", "study")
    text = page.text("main")
    assert f"{mid['live']['launched']} of 40" in text
    slots, volume = option(page, 0), option(page, 1)
    ran = [each for each in mid["trials"] if each["begin"] is not None]
    assert len(slots["series"][0]["data"]) == len(ran)
    assert {d[1] for d in slots["series"][0]["data"]} == set(mid["live"]["lanes"].values())
    drawn = {series["id"]: [y for _, y in series["data"]] for series in volume["series"]}
    assert drawn["ours"] == pytest.approx([100 * v for v in mid["derived"]["hypervolume"]["ours"]])
    assert drawn["random"] == pytest.approx([100 * v for v in mid["derived"]["hypervolume"]["random"]])
    assert page.run("document.querySelectorAll('#importance .track').length") == len(mid["derived"]["importance"])
    assert page.errors() == []


def test_exports_are_complete(page: Page, address: str, mid: dict[str, Any]) -> None:
    go(page, address, "mid/front", "front")
    kept = page.run(
        "(async () => { const found = {}; const real = URL.createObjectURL;"
        " URL.createObjectURL = (blob) => { found[blob.type] = blob; return real(blob); };"
        " for (const b of document.querySelectorAll('.menu .items button')) b.click();"
        " const out = {}; for (const [type, blob] of Object.entries(found)) out[type] = await blob.text();"
        " return out; })()"
    )
    lines = kept["text/csv"].strip().split("\r\n")
    own = sum(max(1, len(each["levels"] or each["points"])) for each in mid["trials"])
    assert len(lines) == own + 1
    assert len(json.loads(kept["application/json"])["trials"]) == 40
    LaunchFile.model_validate(yaml.safe_load(kept["application/yaml"]))


@pytest.mark.parametrize("view", ["front", "curves", "parallel", "trials", "study"])
@pytest.mark.parametrize("study", ["one", "empty"])
def test_small_studies_look_right(page: Page, address: str, study: str, view: str) -> None:
    go(page, address, f"{study}/{view}", view)
    assert len(page.text("main")) > 40
    assert "NaN" not in page.text("main")
    assert "undefined" not in page.text("main")
    assert page.errors() == []


def test_a_study_in_which_all_failed_says_so(page: Page, address: str, results: Path) -> None:
    folder = make_study(results / "failed", 0, name="failed", finish=False)
    rng = random.Random(1)
    failure = Failure(kind="oom_start", stage="ready", evidence=("out of memory",), advice="lower it")
    with Journal(folder) as journal:
        for i in range(3):
            made = trial(rng, 0, 1.8e9 + i * 60)
            update = {"trial": i, "role": "search", "state": "failed", "levels": (), "failure": failure}
            append(journal, [made.model_copy(update=update)])
    for view in ("front", "curves", "parallel", "trials", "study"):
        go(page, address, f"failed/{view}", view)
        assert page.errors() == []
    assert "oom_start" in page.text("#failures")


def test_both_themes_and_the_keyboard(page: Page, address: str) -> None:
    go(page, address, "mid/front", "front")
    theme = "document.documentElement.dataset.theme"
    back = "getComputedStyle(document.body).backgroundColor"
    assert page.run(theme) == "light"
    light = page.run(back)
    page.scheme(dark=True)
    page.wait(f"{theme} === 'dark'")
    assert page.run(back) != light
    page.press("t", 84, "t")
    page.wait(f"{theme} === 'light'")  # chosen, whatever the system prefers
    for key, view in (("3", "parallel"), ("4", "trials"), ("5", "study"), ("1", "front")):
        page.press(key, ord(key), key)
        page.wait(f"document.documentElement.dataset.view === '{view}'")
    page.run("document.body.focus()")
    reached = set()
    for _ in range(14):
        page.press("Tab", 9)
        reached.add(page.run("document.activeElement.textContent.trim().slice(0, 20)"))
    assert {"Front", "Curves", "Parallel", "Trials", "Study", "Export"} <= reached


def test_what_is_hostile_is_inert(page: Page, address: str, results: Path) -> None:
    folder = make_study(results / "hostile", 4, name="hostile")
    made = trial(random.Random(2), 1, 1.8e9)
    config = made.config | {
        "attention": {"backend": EVIL},
        EVIL: {EVIL: [EVIL, "x" * 100_000]},
        "constructor": {"__proto__": EVIL},
    }
    failure = Failure(
        kind="crashed", stage="load", evidence=(EVIL, "\x1b[31m\x00\u202e" * 10, "y" * 50_000), advice=EVIL
    )
    with Journal(folder) as journal:
        hostile = made.model_copy(
            update={"trial": 4, "config": config, "failure": failure, "state": "failed", "resolved": config}
        )
        append(journal, [hostile, made.model_copy(update={"trial": 5, "config": config})])
        journal.event(Event(trial=4, stage="load", time=1.8e9, text=EVIL))
    provenance = json.loads(folder.provenance.read_text()) | {EVIL: EVIL, "machine": {"cpu": EVIL, "cores": EVIL}}
    folder.provenance.write_text(json.dumps(provenance))
    (folder.logs / "trial-0004.log").write_bytes(EVIL.encode() + b"\n\xff\xfe\x00\x1b[2J" + b"z" * 200_000)
    for view in ("front", "curves", "parallel", "trials", "study", "trial/4", "trial/5"):
        go(page, address, f"hostile/{view}", view.split("/")[0])
        assert page.run("window.hacked") is None
        assert page.run("document.querySelectorAll('main img, main script, header script').length") == 0
    go(page, address, "hostile/trial/4", "trial")
    page.wait("document.querySelector('.log pre').textContent.length > 1000")
    assert EVIL in page.run("document.querySelector('#evidence').textContent")
    assert page.run("({}).polluted") is None
    assert [error for error in page.errors() if "404" not in error] == []
    write_report(folder)
    page.go(f"file://{folder.report}#hostile/trial/4", DRAWN)
    assert EVIL in page.run("document.querySelector('#evidence').textContent")
    assert page.run("window.hacked") is None


def test_what_is_appended_shows_up_and_who_runs_it(page: Page, address: str, results: Path) -> None:
    folder = make_study(results / "live", 3, name="live", finish=False)
    go(page, address, "live/trials", "trials")
    assert "died" in page.text("header")
    with folder.lock(), Journal(folder) as journal:
        (folder.logs / "trial-0003.log").write_text("the first line\n")
        journal.event(Event(kind="begin", trial=3, stage="lease", time=1.9e9))
        page.wait("document.querySelector('header').innerText.includes('running')")
        page.run("location.hash = '#live/trial/3'")
        page.wait("document.querySelector('.log pre')?.textContent.includes('the first line')")
        with (folder.logs / "trial-0003.log").open("a") as log:
            log.write("the second line\n")
        page.wait("document.querySelector('.log pre').textContent.includes('the second line')")
        append(journal, [trial(random.Random(4), 3, 1.9e9)])
        page.wait("document.documentElement.dataset.trials === '4'")


def test_a_log_is_followed_though_its_page_was_open_before_the_trial(page: Page, address: str, results: Path) -> None:
    folder = make_study(results / "early", 3, name="early", finish=False)
    with folder.lock(), Journal(folder) as journal:
        log = folder.logs / "trial-0003.log"
        log.write_text("the first line\n")
        go(page, address, "early/trial/3", "trial")
        page.wait("document.querySelector('.log pre')?.textContent.includes('the first line')")
        journal.event(Event(kind="begin", trial=3, stage="lease", time=time.time()))
        page.wait("document.querySelector('.log header').innerText.includes('live')")
        with log.open("a") as file:
            file.write("the second line\n")
        page.wait("document.querySelector('.log pre').textContent.includes('the second line')")
    assert page.text(".log pre").split("\n")[:2] == ["the first line", "the second line"]
    assert page.errors() == []


def test_the_report_is_the_same_page_offline(page: Page, results: Path, mid: dict[str, Any], tmp_path: Path) -> None:
    write_report(StudyFolder(results / "mid"), tmp_path / "report.html")
    page.go(f"file://{tmp_path}/report.html", DRAWN)
    assert f"trial {mid['derived']['recommendation']['trial']}" in page.text(".hero")
    for view in ("curves", "parallel", "trials", "study", "trial/0"):
        page.run(f"location.hash = '#mid/{view}'")
        page.wait(f"document.documentElement.dataset.view === '{view.split('/')[0]}'")
    assert page.errors() == []
    assert {url.split(":")[0] for url in page.requests()} <= {"file", "data", "about"}
