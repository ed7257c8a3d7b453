"""What the history adds to a report: since when, how often, and nothing to what the run says."""

import base64
import dataclasses
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.history import History
from harness.store import RunFolder
from reports import html
from reports.history import MAX_RUNS, Past, look_back
from reports.reading import summarise
from reports.report import CaseReport, Report
from tests.unit.harness.history.nights import FAILED, night

CREATED = "2031-01-15T00:00:00+00:00"


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """Two cases over eighteen nights, of which the last four come after the report."""
    place = tmp_path_factory.mktemp("nights")
    with History.open(place / "history.sqlite", create=True) as history:
        for n in range(18):
            changes = {
                0: FAILED if n >= 9 else {},
                1: {"retried": ("candidate: port_in_use",)} if n == 6 else {},
            }
            slower = lambda run, leg, n=n: {"step_s": 0.02 if n < 7 else 0.03}  # noqa: E731
            history.record(night(n, cases=2, answers=changes, values=slower))
    return look_back(place / "run", "nightly", CREATED)


def test_strips_end_with_the_reports_own_night(nights: Past) -> None:
    """A letter an answer, oldest first; nights after the report are not looked at."""
    assert {name: known.letters for name, known in nights.cases.items()} == {
        "dp1-attn": "pppppppppfffff", "dp2-attn": "pppppppppppppp",
    }  # fmt: skip
    known = nights.cases["dp1-attn"]
    assert known.step_us == (20_000,) * 7 + (30_000,) * 7
    assert known.peak_kib == (40 << 10,) * 14


def test_since_when_it_fails_and_what_changed_is_in_words(nights: Past) -> None:
    """The first bad night, the last good one, and a lasting change, each with its commit."""
    first, *rest = nights.cases["dp1-attn"].words
    assert first.startswith("first bad 2031-01-10 at ")
    assert ", last good 2031-01-09 at " in first
    assert any(text.startswith("step time +50.0% since 2031-01-08") for text in rest)
    assert "tried again in 1 run: candidate: port_in_use" in nights.cases["dp2-attn"].words
    assert [(f.case_id, f.retried) for f in nights.flaky] == [("dp2-attn", {"port_in_use": 1})]


def test_no_history_and_a_damaged_one(tmp_path: Path) -> None:
    """Without a history nothing is said; of one that cannot be read, why."""
    assert look_back(tmp_path / "run", "nightly", CREATED) == Past(cases={}, flaky=())
    (tmp_path / "history.sqlite").write_text("no database" * 100)
    told = look_back(tmp_path / "run", "nightly", CREATED)
    assert told.note.startswith("no history is shown: ")


def test_the_page_shows_what_the_history_says(
    nights: Past, summary: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strip, values, words and the runs of the suite are on the page; without a history none."""
    monkeypatch.setattr(html, "MAX_DRAWN_CASES", 0)  # pictures take seconds
    names = dict(zip(("dp1-attn", "dp2-attn"), summary.cases, strict=False))
    ours = {case.spec.id: nights.cases[name] for name, case in names.items()}
    shown = dataclasses.replace(nights, cases=ours)
    page, plain = html.render(dataclasses.replace(summary, past=shown)), html.render(summary)
    for word in ("first bad 2031-01-10", "pppppppppfffff", "port_in_use"):
        assert word in page
        assert word not in plain


def test_two_weeks_are_shown_of_a_year(tmp_path: Path) -> None:
    """However long the history, a strip has two weeks."""
    with History.open(tmp_path / "history.sqlite", create=True) as history:
        for n in range(MAX_RUNS + 5):
            history.record(night(n))
    found = look_back(tmp_path / "run", "nightly", "2032-01-01T00:00:00+00:00")
    assert [len(known.letters) for known in found.cases.values()] == [MAX_RUNS]


def test_changes_are_looked_for_in_two_months(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step 16 days ago is in words, unless there are too many cases to look so far back."""

    def words() -> tuple[str, ...]:
        found = look_back(tmp_path / "run", "nightly", "2032-01-01T00:00:00+00:00")
        (known,) = found.cases.values()
        assert len(known.letters) == MAX_RUNS
        return known.words

    with History.open(tmp_path / "history.sqlite", create=True) as history:
        for n in range(28):
            slower = {"step_s": 0.02 if n < 12 else 0.022}
            history.record(night(n, values=lambda run, leg: slower))  # noqa: B023
    assert any("step time +10.0% since 2031-01-13" in each for each in words())
    monkeypatch.setattr("reports.history.MOST_ANSWERS", 1)
    assert words() == ()


def test_a_page_that_is_full_says_so(
    summary: Report, monkeypatch: pytest.MonkeyPatch, make_writer: Callable[..., Any]
) -> None:
    """Past its budgets a page packs, draws no more, shortens, and stays small for its cases."""
    bad = next(case for case in summary.cases if case.spec.id == "dp2-attn")
    many = tuple(_copy(bad, number) for number in range(150))
    report = dataclasses.replace(summary, cases=many, counts=summary.counts | {"failed": 150})
    monkeypatch.setattr(html, "MAX_DRAWN_CASES", 2)
    monkeypatch.setattr(html, "INLINE_BYTES", 150_000)
    monkeypatch.setattr(html, "PACKED_BYTES", 9_000)
    page = html.render(report)
    inline = page.count("<h4>First difference</h4>")
    assert 2 < inline < 30
    packed = page.split('id="packed">')[1].split("</script>")[0]
    bodies = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert len(bodies) + inline == 150
    assert all("harness rerun" in body for body in bodies.values())
    assert 0 < sum("The page is full" in body for body in bodies.values()) < 150
    assert len(page.encode()) < 400_000
    data = page.split('id="index">')[1].split("</script>")[0]
    assert [case[2] for case in json.loads(data)["cases"]] == [0] * 150


def _copy(case: CaseReport, number: int) -> CaseReport:
    return dataclasses.replace(case, spec=dataclasses.replace(case.spec, id=f"c{number}"))


def test_a_folder_is_found_by_the_name_in_its_scenario(writer: Any) -> None:
    """The report's scenario is the one under which the run was recorded."""
    from harness.history import gather

    writer.add("a", 1, "attn")
    folder = writer.write()
    with RunFolder.open(folder) as opened:
        assert gather(opened).scenario == summarise(folder).scenario
