"""The files of a report: all four, whole, the same each time, and safe to open."""

import base64
import copy
import dataclasses
import hashlib
import json
import re
import time
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import junitparser
import pytest
import xmlschema
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from junitparser.xunit2 import FlakyError, RerunError
from junitparser.xunit2 import TestCase as ParsedCase

from harness.errors import Infrastructure, UsageError
from harness.records import dumps
from harness.store import RunFolder, begin_run, save_outcome
from reports import build, html, json_report, markdown
from reports.reading import CasePast, Past, Report, summarise
from reports.text import clean, one_line, tail, well_formed
from tests.pace import in_paces
from tests.support import records
from tests.support.same_report import normalised
from tests.unit.reports.folders import HOSTILE, Writer

FILES = {
    "html": "index.html", "markdown": "report.md", "junit": "junit.xml", "json": "report.json",
}  # fmt: skip
VOID = {"meta", "img", "br", "input"}
SCHEMA = xmlschema.XMLSchema(str(Path(__file__).with_name("junit.xsd")))


class Page(HTMLParser):
    """Tags, their nesting, attributes and visible text, of the details that are packed too."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: dict[str, str] = {}
        self.feed(text)
        for body in self.packed().values():
            self.feed(body)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def packed(self) -> dict[str, str]:
        data = base64.b64decode(self.scripts.get("packed", ""))
        return dict(json.loads(zlib.decompress(data))) if data else {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[str(self.tags[-1][1].get("id", ""))] = data
        elif self.open and self.open[-1] != "style":
            self.words.append(data)


def texts_of(folder: Path) -> dict[str, str]:
    return {form: path.read_text("utf-8") for form, path in build(folder).items()}


def test_reports_are_stable_and_quick(everything: Path, built: dict[str, str]) -> None:
    """Four files and no more; the same bytes again, in under forty paces."""
    assert {path.name for path in (everything / "report").iterdir()} == set(FILES.values())

    def report_again() -> None:
        assert texts_of(everything) == built

    assert in_paces(report_again, times=2) < 40  # 21 measured, with coverage


# --- the page ---------------------------------------------------------------------------------


def test_page_is_well_formed_and_closed_to_the_world(built: dict[str, str]) -> None:
    """Tags nest, only our own script may run, and every address is inside the page."""
    page = Page(built["html"])
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"iframe", "link", "object", "base", "form"}
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert [(s.get("id"), s.get("type")) for s in scripts] == [
        ("index", "application/json"), ("past", "application/json"), ("packed", "text/plain"),
        (None, None),
    ]  # fmt: skip
    digest = base64.b64encode(hashlib.sha256(page.scripts[""].encode()).digest()).decode()
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv")]
    assert f"script-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'; ")
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "script" or "src" not in attributes
        assert tag != "th" or attributes.get("scope") in ("row", "col")
        if tag == "img":
            assert str(attributes["src"]).startswith("data:image/svg+xml;base64,")
            assert attributes["alt"]
        if tag == "a" and not str(attributes["href"]).startswith("#?"):
            assert str(attributes["href"])[1:] in ids
    assert not re.search(r"url\(|@import", built["html"])


def test_page_says_what_an_engineer_needs(everything: Path, built: dict[str, str]) -> None:
    """Verdict, place, bits, Δloss in words, memory, environment, and what to do next, in order."""
    page = Page(built["html"])
    for expected in (
        "step 7, rank 1, weights of layers.2.attn.qkv.weight",
        "0x7fc00000", "0x80000000", "the sign of a zero", "Δloss is zero", "2.500 times",
        "differs in torch", "2.13.0", f"harness rerun {everything}/cases/dp2-attn",
        f"Find the cause harness bisect {everything}/cases/dp2-attn Repeat",
        "weights: differs first at step 7 on rank 1, in 13 of 42 (step, rank) pairs",
        "What to do next", "Wall time 1.2 s", "A/A speed",
        "needs 6 GPUs", "last line", "rank 1 did not finish within 300 s", "6 failed",
    ):  # fmt: skip
        assert expected in page.text
    assert page.text.index("dp2-attn") < page.text.index("dp1-attn")
    details = built["html"].split('id="dp2-attn"')[1].split('<details class="case')[0]
    order = ["First difference", "harness bisect", "harness rerun", "<svg", "Checks that failed"]
    assert sorted(order, key=details.index) == order


def test_hostile_text_is_text(built: dict[str, str]) -> None:
    """Markup, template code and control characters of a log are shown, not obeyed."""
    words = Page(built["html"]).text
    assert "<script>alert(1)</script>" in words
    assert "{{ 7*7 }}" in words
    for text in built.values():
        assert not set(text) & set("\x00\x07\x1b\u202e")
    assert "\\ud800" not in built["json"]


def test_the_page_shows_the_history_and_says_when_it_is_full(
    summary: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its budgets a page packs, draws no more, shortens, and stays small for its cases."""
    bad = next(case for case in summary.cases if case.spec.id == "dp2-attn")
    many = tuple(
        dataclasses.replace(bad, spec=dataclasses.replace(bad.spec, id=f"c{number}"))
        for number in range(150)
    )
    own = CasePast(letters="pf", step_us=(1, 2), peak_kib=(1, 1), words=("first bad today",))
    report = dataclasses.replace(
        summary, cases=many, counts=summary.counts | {"failed": 150},
        past=Past(cases={"c0": own}, flaky=()),
    )  # fmt: skip
    monkeypatch.setattr(html, "MAX_DRAWN_CASES", 2)
    monkeypatch.setattr(html, "INLINE_BYTES", 150_000)
    monkeypatch.setattr(html, "PACKED_BYTES", 600_000)
    text = html.render(report)
    page = Page(text)
    inline = text.count("<h4>First difference</h4>")
    bodies = page.packed()
    assert 2 < inline < 30
    assert len(bodies) + inline == 150
    assert all("harness rerun" in body for body in bodies.values())
    assert 0 < sum("The page is full" in body for body in bodies.values()) < 150
    assert len(text.encode()) < 400_000
    assert [case[2] for case in json.loads(page.scripts["index"])["cases"]] == [0] * 150
    assert json.loads(page.scripts["past"])["cases"] == {"0": ["pf", [1, 2], [1, 1]]}
    assert page.text.count("first bad today") == 1


# --- JUnit ------------------------------------------------------------------------------------


def test_junit_is_valid_and_maps_outcomes(built: dict[str, str], writer: Writer) -> None:
    """By the schema and by a parser that is not ours no case without a pass looks passed."""
    SCHEMA.validate(built["junit"])
    (suite,) = junitparser.JUnitXml.fromstring(built["junit"].encode())
    kinds = {case.name: [type(result).__name__ for result in case.result] for case in suite}
    assert kinds["dp1-attn"] == []
    assert kinds["dp2-attn"] == ["Failure"]
    assert kinds["dp6-attn"] == ["Skipped"]
    for name in ("dp5-attn", "dp6-full_iteration", "dp4-full_iteration", "dp5-full_iteration"):
        assert kinds[name] == ["Error"]
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (13, 6, 4, 1)
    out = ET.fromstring(built["junit"]).find(".//testcase[@name='dp2-attn']/system-out")
    assert out is not None
    assert "harness rerun" in str(out.text)


@pytest.mark.parametrize("skipped", [False, True], ids=["no cases", "skips alone"])
def test_a_run_that_proves_nothing_is_not_green(writer: Writer, skipped: bool) -> None:
    """A plan without cases is an error in JUnit; every format says that nothing passed."""
    if skipped:
        writer.add("a", 1, "attn", skip_reason="no GPU")
    texts = texts_of(writer.write())
    SCHEMA.validate(texts["junit"])
    assert ET.fromstring(texts["junit"]).get("errors") == str(int(not skipped))
    assert "No case passed" in texts["markdown"]
    assert ("No case passed" if skipped else "nothing ran") in texts["html"]
    assert json.loads(texts["json"])["exit_code"] == 5


# --- attempts, notes --------------------------------------------------------------------------


def fail_first(folder: Path, case_id: str, leg: str) -> None:
    """Put an attempt before the one that a run's folder holds."""
    taken = "EADDRINUSE, address already in use"
    error = records.error(step=-1, type="DistNetworkError", message=taken)
    with RunFolder.open(folder) as opened:
        spec = getattr(next(case for case in opened.cases if case.id == case_id), leg)
        current = opened.run_folder(spec.key)
        kept = current.with_name(f"{current.name}.attempt0")
        begin_run(kept, spec)
        (kept / "rank0.jsonl").write_text(dumps(error) + "\n")
        changes: dict[str, Any] = {
            "what": "crashed", "message": "rank 0 before its first step: EADDRINUSE, <b>",
            "culprit_rank": 0,
        }  # fmt: skip
        save_outcome(kept, dataclasses.replace(opened.load_run(spec).outcome, **changes))


def test_attempts_that_the_machine_failed_are_in_every_format(writer: Writer) -> None:
    """A pass that took two attempts is told as such; once normalised, the report is the same."""
    writer.add("dp2-attn", 2, "attn")
    writer.add("dp3-attn", 3, "attn", candidate={"peak": 100 << 20})
    folder = writer.write()
    before = normalised(build(folder)["json"], folder)
    fail_first(folder, "dp2-attn", "candidate")
    fail_first(folder, "dp3-attn", "control")
    texts = texts_of(folder)
    assert normalised(folder / "report" / "report.json", folder) == before
    words = "passed on attempt 2 (candidate: port_in_use)"
    assert words in texts["html"]
    assert "EADDRINUSE" in texts["html"]
    assert markdown.escape(words) in texts["markdown"]
    assert "Needed another attempt: 2" in texts["markdown"]
    (case,) = [c for c in json.loads(texts["json"])["cases"] if c["id"] == "dp2-attn"]
    (attempt,) = case["attempts"]["candidate"]
    assert (attempt["signature"], attempt["what"]) == ("port_in_use", "crashed")
    SCHEMA.validate(texts["junit"])
    (suite,) = junitparser.JUnitXml.fromstring(texts["junit"].encode())
    assert (suite.tests, suite.failures, suite.errors) == (2, 1, 0)
    cases = {case.name: ParsedCase.fromelem(case) for case in suite}
    (flaky,) = cases["dp2-attn"].iterchildren(FlakyError)
    (rerun,) = cases["dp3-attn"].iterchildren(RerunError)
    assert cases["dp2-attn"].is_passed
    assert cases["dp3-attn"].is_failure
    assert (flaky.type, rerun.type) == ("port_in_use", "port_in_use")
    assert str(flaky.message).startswith("attempt 1 of the candidate: rank 0 before")
    # The order that strict readers ask for.
    order = [each.tag for each in ET.fromstring(texts["junit"]).iter("testcase").__next__()]
    assert order == ["failure", "rerunError", "system-out"]


# --- JSON -------------------------------------------------------------------------------------


def test_json_fits_its_schema(built: dict[str, str]) -> None:
    """Of every outcome it is valid; with an unknown key, or one away, it is not."""
    schema = json_report.schema()
    Draft202012Validator.check_schema(schema)
    plain, check = json.loads(built["json"]), Draft202012Validator(schema)
    check.validate(plain)
    for place in ((), ("cases", 0), ("cases", 0, "verdict"), ("run",)):
        damaged = copy.deepcopy(plain)
        at: Any = damaged
        for key in place:
            at = at[key]
        at["unknown"] = 1
        assert not check.is_valid(damaged)
        del at["unknown"]
        del at[next(iter(at))]
        assert not check.is_valid(damaged)


# --- Markdown ---------------------------------------------------------------------------------


def test_markdown_cannot_be_broken_out_of(built: dict[str, str]) -> None:
    """Rows keep their cells, tags and mentions are inert, fences outlast their text."""
    lines = built["markdown"].splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 15
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    fence = ""
    for line in lines:
        if match := re.match(r"`{3,}", line):
            if not fence:
                fence = match[0]
            elif line == fence:
                fence = ""
        elif not fence:
            assert not any(bad in line for bad in ("<script", "@everyone", "https://example"))
    assert fence == ""
    assert markdown.escape("a|b<i>@x") == r"a\|b&lt;i&gt;&#64;x"
    assert markdown.fenced("a\n````\nb").startswith("`````text\n")


def test_markdown_fits_a_comment_and_the_summary_of_a_step(writer: Writer, tmp_path: Path) -> None:
    """Hundreds of wordy failures stay within the limit, and what was left out is counted."""
    for number in range(200):
        writer.add(f"c{number}", 1, "attn", skip_reason="later")
    folder = writer.write()
    with RunFolder.open(folder) as opened:
        for case in opened.cases:
            wordy: dict[str, Any] = {"what": "diverged", "message": "漢|" * 900}
            opened.save_verdict(records.verdict(case.id, outcome="failed", **wordy), case)
    report = summarise(folder)
    text = markdown.render(report).encode()
    assert len(text) <= markdown.MAX_BYTES
    listed = text.count(b"error | c") + text.count(b"failed | c")
    assert f"*{200 - listed} more cases are in the page: {200 - listed} failed.*".encode() in text
    in_full = text.count(b"<details>")
    assert f"*{200 - in_full} more failing cases in full are in the page.*".encode() in text
    assert 0 < in_full == text.count(b"</details>")
    place = tmp_path / "summary.md"
    limit = markdown.MAX_STEP_FILE_BYTES
    for room, expected in ((6000, "more cases are in the page"), (100, "no room is left here")):
        place.write_text("x" * (limit - room))
        markdown.add_to_step(place, report)
        assert expected in place.read_text()[limit - room :]
        assert place.stat().st_size <= 1 << 20


def test_unwritable_place_is_one_line(tmp_path: Path, writer: Writer) -> None:
    """A report folder that cannot be made, or leads elsewhere, is an error in one line."""
    place = writer.write() / "report"
    place.write_text("in the way")
    with pytest.raises(Infrastructure, match="report"):
        build(place.parent)
    place.unlink()
    place.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="report is a link"):
        build(place.parent)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# --- hostile text is fit to be shown once it has been cleaned ---


MARK = "\N{REPLACEMENT CHARACTER}"


@given(st.text(st.characters(exclude_categories=())))
def test_cleaned_text_survives_xml_and_cleaning(text: str) -> None:
    """It encodes, is read back from XML unchanged, and one line stays one line."""
    shown, line = clean(text), one_line(text)
    element = ET.Element("t")
    element.text = shown
    assert (ET.fromstring(ET.tostring(element, "unicode").encode()).text or "") == shown
    assert one_line(line) == line
    assert line.isprintable() or not line.isascii()


def test_controls_are_seen_and_plain_text_is_left_alone() -> None:
    """Colours vanish; NUL, bell, a lone surrogate and a direction override become a mark."""
    shown = clean(HOSTILE)
    assert "red" in shown
    assert "[31m" not in shown
    assert shown.count(MARK) == 4
    assert clean("Δ é 漢\t1\r\n2\r3") == "Δ é 漢\t1\n2\n3"
    assert well_formed("a\ud800Δ") == "a?Δ"


def test_long_text_is_cut_and_says_so(tmp_path: Path) -> None:
    """A megabyte is clipped with what was cut, quickly; of a file the last lines are kept whole."""
    began = time.process_time()
    assert clean("x" * 1_000_000, 10) == "x" * 10 + "… (999990 more characters)"
    assert clean("\x1b]x" * 300_000, 1_000_000) == "x" * 300_000
    assert time.process_time() - began < 2.0
    path = tmp_path / "rank0.stderr"
    path.write_bytes(b"first\n" + b"y" * 500_000 + b"\n\xff\xfelast\x00\n")
    assert tail(path).splitlines()[-1] == f"{MARK * 2}last{MARK}"
    assert len(tail(path)) < 1000
    assert tail(tmp_path / "absent") == tail(tmp_path) == ""
